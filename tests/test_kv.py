"""Caches: appending equals concatenating, in every layout; errors come before anything is written; rotary."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from helpers import BACKENDS

import kilat
from kilat.kv import Cache

HEADS, DIM, DIM_V = 2, 6, 4


def contiguous(batch: int = 3, capacity: int = 11, dtype: torch.dtype = torch.float32) -> Cache:
    k, v = (torch.full((batch, capacity, HEADS, d), torch.nan, dtype=dtype) for d in (DIM, DIM_V))
    return kilat.ContiguousCache(k, v, torch.zeros(batch, dtype=torch.int32))


def paged(batch: int = 3, capacity: int = 12, dtype: torch.dtype = torch.float32) -> Cache:
    size = 4
    pages = capacity // size
    k, v = (torch.full((batch * pages + 2, size, HEADS, d), torch.nan, dtype=dtype) for d in (DIM, DIM_V))
    table = torch.randperm(batch * pages + 2, generator=torch.Generator().manual_seed(0))[: batch * pages]
    return kilat.PagedCache(k, v, table.int().reshape(batch, pages), torch.zeros(batch, dtype=torch.int32))


def heads_first(batch: int = 3, capacity: int = 11, dtype: torch.dtype = torch.float32) -> Cache:
    k, v = (torch.full((batch, HEADS, capacity, d), torch.nan, dtype=dtype) for d in (DIM, DIM_V))
    return kilat.ContiguousCache.heads_first(k, v, torch.zeros(batch, dtype=torch.int32))


def paged_heads_first(batch: int = 3, capacity: int = 12, dtype: torch.dtype = torch.float32) -> Cache:
    k, v = (torch.full((batch * capacity // 3, HEADS, 3, d), torch.nan, dtype=dtype) for d in (DIM, DIM_V))
    table = torch.arange(batch * capacity // 3, dtype=torch.int32).flip(0).reshape(batch, -1)
    return kilat.PagedCache.heads_first(k, v, table, torch.zeros(batch, dtype=torch.int32))


CACHES = pytest.mark.parametrize("make", [contiguous, paged, heads_first, paged_heads_first])


def new(*leading: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(sum(leading))
    k, v = (torch.randn(*leading, HEADS, d, generator=g, dtype=torch.float64).to(dtype) for d in (DIM, DIM_V))
    return k, v


def stored(cache: Cache, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of sequence b."""
    t = torch.arange(int(cache.lengths[b]))
    where = cache.locate(torch.full_like(t, b), t)
    return cache.k[where], cache.v[where]


@CACHES
def test_append_concatenates(make: Any) -> None:
    cache = make()
    want: list[list[Any]] = [[], [], []]

    def add(b: int, k: torch.Tensor, v: torch.Tensor) -> None:
        want[b].append((k, v))

    k, v = new(3, 2)
    assert cache.append(k, v) is cache
    for b in range(3):
        add(b, k[b], v[b])
    k, v = new(2, 3)
    cache.append(k, v, batch_index=torch.tensor([2, 0]))
    add(2, k[0], v[0])
    add(0, k[1], v[1])
    k, v = new(7)
    cache.append(k, v, cu_seqlens_new=torch.tensor([0, 4, 4, 5], dtype=torch.int32))  # two tokens belong to nobody
    add(0, k[:4], v[:4])
    add(2, k[4:5], v[4:5])
    k, v = new(3)
    cache.append(k, v, cu_seqlens_new=torch.tensor([0, 3], dtype=torch.int32), batch_index=[1])
    add(1, k, v)
    assert cache.lengths.tolist() == [9, 5, 6]
    for b in range(3):
        got = stored(cache, b)
        for n in (0, 1):
            assert torch.equal(got[n], torch.cat([pair[n] for pair in want[b]]))
    assert not cache.overflow


@CACHES
def test_nothing_is_copied(make: Any) -> None:
    cache = make()
    k, lengths = cache.k, cache.lengths
    cache.append(*new(3, 1))
    assert cache.k is k
    assert cache.lengths is lengths


