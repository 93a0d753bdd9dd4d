"""The pages that say how to add a backend and a cache do what they say: their code runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kilat.backends import registry
from kilat.planning import clear

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(page: str) -> str:
    """The Python of a page, each line where it stands in the page, so that a traceback points there."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        first = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines)


@pytest.mark.parametrize("page", ["add-a-backend", "add-a-cache"])
def test_the_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks(page)
    assert code.count("import kilat") == 1
    names: dict[str, Any] = {"__name__": page}
    try:
        exec(compile(code, f"docs/{page}.md", "exec"), names)
    finally:
        registry.BY_NAME_ONLY.pop("plain", None)
        registry._found.pop("plain", None)
        clear()
    if page == "add-a-backend":
        assert "plain" in capsys.readouterr().out


def test_the_glossary_has_every_size_and_letter() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    semantics = (DOCS / "semantics.md").read_text(encoding="utf-8")
    names = semantics.split("## Names for these things")[1].split("##")[0].split("`")[1].replace("\n", " ")
    missing = [name for name in re.split(r"[,\s]+", names) if f"`{name}`" not in text and name]
    assert missing == []
