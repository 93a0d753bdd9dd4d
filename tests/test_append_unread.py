"""Appending without reading lengths and offsets, as on a GPU: the same result, no wait for the device, none astray."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import kilat
from kilat.kv import Cache, append

HEADS, DIM = 2, 6
KINDS = pytest.mark.parametrize("kind", ["contiguous", "paged", "heads_first", "int8", "ring"])


class NoReads(TorchDispatchMode):
    """Fails where a value would be copied to the host, or a shape depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_local_scalar_dense" in name or "nonzero" in name:
            raise AssertionError(f"{name} waits for the device")
        if name.startswith(("aten.index.", "aten.index_put")) and any(x.dtype == torch.bool for x in args[1]):
            raise AssertionError(f"{name} by a mask waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "_elsewhere", lambda cache: True)


def make(kind: str) -> Cache:
    """Three sequences of 2, 0 and 5 tokens, room for 8 (the ring: 3 first ones and the last 5)."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2, 0, 5], dtype=torch.int32)
    k, v = (torch.randn(3, 8, HEADS, DIM, generator=g) for _ in "kv")
    if kind == "paged":
        table = torch.tensor([[3, 1, 2**31 - 1, -7], [5, 99, 99, 99], [0, 7, 2, 4]], dtype=torch.int32)
        return kilat.PagedCache(*(x.reshape(12, 2, HEADS, DIM) for x in (k, v)), table, lengths)
    if kind == "heads_first":
        return kilat.ContiguousCache.heads_first(*(x.transpose(1, 2).contiguous() for x in (k, v)), lengths)
    if kind == "int8":
        scales = [torch.rand(3, 8, HEADS, generator=g) for _ in "kv"]
        return kilat.ContiguousCache(*((x * 40).to(torch.int8) for x in (k, v)), lengths, *scales)
    return kilat.RingCache(k, v, lengths, 3) if kind == "ring" else kilat.ContiguousCache(k, v, lengths)


def state(cache: Cache) -> list[torch.Tensor]:
    return [x.clone() for x in (cache.k, cache.v, cache.lengths, cache.k_scale, cache.v_scale) if x is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def new(*tokens: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(sum(tokens))
    return [torch.randn(*tokens, HEADS, DIM, generator=g) for _ in "kv"]


CALLS: dict[str, dict[str, Any]] = {
    "dense": {"new": new(3, 2)},
    "some": {"new": new(2, 2), "batch_index": torch.tensor([2, 0])},
    "ragged": {"new": new(7), "cu_seqlens_new": torch.tensor([0, 2, 2, 4], dtype=torch.int32)},  # a tail of 3
    "ragged-some": {"new": new(5), "cu_seqlens_new": torch.tensor([0, 2]).int(), "batch_index": torch.tensor([1])},
    "nothing": {"new": new(4), "cu_seqlens_new": torch.zeros(4, dtype=torch.int32)},
    "no-tokens": {"new": new(3, 0)},
    "nobody": {"new": new(4), "cu_seqlens_new": torch.zeros(1).int(), "batch_index": torch.zeros(0).long()},
}


@KINDS
@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_with_values_read(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = dict(CALLS[name])
    k, v = call.pop("new")
    one, other = make(kind), make(kind)
    for cache in (one, other):
        if kind == "paged":  # pages that the tokens reach
            cache.page_table[0, 2], cache.page_table[1, 1] = 9, 10  # type: ignore[attr-defined]
    one.append(k, v, **call)
    monkeypatch.setattr(append, "_elsewhere", lambda cache: True)
    with NoReads():
        other.append(k, v, **call)
    assert same(state(one), state(other))
    assert not other.overflow


@KINDS
@pytest.mark.usefixtures("unread")
def test_what_fits_is_written(kind: str) -> None:
    """Sequences of 2, 0 and 5 tokens get 4, 9 and 1 more: one too many for the second, in its own place or none."""
    cache, before = make(kind), state(make(kind))
    k, v = new(16)
    offsets = torch.tensor([0, 4, 13, 14], dtype=torch.int32)
    with NoReads():
        cache.append(k, v, cu_seqlens_new=offsets)
    ring = kind == "ring"
    assert bool(cache.overflow) is not ring
    assert cache.lengths.tolist() == ([6, 9, 6] if ring else [6, 8, 6])
    if kind in ("contiguous", "heads_first"):
        wanted = before[0].clone()
        wanted[0, 2:6], wanted[1], wanted[2, 5] = k[:4], k[4:12], k[13]
        assert torch.equal(cache.k, wanted)
    if ring:
        assert torch.equal(cache.k[1], k[4:13][[0, 1, 2, 8, 4, 5, 6, 7]])  # the ninth over the fourth


@KINDS
@pytest.mark.usefixtures("unread")
def test_full_sequences_stay(kind: str) -> None:
    cache = make(kind)
    cache.lengths.fill_(cache.capacity)
    before = state(cache)
    with NoReads():
        cache.append(*new(3, 2))
    assert bool(cache.overflow)
    assert same(state(cache), before)


@pytest.mark.usefixtures("unread")
def test_nothing_leads_outside() -> None:
    """Wild lengths, offsets and page tables touch the cache at most, and never raise."""
    for lengths, offsets in (
        ([-3, 4, 10**9], [0, 1, 2, 3]),
        ([0, 0, 0], [0, 900, -5, 10**9]),
        ([7, 7, 7], [5, 1, 0, 2]),
    ):
        for kind in ("contiguous", "paged", "int8", "ring"):
            cache = make(kind)
            cache.lengths.copy_(torch.tensor(lengths))
            cache.append(*new(6), cu_seqlens_new=torch.tensor(offsets, dtype=torch.int32))
            cache.append(*new(3, 2))