@CACHES
def test_no_room_raises_before_anything_is_written(make: Any) -> None:
    cache = make()
    cache.append(*new(3, 9))
    before = [x.clone() for x in (cache.k, cache.v, cache.lengths)]
    with pytest.raises(
        ValueError, match=rf"stay within the capacity; got lengths\[0\]=9, new=4, capacity={cache.capacity}"
    ):
        cache.append(*new(3, 4))
    with pytest.raises(ValueError, match=r"lengths\[1\]=9, new=5"):
        cache.append(*new(6), cu_seqlens_new=torch.tensor([0, 1, 6, 6], dtype=torch.int32))
    for x, y in zip((cache.k, cache.v, cache.lengths), before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    full = new(3, cache.capacity - 9)
    cache.append(*full)
    assert cache.lengths.tolist() == [cache.capacity] * 3


@pytest.mark.parametrize("make", [heads_first, paged_heads_first])
def test_heads_first_is_a_view(make: Any) -> None:
    """Heads before tokens in memory: the axes are the same, the strides differ, and tokens lie behind one another."""
    cache = make()
    assert cache.k.shape[2:] == (HEADS, DIM)
    assert cache.k.stride(1) == DIM
    k = np.zeros((2, HEADS, 5, DIM), np.float32)
    cache = kilat.ContiguousCache.heads_first(k, k.copy(), np.zeros(2, np.int32))
    one = np.ones((2, 3, HEADS, DIM), np.float32)
    cache.append(one, one)
    assert (k[:, :, :3] == 1).all()
    assert not k[:, :, 3:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_sequences_share_pages(size: int, backend: str) -> None:
    """A prefix in pages that two tables name is a prefix of both, and each goes on in pages of its own."""
    pages = [torch.full((12 // size + 20, size, HEADS, d), torch.nan) for d in (DIM, DIM_V)]
    own = 2**31 - 1  # never read
    shared = -(-6 // size) * size  # tokens of whole pages
    prefix = torch.arange(shared // size, dtype=torch.int32) + 4
    table = torch.full((2, len(prefix) + 5), own, dtype=torch.int32)
    table[:, : len(prefix)] = prefix
    table[0, len(prefix) :], table[1, len(prefix) :] = torch.arange(5) + 15, torch.arange(5) + 10
    one = kilat.PagedCache(*pages, table[:1], torch.zeros(1, dtype=torch.int32))
    k, v = new(1, shared)
    one.append(k, v)
    both = kilat.PagedCache(*pages, table, torch.full((2,), shared, dtype=torch.int32))
    more = new(2, 4)
    both.append(*more)
    q = torch.randn(2, 2, 4, DIM)
    wanted = kilat.attention(
        q, *(torch.cat((x.expand(2, -1, -1, -1), y), 1) for x, y in zip((k, v), more, strict=True)), mask=kilat.Causal()
    )
    torch.testing.assert_close(kilat.cached_attention(q, both, backend=backend), wanted)


def test_page_tables_are_checked_where_tokens_go() -> None:
    cache = paged()
    cache.page_table[0, 1] = 99
    cache.append(*new(3, 4))
    with pytest.raises(ValueError, match=r"page_table\[0, 1\]=99, num_pages=11"):
        cache.append(*new(3, 1))
    assert cache.lengths.tolist() == [4, 4, 4]


@CACHES
def test_wrong_arguments(make: Any) -> None:
    cache = make()
    k, v = new(3, 2)
    with pytest.raises(ValueError, match="v_new must be given"):
        cache.append(k, None)
    with pytest.raises(TypeError, match=r"k_new must have the cache's dtype torch.float32; got dtype=torch.float64"):
        cache.append(k.double(), v)
    with pytest.raises(ValueError, match="k_new must have an entry for each sequence"):
        cache.append(k[:2], v[:2])
    with pytest.raises(ValueError, match=r"k_new must end in \[2, 6\]"):
        cache.append(k[..., :3], v)
    with pytest.raises(ValueError, match="same tokens"):
        cache.append(k, v[:, :1])
    with pytest.raises(ValueError, match="twice"):
        cache.append(k, v, batch_index=[0, 1, 1])
    with pytest.raises(ValueError, match="name sequences of the cache"):
        cache.append(k, v, batch_index=[0, 1, 3])
    with pytest.raises(TypeError, match="batch_index must be integers"):
        cache.append(k, v, batch_index=torch.ones(3))
    for offsets in ([1, 2, 3, 4], [0, 3, 2, 4], [0, 1, 2, 7]):
        with pytest.raises(ValueError, match="cu_seqlens_new must start at 0"):
            cache.append(*new(6), cu_seqlens_new=torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(ValueError, match="forward only: k_new must not require grad"):
        cache.append(k.requires_grad_(), v)
    assert cache.lengths.tolist() == [0, 0, 0]


def test_wrong_caches() -> None:
    k, v, n = torch.zeros(2, 5, 1, 4), torch.zeros(2, 5, 1, 4), torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    for make, kind, text in (
        (lambda: kilat.ContiguousCache(k, v[:1], n), ValueError, "k and v must have the same batch"),
        (lambda: kilat.ContiguousCache(k, v, n[:1]), ValueError, "lengths must be"),
        (lambda: kilat.ContiguousCache(k, v, n.long()), TypeError, "lengths must be int32"),
        (lambda: kilat.ContiguousCache(k[0], v, n), ValueError, "k must be"),
        (lambda: kilat.ContiguousCache(None, v, n), TypeError, "k must be a torch tensor"),
        (lambda: kilat.PagedCache(k, None, table, n), ValueError, "head_dim_v must be given"),
        (lambda: kilat.PagedCache(k, None, table, n, head_dim_v=5), ValueError, "must not exceed head_dim"),
        (lambda: kilat.PagedCache(k, v, table[:1], n), ValueError, "page_table must be"),
        (lambda: kilat.PagedCache(k, v, table, n, head_dim_v=3), ValueError, "head_dim_v must be that of v_pages"),
    ):
        with pytest.raises(kind, match=text):
            make()


@CACHES
def test_caches_pickle(make: Any) -> None:
    cache = make().append(*new(3, 2))
    for again in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        again.append(*new(3, 1))
        assert again.lengths.tolist() == [3, 3, 3]
    assert cache.lengths.tolist() == [2, 2, 2]


@CACHES
@pytest.mark.parametrize("backend", BACKENDS)
def test_cached_equals_dense(make: Any, backend: str) -> None:
    cache = make(dtype=torch.float64)
    k, v = new(3, 7, dtype=torch.float64)
    cache.append(k[:, :5], v[:, :5]).append(k[:, 5:], v[:, 5:])
    q = torch.randn(3, 2, 4, DIM, dtype=torch.float64)
    mask = kilat.Causal()
    wanted = kilat.attention(q, k, v, mask=mask, return_lse=True, backend="reference")
    got = kilat.cached_attention(q, cache, return_lse=True, backend=backend)
    torch.testing.assert_close(got, wanted)
    cu = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    out, lse = kilat.cached_attention(q.flatten(0, 1), cache, cu_seqlens_q=cu, return_lse=True, backend=backend)
    torch.testing.assert_close(out.unflatten(0, (3, 2)), wanted[0])
    torch.testing.assert_close(lse.unflatten(1, (3, 2)).transpose(0, 1), wanted[1])
    buffer = torch.full_like(wanted[0], torch.nan)
    assert kilat.cached_attention(q, cache, out=buffer, num_splits=2, backend=backend) is buffer
    torch.testing.assert_close(buffer, wanted[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_inside_keys(backend: str) -> None:
    pages = torch.randn(4, 4, 1, 8)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    cache = kilat.PagedCache(pages, None, table, torch.tensor([3], dtype=torch.int32), head_dim_v=5)
    assert cache.v.data_ptr() == pages.data_ptr()
    k_new = torch.randn(1, 2, 1, 8)
    with pytest.raises(ValueError, match="v_new must be None"):
        cache.append(k_new, k_new)
    cache.append(k_new, None)
    k = torch.cat((pages[2], pages[0]))[None, :5]
    q = torch.randn(1, 2, 4, 8)
    wanted = kilat.attention(q, k, k[..., :5], mask=kilat.Causal(), backend="reference")
    torch.testing.assert_close(kilat.cached_attention(q, cache, backend=backend), wanted)


def test_cached_is_forward_only() -> None:
    cache = contiguous().append(*new(3, 2))
    q = torch.randn(3, 1, 4, DIM, requires_grad=True)
    with pytest.raises(ValueError, match="caches are forward only: q must not require grad"):
        kilat.cached_attention(q, cache, backend="reference")
    with torch.no_grad():
        kilat.cached_attention(q, cache, backend="reference")
    with pytest.raises(TypeError, match=r"plan must be what kilat.plan returns, or None; got type=object"):
        kilat.cached_attention(q.detach(), cache, plan=object())
    with pytest.raises(TypeError, match="cache must be"):
        kilat.cached_attention(q.detach(), (cache.k, cache.v))
    with pytest.raises(ValueError, match="same batch"):
        kilat.cached_attention(q.detach()[:2], cache)
    with pytest.raises(ValueError, match=r"out must be \[3, 1, 4, 4\]"):
        kilat.cached_attention(q.detach(), cache, out=torch.zeros(3, 1, 4, 5))
    cache.lengths[1] = 12
    with pytest.raises(
        ValueError, match=r"cache.lengths must be from 0 to capacity; got cache.lengths\[1\]=12, capacity=11"
    ):
        kilat.cached_attention(q.detach(), cache, backend="reference")


def angles(positions: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [6, 8, 11])
def test_rotary_is_a_rotation_of_complex_numbers(interleaved: bool, dim: int) -> None:
    rotary = kilat.Rotary(*angles(20, 3), interleaved=interleaved)
    x = torch.randn(2, 5, 3, dim, dtype=torch.float64)
    offsets = torch.tensor([4, 0], dtype=torch.int32)
    got = rotary.apply(x, offsets)
    turned = x[..., :6]
    pairs = turned.unflatten(-1, (3, 2)) if interleaved else turned.unflatten(-1, (2, 3)).mT
    position = offsets[:, None] + torch.arange(5)
    cos, sin = angles(20, 3)
    z = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[position][:, :, None]
    back = torch.view_as_real(z)
    wanted = back.flatten(-2) if interleaved else back.mT.flatten(-2)
    torch.testing.assert_close(got[..., :6], wanted)
    assert torch.equal(got[..., 6:], x[..., 6:])


def test_rotary_depends_on_distance_alone() -> None:
    rotary = kilat.Rotary(*angles(40, 4))
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    near = (rotary.apply(q, 5) * rotary.apply(k, 2)).sum()
    torch.testing.assert_close(near, (rotary.apply(q, 33) * rotary.apply(k, 30)).sum())


def test_rotary_forms() -> None:
    rotary = kilat.Rotary(*angles(20, 4))
    x = torch.randn(2, 3, 2, 8)
    offsets = torch.tensor([1, 7])
    whole = rotary.apply(x, offsets)
    tokens = rotary.apply(x.flatten(0, 1), torch.tensor([1, 2, 3, 7, 8, 9]))
    assert torch.equal(whole.flatten(0, 1), tokens)
    same = rotary.apply(x, offsets, same_position=True)
    assert torch.equal(same[:, :1], whole[:, :1])
    assert torch.equal(same[:, 2], rotary.apply(x[:, 2:3], offsets)[:, 0])
    half = rotary.apply(x.bfloat16(), offsets)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rotary.apply(x.bfloat16().float(), offsets).bfloat16())
    assert torch.equal(rotary.apply(x, 0)[:, :1], x[:, :1])
    assert torch.equal(torch.from_numpy(rotary.apply(x.numpy(), offsets.numpy())), whole)
    assert torch.autograd.gradcheck(lambda x: rotary.apply(x, offsets), (x.double().requires_grad_(),))


def test_rotary_errors() -> None:
    cos, sin = angles(20, 4)
    rotary, x = kilat.Rotary(cos, sin), torch.zeros(2, 3, 2, 8)
    with pytest.raises(ValueError, match="max_position=20, position=20"):
        rotary.apply(x, torch.tensor([0, 18]))
    with pytest.raises(ValueError, match="position=-1"):
        rotary.apply(x, -1)
    with pytest.raises(ValueError, match="rotary_dim must not exceed head_dim; got rotary_dim=8, head_dim=7"):
        rotary.apply(x[..., :7], 0)
    with pytest.raises(ValueError, match="cos and sin must have the same shape"):
        kilat.Rotary(cos, sin[:3])
    with pytest.raises(TypeError, match="cos must hold floats"):
        kilat.Rotary(cos.long(), sin)
    with pytest.raises(ValueError, match=r"offsets must be an int or \[batch\]"):
        rotary.apply(x, torch.tensor([1, 2, 3]))


@CACHES
@pytest.mark.parametrize("ragged", [False, True])
def test_append_turns_keys(make: Any, ragged: bool) -> None:
    cache, rotary = make(), kilat.Rotary(*angles(12, 3))
    cache.append(*new(3, 2), batch_index=[0, 1, 2])
    k, v = new(3, 3)
    if ragged:
        cu = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
        cache.append(k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_new=cu, rotary=rotary)
    else:
        cache.append(k, v, rotary=rotary)
    turned = rotary.apply(k, 2)
    for b in range(3):
        assert torch.equal(stored(cache, b)[0][2:], turned[b])
        assert torch.equal(stored(cache, b)[1][2:], v[b])


def test_positions_outside_the_tables_write_nothing() -> None:
    cache = contiguous()
    with pytest.raises(ValueError, match="rotary tables"):
        cache.append(*new(3, 4), rotary=kilat.Rotary(*angles(3, 3)))
    assert cache.lengths.tolist() == [0, 0, 0]
    assert cache.k.isnan().all()
