"""The Triton decode kernel, interpreted: layouts, groups, splits, stored types; within the budgets of the oracle."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases import Case
from helpers import Call, build, expectation, poisoned_memory, same_bits
from torch import Tensor

import kilat
from kilat import accuracy
from kilat.backends.triton import BACKEND, decode_launch, launch
from kilat.backends.triton.arguments import Form
from kilat.backends.triton.tiles_decode import number_of
from kilat.masks.ranges import visible

LENGTHS = (0, 1, 130, 63)
BASE = Case("decode", "paged", 4, heads=(6, 2), seqlen=(1, 160), lengths_kv=LENGTHS, mask="causal", head_dim=24)


@contextmanager
def launched(monkeypatch: pytest.MonkeyPatch) -> Generator[list[str]]:
    """The names of the kernels that are launched."""
    names: list[str] = []
    start = launch.start

    def recorded(kernel: Any, *rest: Any) -> None:
        names.append(kernel.fn.__name__)
        start(kernel, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(launch, "start", recorded)
        yield names


def check(call: Call, **more: Any) -> None:
    """A call within its budget; what it allocates is full of NaN."""
    with poisoned_memory():
        out, lse = call.run("triton", **more)
    expectation(call).check({"out": out, "lse": lse})


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_page_sizes(page_size: int, dtype: str) -> None:
    check(build(replace(BASE, page_size=page_size, dtype=dtype)), num_splits=2)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (8, 1), (20, 1)])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_groups(heads: tuple[int, int], seqlen_q: int) -> None:
    """Rows of a group and of several queries share tiles, and fill none, one or several of them."""
    check(build(replace(BASE, layout="cached", heads=heads, seqlen=(seqlen_q, 160), sink=True)))


@pytest.mark.parametrize("mask", ["none", "window", "window_left", "window_first", "documents_batch", "everything"])
@pytest.mark.parametrize("scores", ["none", "all"])
def test_masks_and_scores(mask: str, scores: str) -> None:
    case = replace(BASE, heads=(4, 1), mask=mask, scores=scores, seqlen=(3, 160), dtype="float16")
    check(build(replace(case, batch=3, lengths_kv=(1, 130, 63))), num_splits=3)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7, 100])
@pytest.mark.parametrize("strides", ["contiguous", "heads_first"])
def test_splits(num_splits: int | None, strides: str) -> None:
    case = replace(BASE, layout="cached", batch=3, seqlen=(2, 700), lengths_kv=(700, 5, 333), strides=strides)
    check(build(replace(case, sink=True, scores="alibi_batch")), num_splits=num_splits)


@pytest.mark.parametrize("lengths_q", [(1, 1, 1, 1), (0, 40, 1, 7), (3, 0, 0, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_ragged_queries(lengths_q: tuple[int, ...], batch_invariant: bool) -> None:
    """Prefill, drafts and decode in one call, and tokens that no sequence owns."""
    case = replace(BASE, lengths_q=lengths_q, tail=2, lengths_kv=(2, 130, 63, 9), sink=True)
    check(build(case), batch_invariant=batch_invariant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_out_dtype_and_scale(dtype: str) -> None:
    for scale in (0.0, -0.7):
        check(build(replace(BASE, dtype=dtype, out_dtype="float32", scale=scale, sink=True)), num_splits=3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("heads", [(4, 1), (20, 1)])
def test_values_inside_the_keys(dtype: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed MLA; the tile of K is read once."""
    case = replace(BASE, heads=heads, head_dim=576, head_dim_v=512, dtype=dtype, batch=2, lengths_kv=(130, 33))
    call = build(replace(case, scale=0.1))
    call.v = call.k[..., :512]
    table, lengths = call.lengths["page_table"], call.lengths["seqlens_kv"]
    cache = kilat.PagedCache(call.k, None, table, lengths, head_dim_v=512)
    shared: list[bool] = []
    shape = decode_launch._shape

    def seen(*args: Any) -> Any:
        shared.append(args[3])
        return shape(*args)

    monkeypatch.setattr(decode_launch, "_shape", seen)
    out, lse = kilat.cached_attention(call.q, cache, scale=0.1, return_lse=True, backend="triton")
    expectation(call).check({"out": out, "lse": lse})
    assert shared == [True]


