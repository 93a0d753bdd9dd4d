"""Calls that were once accepted, refused or worded wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import BACKENDS
from torch import Tensor

import kilat
from kilat.masks import core


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _cache(lengths: tuple[int, int] = (3, 18)) -> kilat.ContiguousCache:
    return kilat.ContiguousCache(torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 16), _int32(*lengths))


def _new(n: int, seqlen: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, seqlen, 2, 16), torch.randn(n, seqlen, 2, 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_without_any_keys(backend: str) -> None:
    """A ragged batch of empty sequences: masks and biases of no keys fit, although total_kv is not 0."""
    q, k = torch.randn(5, 2, 8), torch.randn(3, 2, 8)
    masks = [kilat.Dense(torch.ones(1, 1, 2, 0, dtype=torch.bool)), kilat.Documents(torch.zeros(0, dtype=torch.int32))]
    for mask in masks:
        out = kilat.ragged_attention(q, k, k, _int32(0, 2), _int32(0, 0), mask=mask, backend=backend)
        assert not out.any()
        with pytest.raises(ValueError, match="must be"):
            kilat.ragged_attention(q, k, k, _int32(0, 2), _int32(0, 3), mask=mask, backend=backend)


@pytest.mark.parametrize("axis", [0, 2])
def test_out_must_not_be_expanded(axis: int) -> None:
    shape = [2, 1, 4, 16]
    shape[axis] = 1
    with pytest.raises(ValueError, match="out must not be expanded"):
        kilat.cached_attention(torch.randn(2, 1, 4, 16), _cache(), out=torch.empty(shape).expand(2, 1, 4, 16))


def test_out_must_not_require_grad() -> None:
    q, out = torch.randn(2, 1, 4, 16), torch.empty(2, 1, 4, 16)
    kilat.cached_attention(q, _cache(), out=out)  # the same call but for the flag: its plan must not serve
    with torch.no_grad():
        kilat.cached_attention(q, _cache(), out=torch.empty(2, 1, 4, 16, requires_grad=True))
    with pytest.raises(ValueError, match="caches are forward only: out must not require grad"):
        kilat.cached_attention(q, _cache(), out=out.requires_grad_())


def _rotary(angles: int) -> kilat.Rotary:
    return kilat.Rotary(torch.ones(20, angles), torch.zeros(20, angles))


def _expanded() -> Any:
    pages = torch.randn(1, 20, 2, 16).expand(2, 20, 2, 16)
    return kilat.ContiguousCache(pages, pages, _int32(3, 4))


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "batch_index": (TypeError, "batch_index must be integers", lambda: _cache().append(*_new(1, 1), batch_index=1)),
    "rotary": (TypeError, "rotary must be a Rotary", lambda: _cache().append(*_new(2, 1), rotary=3)),  # type: ignore[arg-type]
    "rotary_dim": (
        ValueError,
        "rotary_dim must not exceed head_dim; got rotary_dim=18, head_dim=16",
        lambda: _cache().append(*_new(2, 1), rotary=_rotary(9)),
    ),
    "expanded cache": (ValueError, "must not be expanded", lambda: _expanded().append(*_new(2, 1))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_appends_that_cannot_be(name: str) -> None:
    error, message, call = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("index", [[], ()])
def test_append_to_no_sequence(index: Any) -> None:
    assert _cache().append(*_new(0, 1), batch_index=index).lengths.tolist() == [3, 18]


def test_many_lengths_do_not_slow_each_other() -> None:
    """Remembering bounds costs the same however many are known: a decode loop brings new lengths at every step."""
    known = core._Known()
    rows = core.bounds(kilat.Causal(), 0, 1, 5)
    for n in range(150_000):
        known.put((n,), rows)
    cost = rows.nbytes + core._ENTRY_BYTES
    assert known.bytes == len(known.bounds) * cost <= core._CACHE_BYTES < known.bytes + cost
    assert (149_999,) in known.bounds
    assert (0,) not in known.bounds


def test_queries_without_axes() -> None:
    with pytest.raises(ValueError, match=r"q must be \[batch, seqlen_q, num_heads_q, head_dim\]; got shape=\[\]"):
        kilat.attention(torch.tensor(1.0), torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))
