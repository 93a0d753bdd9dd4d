"""Masks written by a user: as good as the built-in ones, and refused with a reason where they are wrong."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kilat.masks import Causal, IntervalMask, Mask, Window, bounds, decompose, ops
from kilat.masks.ranges import block_classes, dense_mask, visible


@dataclass(frozen=True)
class Staircase(IntervalMask):
    """A mask of a user: a query sees everything up to the end of its own step."""

    size: int

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return ops.fdiv(q_pos, p.size) * p.size + p.size


@dataclass(frozen=True, slots=True)
class Slotted(Staircase):
    """A mask of a user whose class the decorator replaces."""

    more: int = 1


class Undecorated(IntervalMask):
    """A mask of a user without fields needs no decorator."""

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return q_pos + 2


@dataclass(frozen=True, eq=False)
class Shifted(IntervalMask):
    """A mask of a user with a tensor [batch] and a table [batch, n], and two intervals."""

    shift: Any
    table: Any
    first: int = 1
    tensor_fields: ClassVar[tuple[str, ...]] = ("shift", "table")

    @staticmethod
    def kv_start(q_pos: Any, i: Any, p: Any) -> Any:
        return ops.maximum(q_pos - p.shift, p.first)

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return q_pos + ops.lookup(p.table, ops.maximum(q_pos, 0))

    @staticmethod
    def first_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return q_pos * 0 + p.first

    def intervals(self) -> Any:
        return ((lambda q_pos, i, p: q_pos * 0, self.first_stop), (self.kv_start, self.kv_stop))


SHIFTED = Shifted(np.array([1, 3], np.int32), np.array([[0, 0, 1, 1, 2], [2, 2, 2, 3, 3]], np.int32))


@pytest.mark.parametrize(
    "mask", [Staircase(3), Slotted(3), Undecorated(), SHIFTED, Staircase(2) & Causal()], ids=lambda m: m.name
)
def test_structure_text_and_pickle(mask: Mask) -> None:
    structure = mask.structure()
    assert Mask.from_text(mask.to_text()) == structure
    assert pickle.loads(pickle.dumps(structure)) == structure
    assert structure.with_tensors(mask.tensors()) == mask
    assert hash(structure.with_tensors(mask.tensors())) == hash(mask)


def test_different_masks_differ() -> None:
    assert Staircase(3) != Staircase(2)
    assert Shifted(SHIFTED.shift, SHIFTED.table, 2) != SHIFTED
    assert Shifted(SHIFTED.shift.copy(), SHIFTED.table) != SHIFTED
    assert SHIFTED.structure() == Shifted(SHIFTED.shift.copy(), SHIFTED.table).structure()


def test_a_mask_of_a_user() -> None:
    wanted = np.array([[(i // 3) * 3 + 3 > j for j in range(7)] for i in range(7)])
    assert (visible(Staircase(3), 0, 0, 7, 7) == wanted).all()
    assert (visible(Staircase(3) & Causal(), 0, 0, 7, 7) == np.tri(7, dtype=bool)).all()
    assert Undecorated() == Undecorated()
    assert str(Undecorated().plot(2, 4)).splitlines()[1:] == ["████", "████"]
    hiding = Undecorated()
    hiding.size = 3  # type: ignore[attr-defined]
    for use in (hash, Mask.to_text, lambda m: bounds(m, 0, 2, 2)):
        with pytest.raises(TypeError, match=r"Undecorated must be a frozen dataclass with fields.* got \['size'\]"):
            use(hiding)
    assert Staircase(3).name == "staircase_3"
    assert Mask.from_text(Staircase(3).to_text()) == Staircase(3)
    assert block_classes(Staircase(2), 1, 1, 4, 4, 2, 2).tolist() == [[[[2, 0], [2, 2]]]]


def test_a_mask_of_a_user_with_tensors_and_two_intervals() -> None:
    shift, table = SHIFTED.shift, SHIFTED.table

    def truth(b: int, q: int, j: int) -> bool:
        return j < 1 or q - shift[b] <= j < q + table[b, min(max(q, 0), 4)]

    for q_len, kv_len in ((5, 5), (7, 4), (2, 5)):
        wanted = np.array(
            [[[truth(b, i + kv_len - q_len, j) for j in range(kv_len)] for i in range(q_len)] for b in (0, 1)]
        )
        assert (dense_mask(SHIFTED, 2, 1, q_len, kv_len)[:, 0] == wanted).all()
        # as a condition beside another mask of two intervals
        both = Window(None, None, first=1) & SHIFTED
        assert [p.tensors for p in decompose(both).predicates] == [(0, 1)]
        assert (dense_mask(both, 2, 1, q_len, kv_len)[:, 0] == wanted).all()


def test_bounds_of_a_user_that_decrease_are_refused() -> None:
    @dataclass(frozen=True)
    class Backwards(IntervalMask):
        @staticmethod
        def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
            return 3 - q_pos

    @dataclass(frozen=True)
    class Half(IntervalMask):
        @staticmethod
        def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
            return q_pos / 2

    with pytest.raises(ValueError, match=r"kv_stop of backwards must not decrease; got 3 at q_pos=0 and 2 at q_pos=1"):
        bounds(Backwards(), 0, 3, 3)
    with pytest.raises(TypeError, match="kv_stop of half must be made of integers; got dtype float64"):
        bounds(Half(), 0, 3, 3)
    with pytest.raises(NotImplementedError, match="must define kv_stop"):
        bounds(IntervalMask(), 0, 3, 3)


def test_two_masks_of_two_intervals_cannot_use_the_query_index() -> None:
    @dataclass(frozen=True)
    class ByIndex(IntervalMask):
        @staticmethod
        def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
            return i + 1

        def intervals(self) -> Any:
            return ((self.kv_start, self.kv_stop), (self.kv_start, self.kv_stop))

    assert (visible(ByIndex() & Causal(), 0, 0, 3, 3) == np.tri(3, dtype=bool)).all()
    # intervals of a user may share keys, which count once: half a block twice is not a full block
    assert block_classes(ByIndex(), 1, 1, 4, 4, 1, 2).tolist() == [[[[1, 0], [2, 0], [2, 1], [2, 2]]]]
    with pytest.raises(ValueError, match="must not use the query index i; got byindex"):
        decompose(Window(1, 1, first=1) & ByIndex())


def test_text_of_a_mask_names_its_class_across_processes(tmp_path: Path) -> None:
    (tmp_path / "their_masks.py").write_text(
        "from dataclasses import dataclass\nfrom kilat.masks import IntervalMask\n\n"
        "@dataclass(frozen=True)\nclass Half(IntervalMask):\n"
        "    @staticmethod\n    def kv_stop(q_pos, i, p):\n        return q_pos // 2\n"
    )
    inner = "'left',('class','their_masks:Half'),'right',('class','kilat.masks.causal:Causal','align','top_left')"
    text = f"('class','kilat.masks.core:And',{inner})"
    code = f"from kilat.masks import Mask; m = Mask.from_text({text!r}); assert m.to_text() == {text!r}; print(m.name)"
    paths = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "half&causal_top_left"


def test_fields_that_are_no_constants_cannot_be_written() -> None:
    @dataclass(frozen=True)
    class Odd(IntervalMask):
        thing: Any

    with pytest.raises(TypeError, match=r"Odd\.thing must hold numbers"):
        Odd([1]).to_text()


def test_masks_have_no_union_and_no_complement_and_say_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"combine with `&` only; write `causal \| \.\.\.` as a Predicate"):
        Causal() | Window(1, 1)
    with pytest.raises(TypeError, match=r"no complement; write `~causal` as a Predicate"):
        ~Causal()