def _stored(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in a small type; what no sequence owns holds NaN, or where there is none the largest number."""
    y = x.double() / scale[..., None]
    if dtype == torch.int8:
        y = y.nan_to_num(127.0).round().clamp(-127, 127)
    return y.to(dtype)


INT8, E4M3 = torch.int8, torch.float8_e4m3fn
QUANTISED = [
    (INT8, "float32", False, "cached", 1),
    (INT8, "bfloat16", True, "paged", 3),
    (E4M3, "float32", True, "cached", 3),
    (E4M3, "bfloat16", False, "paged", 20),
]


@pytest.mark.parametrize(("stored", "dtype", "by_token", "layout", "seqlen_q"), QUANTISED, ids=str)
def test_quantised(stored: torch.dtype, dtype: str, by_token: bool, layout: str, seqlen_q: int) -> None:
    """Scales of heads, and of tokens and heads (NaN where no token is); many queries, too."""
    lengths = (0, 40, 99)
    case = replace(BASE, layout=layout, batch=3, seqlen=(seqlen_q, 112), dtype=dtype, sink=True, lengths_kv=lengths)
    problem, op = build(case).core()
    g = torch.Generator().manual_seed(3)
    shape = op.k.shape[:3] if by_token else op.k.shape[2:3]
    scales = [(torch.rand(shape, generator=g) + 0.5) * 0.02 for _ in range(2)]
    k, v = (_stored(x, scale, stored) for x, scale in zip((op.k, op.v), scales, strict=True))
    exact = replace(op, **{n: x.double() * s[..., None] for n, x, s in zip("kv", (k, v), scales, strict=True)})
    if by_token:
        scales = [scale.masked_fill(torch.isnan(op.k[..., 0].float()), torch.nan) for scale in scales]
    given = replace(op, k=k, v=v, k_scale=scales[0], v_scale=scales[1])
    with poisoned_memory():
        out, lse = BACKEND.forward(replace(problem, quantised=True, num_splits=2, memo={}), given)
    accuracy.expected(problem, exact).check({"out": out, "lse": lse})


@pytest.mark.parametrize("by_token", [False, True])
def test_quantised_values_inside_the_keys(by_token: bool) -> None:
    """Values that are a part of the keys have their scales."""
    case = replace(BASE, heads=(3, 1), batch=2, seqlen=(1, 96), head_dim=40, head_dim_v=32, dtype="float32")
    problem, op = build(replace(case, lengths_kv=(70, 33))).core()
    scale = torch.full(op.k.shape[:3] if by_token else (1,), 0.03)
    k = _stored(op.k, scale, INT8)
    exact = k.double() * scale[..., None]
    exact = replace(op, k=exact, v=exact[..., :32])
    given = replace(op, k=k, v=k[..., :32], k_scale=scale)
    out, lse = BACKEND.forward(replace(problem, quantised=True, memo={}), given)
    accuracy.expected(problem, exact).check({"out": out, "lse": lse})


@triton.jit
def _numbers_kernel(bits: Any, out: Any, FORM: tl.constexpr) -> None:
    n = tl.arange(0, 256)
    tl.store(out + n, number_of(tl.load(bits + n), FORM).to(tl.float32))


@pytest.mark.parametrize("stored", ["e4m3", "e4m3 bits"])
def test_every_e4m3_number(stored: Any) -> None:
    bits, out = torch.arange(256).to(torch.uint8), torch.empty(256)
    _numbers_kernel[(1,)](bits, out, Form(16, 0, False, stored, False, False))
    wanted = bits.view(torch.float8_e4m3fn).float()
    if stored == "e4m3":  # the interpreter knows no NaN of that type
        out, wanted = out[~wanted.isnan()], wanted[~wanted.isnan()]
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["cached", "paged"])
@pytest.mark.parametrize("ragged", [False, True])
def test_batch_invariant(layout: str, ragged: bool) -> None:
    """A request's bits are the same alone and among others, of whatever number and capacity."""
    case = replace(BASE, layout=layout, batch=3, seqlen=(2, 2300), lengths_kv=(2300, 9, 1100), head_dim=16, sink=True)
    call = build(replace(case, lengths_q=(2, 2, 2) if ragged else None))
    out, lse = call.run("triton", batch_invariant=True)
    for b in (0, 2):
        one = build(case)
        length = int(call.lengths["seqlens_kv"][b])
        one.q = call.q[2 * b : 2 * b + 2] if ragged else call.q[b : b + 1]
        one.lengths = {name: x[b : b + 1] for name, x in call.lengths.items() if not name.startswith("cu_")}
        if ragged:
            one.lengths["cu_seqlens_q"] = torch.tensor([0, 2], dtype=torch.int32)
        if layout == "cached":
            one.k, one.v = call.k[b : b + 1, :length], call.v[b : b + 1, :length]
        else:
            one.k, one.v = call.k, call.v
        alone, alone_lse = one.run("triton", batch_invariant=True)
        assert same_bits(alone, out[2 * b : 2 * b + 2] if ragged else out[b : b + 1])
        assert same_bits(alone_lse, lse[:, 2 * b : 2 * b + 2] if ragged else lse[b : b + 1])


def test_a_part_is_a_share_of_all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence among short ones is cut, and those are not; with splits by number each is."""
    parts: list[Tensor] = []
    empty = torch.empty

    def kept(*args: Any, **more: Any) -> Tensor:
        made = empty(*args, **more)
        if more.get("dtype") == torch.int32:
            parts.append(made)
        return made

    call = build(replace(BASE, layout="cached", batch=4, heads=(1, 1), seqlen=(1, 1300), lengths_kv=(1300, 20, 30, 0)))
    for num_splits, wanted in ((None, [4, 1, 1, 1]), (3, [3, 1, 1, 1])):
        parts.clear()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", kept)
            call.run("triton", num_splits=num_splits)
        assert parts[0][:4, 1].tolist() == wanted


def test_which_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries are decoded, many take the forward, unless only the decode kernel can; one part needs no merge."""
    many = replace(BASE, heads=(2, 1), seqlen=(65, 160), lengths_kv=(160, 130, 100, 70))
    with launched(monkeypatch) as names:
        build(BASE).run("triton", num_splits=1)
        build(BASE).run("triton", num_splits=2)
        build(many).run("triton")
    assert names == ["decode_kernel", "decode_kernel", "merge_kernel", "forward_kernel"]


def test_tables_that_lie() -> None:
    """Bad lengths, offsets and pages never reach outside the tensors (the interpreter's loads would fault)."""
    problem, op = build(replace(BASE, lengths_q=(1, 1, 1, 1), heads=(2, 1))).core()
    for lengths in ([-5, 2**31 - 1, 161, 7], [2**31 - 1] * 4):
        op.seqlens_kv = torch.tensor(lengths, dtype=torch.int32)
        for offsets in ([0, 90, -40, 2**31 - 1, 4], [7, 3, 1, 0, -(2**31)]):
            op.cu_seqlens_q = torch.tensor(offsets, dtype=torch.int32)
            for num_splits in (None, 3):
                BACKEND.forward(replace(problem, num_splits=num_splits, memo={}), op)


def test_a_row_that_is_not_finite_stays_so() -> None:
    """NaN in a query, in whichever part, reaches out and lse of its row and of no other."""
    case = replace(BASE, layout="cached", lengths_kv=(150, 130, 100, 70), seqlen=(2, 160))
    clean, _ = build(case).run("triton", num_splits=3)
    call = build(case)
    call.q[1, 0, 3, 0] = torch.nan
    out, lse = call.run("triton", num_splits=3)
    assert torch.isnan(out[1, 0, 3]).all()
    assert torch.isnan(lse[1, 3, 0])
    out[1, 0, 3] = clean[1, 0, 3]
    assert same_bits(out, clean)


@pytest.mark.parametrize("mask", ["window_left", "window_first", "key_range"])
def test_a_sick_value_that_no_row_sees(mask: str) -> None:
    """A value that is not finite, at a key that nobody sees: its block is visited, and no bit changes."""
    case = replace(BASE, layout="cached", batch=2, lengths_kv=(150, 130), mask=mask)
    call = build(case)
    clean, _ = call.run("triton")
    for b, length in enumerate((150, 130)):
        hidden = torch.from_numpy(~visible(call.mask, b, 0, 1, length)[0])
        assert hidden.any()
        call.v[b, :length][hidden] = torch.nan
    assert same_bits(call.run("triton")[0], clean)
