"""Masks as objects: constructors, errors, structure and text, tensors that change, masks of a user, pictures."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kilat.masks import (
    Causal,
    Chunked,
    Dense,
    Documents,
    KeyRange,
    Mask,
    Predicate,
    Prefix,
    Window,
    bounds,
    decompose,
    depends_on_batch,
    ops,
)
from kilat.masks.ranges import visible
from kilat.structure import SLOT
from kilat.symbolic import Traced, Var

INT32_MAX = 2**31 - 1
IDS = torch.tensor([0, 0, 1, 1, -1, 2], dtype=torch.int32)
LENGTHS = torch.tensor([2, 0], dtype=torch.int32)
TABLE = torch.randn(3, 4)


ALL: list[Mask] = [
    Causal(),
    Causal(align="top_left"),
    Window(3, None),
    Window(0, INT32_MAX, first=4),
    Prefix(LENGTHS),
    Chunked(4),
    KeyRange(LENGTHS, LENGTHS + 3),
    Documents(IDS),
    Documents(IDS[None]),
    Dense(torch.ones(6, 6, dtype=torch.bool)),
    Predicate(lambda b, h, q_pos, j: (q_pos - j) % 2 == 0),
    Predicate(lambda b, h, q_pos, j, t: t[h, q_pos - j] > 0, (TABLE,)),
    Causal() & Window(2, 2, first=1) & Documents(IDS) & Predicate(lambda b, h, q, j, t: t[h, j] > 0, (TABLE,)),
]


@pytest.mark.parametrize("mask", ALL, ids=lambda m: m.name)
def test_structure_text_and_pickle(mask: Mask) -> None:
    structure = mask.structure()
    assert all(t is SLOT for t in structure.tensors())
    assert len(structure.tensors()) == len(mask.tensors())
    assert hash(structure) == hash(mask.structure())
    assert structure == mask.structure()
    assert Mask.from_text(mask.to_text()) == structure
    assert structure.to_text() == mask.to_text()
    assert pickle.loads(pickle.dumps(structure)) == structure
    assert structure.structure() == structure
    again = structure.with_tensors(mask.tensors())
    assert again == mask
    assert hash(again) == hash(mask)
    assert all(x is y for x, y in zip(again.tensors(), mask.tensors(), strict=True))
    assert pickle.loads(pickle.dumps(mask)).structure() == structure
    assert decompose(structure).predicates == decompose(mask).predicates
    with pytest.raises(ValueError, match="tensors must be"):
        mask.with_tensors((*mask.tensors(), IDS))


def test_different_masks_differ() -> None:
    structures = [m.structure() for m in ALL]
    # Documents of one axis and of two have the same structure: the shape is a run-time value
    assert len(set(structures)) == len(ALL) - 1
    assert len({m.to_text() for m in ALL}) == len(ALL) - 1
    assert len({m.name for m in ALL}) == len(ALL) - 2
    assert Causal() != Window(None, 0)
    assert Prefix(LENGTHS) == Prefix(LENGTHS)
    assert Prefix(LENGTHS) != Prefix(LENGTHS.clone())
    assert Causal() & Chunked(2) == Causal() & Chunked(2)
    assert Causal() & Chunked(2) != Chunked(2) & Causal()


def test_text_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="must name a mask or a score"):
        Mask.from_text("('class','builtins:int')")
    with pytest.raises(TypeError, match="must describe a Mask"):
        Mask.from_text("('class','kilat.scores.softcap:Softcap','cap',('float','0x1.0p+0'))")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Causal(align="left"), ValueError, r"align must be .* got align='left'"),
        (lambda: Window(-1, 0), ValueError, r"left must be at least 0; got left=-1"),
        (lambda: Window(0, -2), ValueError, r"right must be at least 0; got right=-2"),
        (lambda: Window(0, 0, first=-3), ValueError, r"first must be at least 0; got first=-3"),
        (lambda: Window(0, 0, first=None), TypeError, r"first must be an int; got first=None"),
        (lambda: Window(1.5, 0), TypeError, r"left must be an int; got left=1.5"),
        (lambda: Window(True, 0), TypeError, r"left must be an int; got left=True"),
        (lambda: Chunked(0), ValueError, r"size must be at least 1; got size=0"),
        (lambda: Chunked("4"), TypeError, r"size must be an int; got size='4'"),
        (lambda: Prefix(torch.tensor([1, 2])), TypeError, r"int32 \(use .to\(.*\)\); got lengths.dtype=torch.int64"),
        (lambda: Prefix(torch.zeros(1, 1, dtype=torch.int32)), ValueError, r"lengths must have 1 axes; got .*\(1, 1\)"),
        (lambda: Prefix(3), TypeError, r"lengths must be a tensor or an array; got int"),
        (lambda: Prefix([0.5]), TypeError, r"lengths must hold ints"),
        (lambda: KeyRange(LENGTHS, None), TypeError, r"stop must be a tensor or an array; got NoneType"),
        (lambda: KeyRange(np.zeros(2), LENGTHS), TypeError, r"int32 \(use .astype\(.*\)\); got start.dtype=float64"),
        (lambda: Documents(torch.zeros((), dtype=torch.int32)), ValueError, r"ids must have 1 or 2 axes"),
        (lambda: Dense(torch.zeros(2, 2)), TypeError, r"mask must be bool .* Bias\); got mask.dtype=torch.float32"),
        (lambda: Dense([[True]]), TypeError, r"mask must be a tensor or an array; got list"),
        (lambda: Dense(np.ones((1,) * 5, bool)), ValueError, r"mask must have at most 4 axes; got .*\(1, 1, 1, 1, 1\)"),
        (lambda: Predicate(lambda b, h, q, j: q - j), TypeError, r"must return a bool; got a int"),
        (lambda: Predicate(lambda q, j: q > j), TypeError, r"fn must take \(b, h, q_pos, j\)"),
        (lambda: Predicate(lambda b, h, q, j: q > 1 and j > 1), TypeError, r"kilat.math.where"),
        (lambda: Causal() & 3, TypeError, r"unsupported operand"),
    ],
)
def test_wrong_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Prefix(LENGTHS), r"lengths must be \[batch=3\]; got lengths.shape=\(2,\)"),
        (KeyRange([0, 0, 0], [1, 1]), r"stop must be \[batch=3\]"),
        (Documents(IDS), r"ids must be \[seqlen_kv\] or \[batch, seqlen_kv\]; got ids.shape=\(6,\).*seqlen_kv=7"),
        (Documents(IDS[None].expand(2, 6)), r"ids must be"),
        (Dense(torch.ones(2, 1, 5, 7, dtype=torch.bool)), r"mask must be broadcastable to \[batch=3, num_heads_q=4"),
        (Dense(torch.ones(4, 7, dtype=torch.bool)), r"seqlen_q=5, seqlen_kv=7\]; got mask.shape=\(1, 1, 4, 7\)"),
        (Causal() & (Chunked(2) & Prefix(LENGTHS)), r"lengths must be"),
    ],
)
def test_tensors_that_do_not_fit_the_call(mask: Mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask.check(3, 4, 5, 7)


def test_tensors_that_fit_the_call() -> None:
    long_ids = np.zeros((3, 9), np.int32)
    for mask in (Causal(), Prefix([1, 2, 3]), Prefix([1]), Documents(long_ids[0, :7]), Documents(long_ids[:, :7])):
        mask.check(3, 4, 5, 7)
    for shape in ((7,), (5, 1), (5, 7), (4, 1, 1), (3, 1, 5, 7), (1, 4, 1, 7)):
        Dense(np.ones(shape, np.bool_)).check(3, 4, 5, 7)
    Documents(long_ids).check(3, 4, 5, 7, exact=False)
    Dense(np.ones((6, 9), np.bool_)).check(3, 4, 5, 7, exact=False)
    with pytest.raises(ValueError, match="ids must be"):
        Documents(long_ids).check(3, 4, 5, 7)
    with pytest.raises(ValueError, match="mask must be"):
        Dense(np.ones((5, 6), np.bool_)).check(3, 4, 5, 7, exact=False)


def test_documents_must_be_contiguous_in_what_is_used() -> None:
    ids = Documents([3, 3, 1, 3])
    assert visible(ids, 0, 0, 3, 3).tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    with pytest.raises(ValueError, match=r"ids must be contiguous.* got id 3 in several places, b=0"):
        bounds(ids, 0, 4, 4)
    with pytest.raises(ValueError, match="contiguous"):
        bounds(Documents([0, -1, 0]), 0, 3, 3)
    bounds(Documents([-1, 0, -1, -2, -1]), 0, 5, 5)  # ids below 0 may come anywhere
    with pytest.raises(ValueError, match=r"ids must have an entry for every key; got 4 ids, kv_len=5"):
        bounds(ids, 0, 5, 5)


def test_tensors_may_change_in_place() -> None:
    ids = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    mask = Documents(ids) & Causal()
    before = bounds(mask, 0, 4, 4)
    ids[1] = 1
    after = bounds(mask, 0, 4, 4)
    assert before[0, 0].tolist() == [0, 0, 2, 2]
    assert after[0, 0].tolist() == [0, 1, 1, 1]


def test_bounds_without_tensors_are_kept_and_bounded() -> None:
    from kilat.masks import core

    mask = Causal() & Window(5, None)
    assert bounds(mask, 0, 64, 64) is bounds(Causal() & Window(5, None), 1, 64, 64)
    assert bounds(mask, 0, 64, 64) is not bounds(mask, 0, 64, 65)
    with pytest.raises(ValueError, match="read-only"):
        bounds(mask, 0, 64, 64)[0, 0, 0] = 1
    for q_len in range(1 << 20, (1 << 20) + 8):
        bounds(Causal(), 0, q_len, q_len)
    assert sum(a.nbytes for a in core._known.bounds.values()) <= core._CACHE_BYTES


@pytest.mark.parametrize("left", [0, 1, 5, 2**30, INT32_MAX - 1, INT32_MAX])
@pytest.mark.parametrize("right", [0, 2, INT32_MAX])
def test_wide_windows_do_not_overflow(left: int, right: int) -> None:
    for q_len, kv_len in ((4, 4), (7, 3), (1, 9)):
        i, j = np.arange(q_len)[:, None], np.arange(kv_len)
        q_pos = i + kv_len - q_len
        wanted = (q_pos - left <= j) & (j <= q_pos + right)
        assert (visible(Window(left, right), 0, 0, q_len, kv_len) == wanted).all()
        # beside another mask of two intervals, the window is a condition and computes in 32 bits
        both = Window(left, right, first=1) & Window(None, None, first=INT32_MAX)
        assert (visible(both, 0, 0, q_len, kv_len) == (wanted | (j < 1))).all()
        both = Window(None, None, first=INT32_MAX) & Window(left, right, first=1)
        assert len(decompose(both).predicates) == 1
        assert (visible(both, 0, 0, q_len, kv_len) == (wanted | (j < 1))).all()


def test_decompose_places_tensors() -> None:
    entries = torch.ones(4, 4, dtype=torch.bool)
    mask = (
        Prefix(LENGTHS)
        & Dense(entries)
        & Causal()
        & Predicate(lambda b, h, q, j, t: t[h, j] > 0, (TABLE,))
        & Dense(~entries)
    )
    parts = decompose(mask)
    assert parts.interval == Prefix(LENGTHS) & Causal()
    assert parts.dense == (1, 3)
    assert [p.tensors for p in parts.predicates] == [(2,)]
    assert decompose(None) == (None, (), ())
    with pytest.raises(TypeError, match=r"use decompose\(mask\)\.interval"):
        bounds(mask, 0, 4, 4)

    class Neither(Mask):
        pass

    with pytest.raises(TypeError, match="mask must be an IntervalMask, Dense, Predicate"):
        decompose(Neither())


def test_what_depends_on_the_batch() -> None:
    assert not depends_on_batch(None)
    assert not depends_on_batch(Causal() & Window(1, 1) & Documents(IDS))
    assert depends_on_batch(Causal() & Prefix(LENGTHS))
    assert depends_on_batch(Documents(IDS[None].expand(2, 6)))
    assert depends_on_batch(Documents(IDS).structure())
    assert not depends_on_batch(Predicate(lambda b, h, q, j: h > j))
    assert Predicate(lambda b, h, q, j: h > j).depends_on_head()


def test_functions_can_be_given_other_meanings() -> None:
    calls: list[str] = []

    def fdiv(a: int, b: int) -> int:
        calls.append("fdiv")
        return a // b

    p = Chunked(4).parameters(0, 10, 10)
    assert ops.rebind(Chunked.kv_stop, {"fdiv": fdiv})(5, 0, p) == 8
    assert Chunked.kv_stop(-1, 0, p) == 0
    assert calls == ["fdiv"]
    traced = Chunked.kv_stop(Traced(Var("q_pos")), None, p)
    assert repr(traced.expr) == "add(mul(floordiv(q_pos, 4), 4), 4)"
    with pytest.raises(TypeError, match="plain functions"):
        ops.rebind(len, {})


def test_pictures(tmp_path: Path) -> None:
    picture = Window(1, 0, first=1).plot(4)
    assert str(picture).splitlines()[1:] == ["█···", "██··", "███·", "█·██"]
    assert str(picture).splitlines()[0].startswith("window_1_0_first1")
    assert str(Prefix(LENGTHS).plot(2, 3, batch=1)).splitlines()[1:] == ["██·", "███"]
    picture.save(tmp_path / "mask.svg")
    svg = (tmp_path / "mask.svg").read_text()
    assert svg.count("<rect") == 16
    assert svg.count("#2f6db5") == 9
    (Causal() & Chunked(2)).plot(3).save(tmp_path / "both.svg")
    assert "causal&amp;chunked_2" in (tmp_path / "both.svg").read_text()
    picture.save(str(tmp_path / "mask.txt"))
    assert (tmp_path / "mask.txt").read_text(encoding="utf-8") == f"{picture}\n"
    with pytest.raises(ValueError, match=r"path must end in \.svg or \.txt"):
        picture.save(tmp_path / "mask.png")


def test_torch_compile_follows_masks() -> None:
    torch._dynamo.reset()
    outside = Causal() & Window(3, None)

    def fn(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, str]:
        mask = outside & Documents(ids) & Predicate(lambda b, h, q, j, t: t[j] > h, (x,))
        mask.check(1, 1, 6, 6)
        return sum(t.sum() for t in mask.tensors()) + x, mask.structure().to_text()

    x = torch.ones(6)
    total, text = torch.compile(fn, backend="eager", fullgraph=True)(x, IDS)
    assert torch.equal(total, fn(x, IDS)[0])
    assert text == fn(x, IDS)[1]


def test_masks_need_no_torch() -> None:
    source = str(Path(__file__).parent.parent / "src")
    lines = [
        "import sys, types",
        f"sys.path[:0] = {[source, *sys.path]!r}",
        "kilat = sys.modules['kilat'] = types.ModuleType('kilat')",  # the package itself may import torch
        f"kilat.__path__ = [{source + '/kilat'!r}]",
        "import kilat.masks, kilat.scores, kilat.dropout, kilat.symbolic",
        "assert 'torch' not in sys.modules",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
