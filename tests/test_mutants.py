"""The planted bugs still fit the sources; running them is `scripts/mutation_check.py`'s job (make test-all)."""

from pathlib import Path

import pytest

from tests.mutants import MUTANTS, Mutant

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "kilat"


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}:{m.new[:30]}")
def test_text_stands_exactly_once(mutant: Mutant) -> None:
    assert (PACKAGE / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
