"""kilat.plan: calls by a plan have the bits of calls without, and refuse what the plan was not made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BACKENDS, same_bits

import kilat
from kilat import planning
from kilat.kv import Cache

HEADS, DIM = 2, 8


def layer(n: int, kind: str = "paged", batch: int = 2) -> tuple[Cache, torch.Tensor, torch.Tensor]:
    """The cache, q and sink of one layer: 7 and 12 tokens."""
    g = torch.Generator().manual_seed(n)
    k, v = (torch.randn(8, 3, HEADS, DIM, generator=g) for _ in "kv")
    lengths = torch.tensor([7, 12][:batch], dtype=torch.int32)
    if kind == "paged":
        cache: Cache = kilat.PagedCache(k, v, torch.randperm(8, generator=g).int().reshape(2, 4), lengths)
    elif kind == "int8":
        k, v = ((x * 30).to(torch.int8).reshape(2, 12, HEADS, DIM) for x in (k, v))
        cache = kilat.ContiguousCache(k, v, lengths, *(torch.rand(2, 12, HEADS, generator=g) for _ in "kv"))
    else:
        cache = kilat.RingCache(k.reshape(2, 12, HEADS, DIM), v.reshape(2, 12, HEADS, DIM), lengths + n, 2)
    return cache, torch.randn(2, 1, 4, DIM, generator=g), torch.randn(4, generator=g)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["paged", "int8", "ring"])
def test_layers_of_a_model(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has a cache, lengths and a sink of its own; nothing is validated or looked up again."""
    cache, q, sink = layer(0, kind)
    options: dict[str, Any] = {"mask": kilat.Window(5, 0, first=2), "scores": [kilat.Alibi(torch.rand(4))]}
    options |= {"scale": 0.3, "num_splits": 2, "backend": backend}
    made = kilat.plan(q, cache, sink=sink, **options)
    wanted = []
    for n in range(1, 4):
        cache, q, sink = layer(n, kind)
        wanted.append(kilat.cached_attention(q, cache, sink=sink, return_lse=True, **options))
    monkeypatch.setattr(planning, "problem_of", None)
    monkeypatch.setattr(planning, "choose", None)
    for n in range(1, 4):
        cache, q, sink = layer(n, kind)
        got = kilat.cached_attention(q, cache, sink=sink, plan=made, return_lse=True)
        assert all(same_bits(a, b) for a, b in zip(got, wanted[n - 1], strict=True))
    assert backend in repr(made)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decode_loop_by_one_plan(backend: str) -> None:
    """The lengths grow; append, turn and attend in one call."""
    angle = torch.arange(12.0)[:, None] * torch.tensor([1.0, 0.1])
    rotary = kilat.Rotary(angle.cos(), angle.sin())
    states = [layer(0)[0] for _ in range(2)]
    for cache in states:
        cache.lengths.zero_()
    q = torch.randn(5, 2, 1, 4, DIM)
    made = kilat.plan(q[0], states[0], backend=backend)
    for step in q:
        new = step[:, :, :HEADS]
        options: dict[str, Any] = {"k_new": new, "v_new": new, "rotary": rotary}
        got = kilat.cached_attention(step, states[0], plan=made, **options)
        assert same_bits(got, kilat.cached_attention(step, states[1], backend=backend, **options))
    assert states[0].lengths.tolist() == [5, 5]


def test_values_are_checked_at_each_call() -> None:
    cache, q, _ = layer(0)
    made = kilat.plan(q, cache)
    cache.lengths[1] = 13
    with pytest.raises(ValueError, match=r"cache.lengths must be from 0 to capacity; got cache.lengths\[1\]=13"):
        kilat.cached_attention(q, cache, plan=made)


def test_other_tensors_are_refused() -> None:
    cache, q, sink = layer(0)
    made = kilat.plan(q, cache)
    with pytest.raises(ValueError, match=r"q must be such as the plan was made for, torch.float32 \[2, 1, 4, 8\] with"):
        kilat.cached_attention(q.expand(2, 3, 4, DIM), cache, plan=made)
    with pytest.raises(ValueError, match=r"q must be such .*; got q='torch.float64 \[2, 1, 4, 8\]"):
        kilat.cached_attention(q.double(), cache, plan=made)
    with pytest.raises(
        ValueError, match=r"have the tensors q, k, v, seqlens_kv, page_table; got tensors='q, k, v, seqlens"
    ):
        kilat.cached_attention(q, layer(0, "int8")[0], plan=made)
    with pytest.raises(ValueError, match=r"must have the tensors .*; got tensors='q, k, v, sink"):
        kilat.cached_attention(q, cache, sink=sink, plan=made)
    with pytest.raises(ValueError, match=r"got first=2, plan=None"):
        kilat.cached_attention(q, layer(0, "ring")[0], plan=made)
    with pytest.raises(ValueError, match=r"out must be \[2, 1, 4, 8\]"):
        kilat.cached_attention(q, cache, plan=made, out=torch.zeros(3))
    with pytest.raises(ValueError, match="caches are forward only: q must not require grad"):
        kilat.cached_attention(q.clone().requires_grad_(), cache, plan=made)
    for option in ({"mask": kilat.Causal()}, {"mask": None}, {"scale": 1.0}, {"backend": "cpu"}, {"num_splits": 1}):
        (name,) = option
        with pytest.raises(TypeError, match=rf"are the plan's and must not be given beside it; got {name}="):
            kilat.cached_attention(q, cache, plan=made, **option)
    buffer = torch.zeros_like(q)
    assert kilat.cached_attention(q, cache, plan=made, out=buffer) is buffer
    assert same_bits(buffer, kilat.cached_attention(q, cache))


def test_a_plan_raises_what_the_call_would() -> None:
    cache, q, _ = layer(0)
    with pytest.raises(ValueError, match="num_heads_kv must divide num_heads_q"):
        kilat.plan(q[:, :, :3], cache)
    with pytest.raises(ValueError, match="a ring needs a Window"):
        kilat.plan(q, layer(0, "ring")[0])
    with pytest.raises(TypeError, match="cache must be"):
        kilat.plan(q, q)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch_invariant must be True or False"):
        kilat.plan(q, cache, batch_invariant=1)  # type: ignore[arg-type]


def test_numpy_autocast_and_tracing() -> None:
    cache, q, sink = layer(0)
    wanted = kilat.cached_attention(q, cache, sink=sink)
    made = kilat.plan(q, cache, sink=sink)
    assert same_bits(kilat.cached_attention(q, cache, plan=made), wanted)  # the sink of the plan
    arrays = kilat.PagedCache(*(x.numpy() for x in (cache.k, cache.v, cache.page_table, cache.lengths)))  # type: ignore[attr-defined]
    by_arrays = kilat.plan(q.numpy(), arrays, sink=sink.numpy())
    assert same_bits(torch.from_numpy(kilat.cached_attention(q.numpy(), arrays, plan=by_arrays)), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        kept = kilat.plan(q.bfloat16(), cache)
        assert kilat.cached_attention(q.bfloat16(), cache, plan=kept).dtype == torch.float32
    compiled = torch.compile(lambda q: kilat.cached_attention(q, cache, plan=made), backend="eager", fullgraph=True)
    assert same_bits(compiled(q), wanted)
