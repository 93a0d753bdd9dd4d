"""Numbers that nobody sees, not finite ones: every bit of every result stays, forward, backward and in caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import same_bits
from torch import Tensor

import kilat

N, M = 130, 200


def _dense(n: int, m: int) -> kilat.Dense:
    """Half of all pairs; keys 5 and 150 and queries 3 and 70 see nothing."""
    seen = torch.rand(n, m, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[:, [5, 150]] = False
    seen[[3, 70]] = False
    return kilat.Dense(seen)


MASKS: dict[str, tuple[Any, list[int], list[int]]] = {  # mask, keys and queries without any partner
    "dense": (_dense(N, M), [5, 150], [3, 70]),
    "predicate": (
        kilat.Predicate(lambda b, h, q_pos, j: (j % 7 != 2) & (q_pos % 5 != 1)),
        list(range(2, M, 7)),
        [i for i in range(N) if (i + M - N) % 5 == 1],
    ),
    "key_range": (
        kilat.KeyRange(torch.tensor([7], dtype=torch.int32), torch.tensor([M - 11], dtype=torch.int32)),
        [*range(7), *range(M - 11, M)],
        [],
    ),
    "window": (kilat.Window(20, 3), list(range(M - N - 20)), []),
}
VALUES = [torch.nan, torch.inf, -torch.inf]


def _results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = kilat.attention(*inputs, return_lse=True, deterministic=True, **options)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    return (out.detach(), lse.detach(), *torch.autograd.grad((out, finite), inputs, (dout, torch.ones_like(lse))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dropout", [None, kilat.Dropout(0.3, seed=1, offset=2)], ids=["", "dropout"])
def test_unseen_numbers_change_no_bit(name: str, dtype: torch.dtype, dropout: Any) -> None:
    mask, keys, queries = MASKS[name]
    g = torch.Generator().manual_seed(2)
    shapes = [(1, N, 4, 17), (1, M, 2, 17), (1, M, 2, 40), (1, N, 4, 40)]
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
    options = {"mask": mask, "dropout": dropout, "sink": torch.zeros(4), "scores": (kilat.Softcap(9.0),)}
    wanted = _results(*tensors, **options)
    for value in VALUES:
        spoilt = [x.clone() for x in tensors]
        for x, rows in zip(spoilt, (queries, keys, keys, queries), strict=True):
            x[:, rows] = value
        assert all(same_bits(a, b) for a, b in zip(wanted, _results(*spoilt, **options), strict=True))


@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_keys_outside_the_window_of_a_cache_change_no_bit(seqlen_q: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    q = torch.randn(2, seqlen_q, 4, 33, generator=g).to(dtype)
    k, v = (torch.randn(2, 300, 2, 33, generator=g).to(dtype) for _ in range(2))
    lengths, results = torch.tensor([300, 170], dtype=torch.int32), []
    for value in (0.5, *VALUES):
        k[0, 2 : 300 - seqlen_q - 45], v[0, 2 : 300 - seqlen_q - 45] = value, value
        k[1, 170:], v[1, 170:] = value, value
        cache = kilat.ContiguousCache(k, v, lengths)
        results.append(kilat.cached_attention(q, cache, mask=kilat.Window(45, 0, first=2), return_lse=True))
    for found in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], found, strict=True))


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_ragged_dropout_is_padded_dropout(p: float) -> None:
    """The same bits whether sequences are padded or packed, whole or alone, forward and backward."""
    g = torch.Generator().manual_seed(4)
    q, k, v, dout = (torch.randn(2, n, 2, 16, generator=g) for n in (70, 90, 90, 70))
    used_q, used_kv = (70, 33), (90, 65)
    dropout = kilat.Dropout(p, seed=11, offset=5)
    padded = [x.clone().requires_grad_() for x in (q, k, v)]
    lengths = {
        "seqlens_q": torch.tensor(used_q, dtype=torch.int32),
        "seqlens_kv": torch.tensor(used_kv, dtype=torch.int32),
    }
    out = kilat.attention(*padded, dropout=dropout, mask=kilat.Causal(), deterministic=True, **lengths)
    wanted = (out, *torch.autograd.grad(out, padded, dout))
    packed = [
        torch.cat([x[b, :n] for b, n in enumerate(used)]).requires_grad_()
        for x, used in ((q, used_q), (k, used_kv), (v, used_kv))
    ]
    offsets = [torch.tensor((0, n[0], sum(n)), dtype=torch.int32) for n in (used_q, used_kv)]
    out = kilat.ragged_attention(*packed, *offsets, dropout=dropout, mask=kilat.Causal(), deterministic=True)
    packed_dout = torch.cat([dout[b, :n] for b, n in enumerate(used_q)])
    found = (out, *torch.autograd.grad(out, packed, packed_dout))
    for a, b, used in zip(wanted, found, (used_q, used_q, used_kv, used_kv), strict=True):
        assert same_bits(torch.cat([a[n, :length] for n, length in enumerate(used)]), b)
    if p == 1.0:
        assert not any(x.any() for x in found)
