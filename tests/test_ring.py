"""Ring caches: attention equals that over a cache of everything, at true positions, in memory that does not grow."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from helpers import BACKENDS, same_bits, threads

import kilat
from kilat.kv import Cache

HEADS, DIM, FIRST, SLOTS = 2, 10, 3, 24
TYPES = pytest.mark.parametrize("stored", ["float32", "int8", "float8_e4m3fn"])


def caches(stored: str, capacity: int = 300, batch: int = 3) -> tuple[Cache, Cache]:
    """A ring and a cache of everything, empty, full of NaN or of the byte 0x7F."""

    def tensors(tokens: int) -> list[torch.Tensor]:
        shape = (batch, tokens, HEADS)
        pair = [torch.full((*shape, DIM), torch.nan) for _ in "kv"]
        if stored != "float32":
            pair = [torch.full((*shape, DIM), 0x7F, dtype=torch.uint8).view(getattr(torch, stored)) for _ in "kv"]
        return pair

    def scales(tokens: int) -> list[torch.Tensor]:
        return [] if stored == "float32" else [torch.full((batch, tokens, HEADS), torch.nan) for _ in "kv"]

    def lengths() -> torch.Tensor:
        return torch.zeros(batch, dtype=torch.int32)

    ring = kilat.RingCache(*tensors(SLOTS), lengths(), FIRST, *scales(SLOTS))
    return ring, kilat.ContiguousCache(*tensors(capacity), lengths(), *scales(capacity))


def new(*tokens: int, heads: int = HEADS) -> torch.Tensor:
    return torch.randn(*tokens, heads, DIM, generator=torch.Generator().manual_seed(sum(tokens) + heads))


def attend(q: torch.Tensor, cache: Cache, backend: str, **options: Any) -> tuple[torch.Tensor, ...]:
    with threads(1 if backend == "reference" else torch.get_num_threads()):
        return kilat.cached_attention(q, cache, return_lse=True, backend=backend, **options)


@TYPES
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ring_equals_a_cache_of_everything(stored: str, backend: str) -> None:
    """Decode, speculative steps and pieces of a prompt, round the ring several times; scores know true positions."""
    ring, full = caches(stored)
    g = torch.Generator().manual_seed(5)
    slopes, sink = torch.rand(4, generator=g) * 0.1, torch.randn(4, generator=g)
    scores = [kilat.Alibi(slopes), kilat.Score(lambda s, b, h, q_pos, j: s + 0.01 * q_pos - 0.002 * j * h)]
    for step, count in enumerate([1, 4, 1, 11, 11, 1, 6, 11, 1, 1, 11]):
        # Sequences of different lengths: the second starts late, the third stands still at times.
        counts = [count, count if step > 3 else 0, count if step % 2 else 0]
        cu = torch.tensor([0, *counts]).cumsum(0).int()
        q, k, v = new(int(cu[-1]), heads=4), new(int(cu[-1])), new(int(cu[-1])) + 1
        mask = kilat.Window(10, 0, first=FIRST if step % 2 else 1)
        mask = mask & kilat.Causal() if step % 3 else mask
        options: dict[str, Any] = {"k_new": k, "v_new": v, "cu_seqlens_q": cu, "mask": mask}
        options |= {"scores": scores, "sink": sink, "num_splits": step % 3 or None}
        got, wanted = attend(q, ring, backend, **options), attend(q, full, backend, **options)
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
    assert torch.equal(ring.lengths, full.lengths)
    assert ring.lengths.tolist() == [59, 42, 28]  # all beyond the slots


def test_the_places_of_tokens() -> None:
    ring, _ = caches("float32", batch=1)
    k = torch.arange(100.0)[None, :, None, None].expand(1, 100, HEADS, DIM)
    for start, stop in ((0, 2), (2, 30), (30, 31), (31, 100)):  # 28 and 69 new tokens: more than a turn
        ring.append(k[:, start:stop], k[:, start:stop])
        held = [t for t in range(stop) if t < FIRST or t >= stop - (SLOTS - FIRST)]
        places = torch.full((SLOTS,), torch.nan)
        for t in held:
            places[t if t < FIRST else FIRST + (t - FIRST) % (SLOTS - FIRST)] = t
        torch.testing.assert_close(ring.k[0, :, 0, 0], places, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ring.k.nan_to_num(), ring.v.nan_to_num())


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotary_positions_are_true_ones(backend: str) -> None:
    """Turned keys behind the ring's first turn: the same bits as in a cache of everything."""
    angle = torch.arange(60.0)[:, None] * torch.tensor([1.0, 0.1])
    rotary = kilat.Rotary(angle.cos(), angle.sin())
    ring, full = caches("float32")
    for count in (9, 9, 9, 9, 9, 1):
        q, k = new(3, count, heads=4), new(3, count)
        options: dict[str, Any] = {"k_new": k, "v_new": k, "rotary": rotary, "mask": kilat.Window(12, 0, first=FIRST)}
        got, wanted = attend(q, ring, backend, **options), attend(q, full, backend, **options)
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))


