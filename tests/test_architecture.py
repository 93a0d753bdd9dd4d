"""The code keeps the house rules, and every house rule bites."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import house_rules
import pytest
from house_rules import RULES
from source_tree import Source, Violation

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "examples", "benchmarks", "scripts")

Rule = Callable[[Source], Iterator[Violation]]


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """Every Python file of the repository."""
    modules = frozenset(_module_name(path) for path in (ROOT / "src").rglob("*.py"))
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"), modules) for path in paths]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Rule, sources: list[Source]) -> None:
    violations = [violation for source in sources for violation in rule(source)]
    if violations:
        pytest.fail("\n".join(["", *map(str, violations)]), pytrace=False)


MODULES = frozenset({"kilat.api", "kilat.config", "kilat.masks", "kilat.backends.cpu", "kilat.backends.triton"})
LONG_BODY = "\n".join(f"    x{i} = {i}" for i in range(61))
PLANTED = [
    (house_rules.file_length, "src/kilat/api.py", "x = 1\n" * 401, 400),
    (house_rules.function_length, "src/kilat/api.py", f"def f():\n{LONG_BODY}\n", 1),
    (house_rules.parameter_count, "src/kilat/problem.py", "def f(a, b, c, d, e, f, g, h, i): ...\n", 1),
    (house_rules.parameter_count, "src/kilat/problem.py", "def _f(a, b, c, d, e, f, g): ...\n", 1),
    (house_rules.parameter_count, "src/kilat/problem.py", "def f(*, a, b, c, d, e, f, g, h, i, j, k, l, m): ...\n", 1),
    (house_rules.import_arrows, "src/kilat/masks/core.py", "\nfrom kilat import api\n", 2),
    (house_rules.import_arrows, "src/kilat/masks/core.py", "\nfrom ..api import attention\n", 2),
    (house_rules.import_arrows, "src/kilat/dispatch.py", "def f():\n    import kilat\n", 2),
    (house_rules.import_arrows, "src/kilat/masks/core.py", "import kilat.numerics\n", 1),
    (house_rules.import_arrows, "src/kilat/surprise.py", "", 1),
    (house_rules.backends_are_strangers, "src/kilat/backends/cpu/launch.py", "from kilat.backends import triton\n", 1),
    (house_rules.heavy_imports, "src/kilat/dispatch.py", "import llvmlite.binding as llvm\n", 1),
    (house_rules.heavy_imports, "src/kilat/masks/core.py", "from torch import Tensor\n", 1),
    (house_rules.environment, "src/kilat/dispatch.py", "import os\nx = os.environ['X']\n", 2),
    (house_rules.environment, "src/kilat/dispatch.py", "from os import getenv\n", 1),
    (house_rules.keyword_catchalls, "src/kilat/api.py", "class A:\n    def f(self, **kwargs): ...\n", 2),
    (house_rules.exceptions, "tests/test_x.py", "try:\n    x = 1\nexcept ValueError:\n    pass\n", 3),
    (house_rules.exceptions, "tests/test_x.py", "try:\n    x = 1\nexcept:\n    x = 2\n", 3),
    (house_rules.exceptions, "tests/test_x.py", "with suppress(Exception):\n    x = 1\n", 1),
    (house_rules.asserts, "src/kilat/api.py", "x = 1\nassert x\n", 2),
    (house_rules.star_imports, "tests/test_x.py", "from os import *\n", 1),
    (house_rules.docstrings, "src/kilat/api.py", '"""A module."""\n\ndef f(): ...\n', 3),
    (house_rules.docstrings, "src/kilat/api.py", "x = 1\n", 1),
]


@pytest.mark.parametrize(("rule", "path", "text", "line"), PLANTED)
def test_the_rule_bites(rule: Rule, path: str, text: str, line: int) -> None:
    violations = list(rule(Source(path, text, MODULES)))
    assert [(v.path, v.line) for v in violations] == [(path, line)]


ALLOWED = [
    (house_rules.function_length, "src/kilat/backends/cpu/forward.py", f"def f(b: Function):\n{LONG_BODY}\n"),
    (house_rules.function_length, "src/kilat/backends/triton/forward.py", f"@triton.jit\ndef f(q):\n{LONG_BODY}\n"),
    (house_rules.import_arrows, "src/kilat/masks/core.py", "from kilat import config\nfrom . import causal\n"),
    (house_rules.import_arrows, "src/kilat/api.py", "from kilat.masks import Causal\n"),
    (house_rules.heavy_imports, "src/kilat/masks/core.py", "if TYPE_CHECKING:\n    from torch import Tensor\n"),
    (house_rules.heavy_imports, "src/kilat/backends/cpu/jit.py", "import llvmlite\n"),
    (house_rules.environment, "src/kilat/config.py", "import os\nx = os.environ['X']\n"),
    (house_rules.exceptions, "src/kilat/api.py", "with suppress(FileNotFoundError):\n    x = 1\n"),
    (house_rules.asserts, "tests/test_x.py", "assert True\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), ALLOWED)
def test_the_rule_lets_good_code_pass(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(Source(path, text, MODULES)))


def test_import_kilat_loads_no_dsl() -> None:
    """`import kilat` costs no compiler: what it adds to `import torch` contains no DSL."""
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import kilat\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(roots & {'llvmlite', 'triton', 'cuda', 'numba', 'matplotlib', 'transformers'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
