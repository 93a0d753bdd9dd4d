"""One call that appends, turns and attends: the bits of the three calls, in every layout, and nothing half done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import BACKENDS, same_bits

import kilat
from kilat.kv import Cache

HEADS, DIM = 2, 12
LAYOUTS = pytest.mark.parametrize("layout", ["cached", "page3", "hnd", "int8", "float8_e4m3fn"])


def filled(layout: str) -> Cache:
    """Three sequences of 5, 0 and 9 tokens, room for 24, NaN where nothing is stored."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 0, 9], dtype=torch.int32)
    k, v = (torch.randn(3, 24, HEADS, DIM, generator=g) for _ in range(2))
    for x in (k, v):
        x[torch.arange(24)[None] >= lengths[:, None]] = torch.nan
    if layout == "page3":
        table = torch.randperm(24, generator=g).int().reshape(3, 8)
        pages = [torch.empty(24, 3, HEADS, DIM) for _ in range(2)]
        for page, x in zip(pages, (k, v), strict=True):
            page[table.long()] = x.reshape(3, 8, 3, HEADS, DIM)
        return kilat.PagedCache(*pages, table, lengths)
    if layout == "hnd":
        return kilat.ContiguousCache.heads_first(*(x.transpose(1, 2).contiguous() for x in (k, v)), lengths)
    if layout == "cached":
        return kilat.ContiguousCache(k, v, lengths)
    stored = [x.nan_to_num(0.1).mul(20).round().to(getattr(torch, layout)) for x in (k, v)]
    return kilat.ContiguousCache(*stored, lengths, *(torch.full((3, 24, HEADS), 0.05) for _ in range(2)))


def rotary(interleaved: bool = False) -> kilat.Rotary:
    angle = torch.arange(24.0)[:, None] * torch.tensor([1.0, 0.2, 0.04])
    return kilat.Rotary(angle.cos(), angle.sin(), interleaved=interleaved)


def new(*tokens: int, heads: int = HEADS) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(tokens) + heads)
    return torch.randn(*tokens, heads, DIM, generator=g)


def state(cache: Cache) -> list[torch.Tensor]:
    tensors = (cache.k, cache.v, cache.lengths, cache.k_scale, cache.v_scale)
    return [x.clone() for x in tensors if x is not None]


def unchanged(cache: Cache, before: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(state(cache), before, strict=True))


@LAYOUTS
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_one_call_is_three(layout: str, backend: str, turned: bool, ragged: bool) -> None:
    one, three = filled(layout), filled(layout)
    tokens = (11,) if ragged else (3, 4)
    cu = torch.tensor([0, 1, 8, 9], dtype=torch.int32) if ragged else None  # decode, prefill, decode, and a tail of 2
    q, k, v = new(*tokens, heads=4), new(*tokens), new(*tokens) + 1
    turn = rotary(interleaved=ragged) if turned else None
    mask, sink = kilat.Window(7, 0, first=2), torch.randn(4)
    options: dict[str, Any] = {"mask": mask, "sink": sink, "scores": [kilat.Softcap(3.0)], "return_lse": True}
    options |= {"cu_seqlens_q": cu, "backend": backend}
    got = kilat.cached_attention(q, one, k_new=k, v_new=v, rotary=turn, **options)
    before = three.lengths.clone()
    three.append(k, v, cu_seqlens_new=cu, rotary=turn)
    if turn is not None and cu is not None:
        positions = [int(before[b]) + t for b in range(3) for t in range(int(cu[b + 1] - cu[b]))]
        q = torch.cat((turn.apply(q[:9], torch.tensor(positions)), q[9:]))
    elif turn is not None:
        q = turn.apply(q, before)
    wanted = kilat.cached_attention(q, three, **options)
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
    assert unchanged(one, state(three))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_turned_decode_is_the_rows_of_a_turned_prefill(backend: str) -> None:
    q, k, v = new(3, 9, heads=4), new(3, 9), new(3, 9) + 1
    empty = torch.zeros(3, dtype=torch.int32)
    cache = kilat.ContiguousCache(*(torch.full((3, 9, HEADS, DIM), torch.nan) for _ in range(2)), empty)
    outs = [
        kilat.cached_attention(q[:, i], cache, k_new=k[:, i], v_new=v[:, i], rotary=rotary(), backend=backend)
        for i in (slice(0, 5), slice(5, 6), slice(6, 9))
    ]
    turned = [rotary().apply(x, 0).double() for x in (q, k)]
    wanted = kilat.attention(*turned, v.double(), mask=kilat.Causal(), backend="reference")
    torch.testing.assert_close(torch.cat(outs, 1).double(), wanted, rtol=1e-5, atol=1e-5)


def test_rotary_alone_turns_q() -> None:
    cache, q = filled("cached"), new(3, 1, heads=4)
    cache.lengths[1] = 1
    before = state(cache)
    got = kilat.cached_attention(q, cache, rotary=rotary())
    assert same_bits(got, kilat.cached_attention(rotary().apply(q, cache.lengths - 1), cache))
    assert unchanged(cache, before)