def test_heads_first_and_numpy() -> None:
    ring, _ = caches("float32")
    arrays = [torch.full((3, HEADS, SLOTS, DIM), torch.nan).numpy() for _ in "kv"]
    other = kilat.RingCache.heads_first(*arrays, torch.zeros(3, dtype=torch.int32).numpy(), FIRST)
    mask = kilat.Window(20, 0, first=FIRST)
    for _ in range(4):
        k, q = new(3, 13), new(3, 1, heads=4)
        ring.append(k, k)
        other.append(k.numpy(), k.numpy())
        got = kilat.cached_attention(q.numpy(), other, mask=mask)
        assert same_bits(torch.from_numpy(got), kilat.cached_attention(q, ring, mask=mask))


def test_a_million_tokens_cost_what_a_window_does() -> None:
    ring, _ = caches("float32", batch=1)
    ring.k.normal_()
    ring.v.normal_()
    mask, q, times = kilat.Window(20, 0, first=FIRST), new(1, 1, heads=4), []
    for length in (SLOTS, 1_000_000, 2**30):
        ring.lengths.fill_(length)
        kilat.cached_attention(q, ring, mask=mask)
        start = time.perf_counter()
        for _ in range(20):
            kilat.cached_attention(q, ring, mask=mask)
        times.append(time.perf_counter() - start)
    assert max(times) < 1.0 + 20 * times[0]  # by all keys it would be minutes


def test_a_compiled_step() -> None:
    def step(q: Any, k_new: Any, k: Any, v: Any, lengths: Any) -> Any:
        cache = kilat.RingCache(k, v, lengths, 2)
        mask = kilat.Window(4, 0, first=2)
        return kilat.cached_attention(q, cache, k_new=k_new, v_new=k_new, mask=mask, backend="reference")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    states = [[torch.zeros(2, 9, HEADS, DIM) for _ in "kv"] + [torch.tensor([0, 40]).int()] for _ in range(2)]
    for _ in range(2):
        q, k = new(2, 2, heads=4), new(2, 2)
        assert torch.equal(compiled(q, k, *states[0]), step(q, k, *states[1]))
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_what_is_refused() -> None:
    ring, _ = caches("float32")
    k = new(3, 5)
    ring.append(k, k)
    around = SLOTS - FIRST
    for mask, count in (
        (kilat.Causal(), 1),
        (None, 1),
        (kilat.Window(None, 0, first=FIRST), 1),
        (kilat.Window(around, 0), 1),
        (kilat.Window(around - 1, 0, first=FIRST + 1), 1),
        (kilat.Window(around - 1, 0), 2),
    ):
        with pytest.raises(ValueError, match=r"a ring needs a Window with first <= 3 and left \+ seqlen_q <= 21"):
            kilat.cached_attention(new(3, count, heads=4), ring, mask=mask)
    kilat.cached_attention(new(3, 1, heads=4), ring, mask=kilat.Window(around - 1, 0))
    kilat.cached_attention(new(3, 2, heads=4), ring, mask=kilat.Window(around - 2, None, first=FIRST))
    cu = torch.tensor([0, 1, 4, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"at most 2 queries of a sequence for this ring; got longest=3"):
        kilat.cached_attention(new(5, heads=4), ring, cu_seqlens_q=cu, mask=kilat.Window(around - 2, 0))
    n = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="first must be less than the slots of a sequence; got first=24, slots=24"):
        kilat.RingCache(ring.k, ring.v, n, SLOTS)
    with pytest.raises(ValueError, match="first must be at least 0"):
        kilat.RingCache(ring.k, ring.v, n, -1)
    with pytest.raises(ValueError, match="k and v must have the same batch"):
        kilat.RingCache(ring.k, ring.v[:2], n, 1)


def test_other_backends_never_see_a_ring() -> None:
    """A backend must say that it reads rings; those that do not are told of with the reason."""
    ring, _ = caches("float32")
    with pytest.raises(NotImplementedError, match="ring_first=3: the triton backend reads no ring caches"):
        kilat.cached_attention(new(3, 1, heads=4), ring, mask=kilat.Window(5, 0), backend="triton")
