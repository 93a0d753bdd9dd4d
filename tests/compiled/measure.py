"""Write budgets.json: what the configurations take, the largest of this run and the table as it stands.

python tests/compiled/measure.py [--anew] [text]: run it under each Triton that is supported; --anew forgets the table
first; text: only configurations whose name holds it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "kilat-triton-budgets"))
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

TABLE = Path(__file__).with_name("budgets.json")


def main() -> None:
    """Measure every configuration on every architecture."""
    from configurations import PAIRS, results

    table: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    if "--anew" not in sys.argv and TABLE.exists():
        table = json.loads(TABLE.read_text())
    texts = [text for text in sys.argv[1:] if not text.startswith("--")]
    for name, architecture in PAIRS:
        if not all(text in name for text in texts):
            continue
        for kernel, found in results(name, architecture).items():
            known = table.setdefault(architecture, {}).setdefault(name, {}).setdefault(kernel, found)
            for key, value in found.items():  # matrix instructions are a floor, all else is a ceiling
                known[key] = (min if key == "matrix" else max)(known[key], value)
            print(architecture, name, kernel, found, flush=True)
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