def test_numpy() -> None:
    arrays, tensors = filled("cached"), filled("cached")
    cache = kilat.ContiguousCache(*(x.numpy() for x in (arrays.k, arrays.v, arrays.lengths)))
    q, k = new(3, 2, heads=4), new(3, 2)
    turn = rotary()
    got = kilat.cached_attention(
        q.numpy(), cache, k_new=k.numpy(), v_new=k.numpy(), rotary=kilat.Rotary(turn.cos.numpy(), turn.sin.numpy())
    )
    assert same_bits(torch.from_numpy(got), kilat.cached_attention(q, tensors, k_new=k, v_new=k, rotary=turn))
    assert arrays.lengths.tolist() == [7, 2, 11]
    with pytest.raises(TypeError, match="k_new and the cache must be both torch tensors or both NumPy arrays"):
        kilat.cached_attention(q.numpy(), cache, k_new=k, v_new=k)


def test_a_compiled_step() -> None:
    turn = rotary()

    def step(q: Any, new: Any, k: Any, v: Any, lengths: Any) -> Any:
        cache = kilat.ContiguousCache(k, v, lengths)
        return kilat.cached_attention(q, cache, k_new=new, v_new=new, rotary=turn, backend="reference")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = [[torch.zeros(2, 8, HEADS, DIM) for _ in "kv"] + [torch.tensor([0, 4]).int()] for _ in range(2)]
    for n in range(2):
        q, k = new(2, 1 + n, heads=4), new(2, 1 + n)
        assert torch.equal(compiled(q, k, *caches[0]), step(q, k, *caches[1]))
        assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))


@LAYOUTS
def test_errors_come_before_anything_is_written(layout: str) -> None:
    cache = filled(layout)
    before = state(cache)
    q, k = new(3, 2, heads=4), new(3, 2)
    good: dict[str, Any] = {"k_new": k, "v_new": k}
    short = kilat.Rotary(torch.ones(10, 3), torch.ones(10, 3))
    ragged = {"k_new": k.flatten(0, 1), "v_new": k.flatten(0, 1)}
    for kind, change, text in (
        (ValueError, {"v_new": None}, "v_new must be given"),
        (ValueError, {"k_new": None}, "v_new must be None where k_new is"),
        (ValueError, {"k_new": k[:, :1], "v_new": k[:, :1]}, r"k_new must have q's tokens; got k_new=\[3, 1, 2, 12\]"),
        (ValueError, {"k_new": k[:, :, :1], "v_new": k[:, :, :1]}, r"k_new must end in \[2, 12\]"),
        (TypeError, {"k_new": 1}, "k_new must be a torch tensor"),
        (TypeError, {"rotary": 3}, "rotary must be a Rotary or None"),
        (ValueError, {"rotary": short}, "positions must lie in the rotary tables"),
        (TypeError, {"mask": "causal"}, "mask must be a kilat mask"),
        (ValueError, {"sink": torch.zeros(3)}, "sink must be"),
        (ValueError, {"scores": [kilat.Bias(torch.zeros(1, 1, 1, 10))]}, "bias"),
        (ValueError, {"mask": kilat.Documents(torch.zeros(10, dtype=torch.int32))}, "10"),
        (ValueError, {"num_splits": 0}, "num_splits must be at least 1"),
        (ValueError, {"out": torch.zeros(3)}, "out must be"),
        (ValueError, {"backend": "nothing"}, "backend must be"),
        (ValueError, {"k_new": k.clone().requires_grad_()}, "k_new must not require grad"),
    ):
        with pytest.raises(kind, match=text):
            kilat.cached_attention(q, cache, **good | change)
        assert unchanged(cache, before), text
    with pytest.raises(ValueError, match="caches are forward only: q must not require grad"):
        kilat.cached_attention(q.clone().requires_grad_(), cache, **good)
    for offsets in ([0, 2, 1, 6], [0, 2, 4, 7], [1, 2, 4, 6]):
        cu = torch.tensor(offsets, dtype=torch.int32)
        with pytest.raises(ValueError, match="cu_seqlens"):
            kilat.cached_attention(q.flatten(0, 1), cache, cu_seqlens_q=cu, **ragged)
    many = new(3, 16)
    with pytest.raises(ValueError, match=r"stay within the capacity; got lengths\[2\]=9, new=16, capacity=24"):
        kilat.cached_attention(new(3, 16, heads=4), cache, k_new=many, v_new=many)
    assert unchanged(cache, before)


def test_read_only_arrays_are_refused() -> None:
    k, v = (np.zeros((1, 4, HEADS, DIM), np.float32) for _ in range(2))
    k.flags.writeable = False
    cache = kilat.ContiguousCache(k, v, np.zeros(1, np.int32))
    x = np.zeros((1, 1, HEADS, DIM), np.float32)
    with pytest.raises(ValueError, match="an append needs writable arrays"):
        kilat.cached_attention(x, cache, k_new=x, v_new=x)
