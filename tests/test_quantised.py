"""Quantised caches: what is stored, what an append writes, what must not be copied, changed or accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import QUANTISED, Case
from helpers import BACKENDS, build, same_bits, threads

import kilat
from kilat.kv import Cache
from kilat.kv.quantise import stored

HEADS, DIM = 2, 10
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TYPES = pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
PER = pytest.mark.parametrize("per", ["head", "token"])
LAYOUTS = pytest.mark.parametrize("layout", ["cached", "page1", "page16", "page64", "hnd", "hnd-page3"])


def empty(layout: str, dtype: torch.dtype, per: str, batch: int = 3, capacity: int = 48) -> Cache:
    """A cache filled with what must not matter: the highest byte (NaN in float8_e4m3fn), NaN as scales of tokens."""
    size = int(layout.partition("page")[2] or capacity)
    count = batch if "page" not in layout else batch * -(-capacity // size) + 2
    tokens = (count, HEADS, size) if "hnd" in layout else (count, size, HEADS)
    k, v = (torch.full((*tokens, DIM), 0x7F, dtype=torch.uint8).view(dtype) for _ in range(2))
    scales = [torch.tensor([0.02, 0.01]) if per == "head" else torch.full(tokens, torch.nan) for _ in range(2)]
    lengths = torch.zeros(batch, dtype=torch.int32)
    kind: Any = kilat.ContiguousCache if "page" not in layout else kilat.PagedCache
    table = [torch.randperm(count - 2).int().reshape(batch, -1)] if "page" in layout else []
    return (kind.heads_first if "hnd" in layout else kind)(k, v, *table, lengths, *scales)


def values(cache: Cache, b: int) -> tuple[torch.Tensor, ...]:
    """The tokens of sequence b, dequantised in float64."""
    t = torch.arange(int(cache.lengths[b]))
    where = cache.locate(torch.full_like(t, b), t)
    found = []
    for x, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        assert scale is not None
        found.append(x[where].double() * (scale if scale.dim() == 1 else scale[where])[..., None].double())
    return tuple(found)


@TYPES
@PER
@LAYOUTS
@pytest.mark.parametrize("backend", BACKENDS)
def test_append_then_attend(layout: str, per: str, dtype: torch.dtype, backend: str) -> None:
    """Tokens come back within half a step, and attention is that over what is stored."""
    g = torch.Generator().manual_seed(0)
    cache = empty(layout, dtype, per)
    new = [torch.randn(3, 45, HEADS, DIM, generator=g).bfloat16() for _ in range(2)]
    cache.append(*(x[:, :40] for x in new))
    offsets = torch.tensor([0, 5, 6, 6], dtype=torch.int32)
    cache.append(*(torch.cat((x[0, 40:], x[1, 40:41])) for x in new), cu_seqlens_new=offsets)
    assert cache.lengths.tolist() == [45, 41, 40]
    q = torch.randn(3, 2, 4, DIM, generator=g)
    with threads(1 if backend == "reference" else torch.get_num_threads()):
        out, lse = kilat.cached_attention(q, cache, return_lse=True, backend=backend)
    for b in range(3):
        found = values(cache, b)
        for x, y in zip(found, new, strict=True):
            y = y[b, : len(x)].double()
            scale = torch.tensor([0.02, 0.01]) if per == "head" else y.abs().amax(-1) / LARGEST[dtype]
            scale = scale[..., None].double().expand_as(y)
            relative = 2.0**-4 if dtype == torch.float8_e4m3fn else 0.0
            inside = y.abs() <= LARGEST[dtype] * scale
            allowed = (scale * (2.0**-10 if relative else 0.5)).maximum(relative * y.abs()) * 1.0001
            assert ((x - y).abs() <= allowed)[inside].all()
            assert (x.abs() >= scale * LARGEST[dtype] * 0.999)[~inside].all()
        k, v = (x[None].float() for x in found)
        with threads(1):
            wanted = kilat.attention(q[b : b + 1], k, v, mask=kilat.Causal(), return_lse=True, backend="reference")
        torch.testing.assert_close(out[b], wanted[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b], wanted[1][0], rtol=1e-5, atol=1e-5)


@TYPES
def test_stored_numbers_round_to_the_nearest_and_saturate(dtype: torch.dtype) -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    numbers = bytes_[~bytes_.isnan()].sort().values
    x = torch.cat((torch.randn(4000) * 60, torch.tensor([-1e30, 1e30, torch.inf, -torch.inf, 0.0, 448.0, 464.0, 1e-9])))
    got = stored(x, torch.ones(1), dtype).double()
    nearest = numbers[(x.double().clamp(-448, 448)[:, None] - numbers).abs().argmin(1)]
    assert torch.equal((got - x.clamp(-448, 448)).abs(), (nearest - x.clamp(-448, 448)).abs())
    halves = torch.tensor([2.5, 3.5, -2.5]) if dtype == torch.int8 else torch.tensor([17.0, 19.0, -17.0])
    even = [2.0, 4.0, -2.0] if dtype == torch.int8 else [16.0, 20.0, -16.0]
    assert stored(halves, torch.ones(1), dtype).tolist() == even
    assert stored(torch.tensor([3.0]), torch.zeros(1), dtype).tolist() == [3.0]


@TYPES
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_that_is_not_finite_hits_who_sees_it(dtype: torch.dtype, backend: str) -> None:
    """With a scale a token; all other rows keep their bits. A token of zeros has scale 0 and is zeros."""
    g, outs = torch.Generator().manual_seed(1), []
    q, k, v = (torch.randn(1, 9, HEADS, DIM, generator=g) for _ in range(3))
    for bad in (1.0, torch.nan, torch.inf):
        cache = empty("cached", dtype, "token", batch=1)
        v[0, 6, 1] = 0.0
        v[0, 7, 1, 3] = bad
        outs.append(kilat.cached_attention(q, cache.append(k, v), backend=backend))
        assert values(cache, 0)[1][6, 1].eq(0).all()
    for out in outs[1:]:
        assert same_bits(out[:, :7], outs[0][:, :7])
        assert same_bits(out[:, :, 0], outs[0][:, :, 0])
        assert out[:, 7:, 1].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_byte_of_float8_is_read_as_torch_reads_it(backend: str) -> None:
    """One key a byte; a query that sees one key alone returns its value."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    v = codes.reshape(1, 256, 1, 1).expand(1, 256, 1, 17)
    cache = kilat.ContiguousCache(v, v, torch.tensor([256], dtype=torch.int32), torch.zeros(1), torch.ones(1))
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            mask = kilat.Window(0, 0)
            out = kilat.cached_attention(torch.zeros(1, 256, 1, 17), cache, mask=mask, backend=backend)
        finally:
            torch.set_flush_denormal(False)
        torch.testing.assert_close(out, v.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv", QUANTISED)
@pytest.mark.parametrize("layout", ["cached", "paged"])
def test_garbage_never_changes_a_bit(layout: str, kv: str, backend: str) -> None:
    case = Case("garbage", layout, 3, heads=(4, 2), seqlen=(3, 90), lengths_kv=(3, 77, 0), mask="causal", kv=kv)
    first = build(case)
    outs = first.run(backend)
    for byte in (0, 0x80, 0x55):
        call = build(case)
        used = torch.zeros(call.k.shape[:2], dtype=torch.bool)
        for b, length in enumerate((3, 77, 0)):
            j = torch.arange(length)
            page = (call.lengths["page_table"][b, j // 16].long(), j % 16) if layout == "paged" else (b, j)
            used[page] = True
        for x in (call.k, call.v):
            x.view(torch.uint8)[~used] = byte
        for name in ("k_scale", "v_scale"):
            if call.lengths[name].dim() > 1:
                call.lengths[name][~used] = float(byte)
        assert all(same_bits(a, b) for a, b in zip(outs, call.run(backend), strict=True))


def test_scales_are_not_copied() -> None:
    """A strided view of scales is read where it lies, at the time of the call, and written by an append."""
    k, v = (torch.zeros(2, 8, HEADS, DIM, dtype=torch.int8) for _ in range(2))
    wide = torch.zeros(2, 8, HEADS, 3)
    cache = kilat.ContiguousCache(k, v, torch.zeros(2, dtype=torch.int32), wide[..., 0], wide[..., 2])
    q, new = torch.randn(2, 1, 4, DIM), torch.randn(2, 3, HEADS, DIM)
    cache.append(new, 2 * new)
    assert torch.equal(wide[:, :3, :, 0], new.abs().amax(-1) / 127.0)
    assert not wide[..., 1].any()
    first = kilat.cached_attention(q, cache)
    wide[..., 2] *= 2
    assert torch.equal(kilat.cached_attention(q, cache), 2 * first)


@TYPES
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_inside_quantised_keys(dtype: torch.dtype, backend: str) -> None:
    pages = torch.zeros(4, 4, 1, 8, dtype=dtype)
    table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    cache = kilat.PagedCache(pages, None, table, lengths, torch.zeros(4, 4, 1), head_dim_v=5)
    assert cache.v_scale is cache.k_scale
    cache.append(torch.randn(1, 7, 1, 8), None)
    k, _ = values(cache, 0)
    q = torch.randn(1, 2, 4, 8)
    wanted = kilat.attention(q.double(), k[None], k[None, ..., :5], mask=kilat.Causal(), backend="reference")
    torch.testing.assert_close(kilat.cached_attention(q, cache, backend=backend).double(), wanted, rtol=0, atol=1e-5)


def test_numpy_holds_int8() -> None:
    tensors = empty("cached", torch.int8, "token").append(*(torch.randn(3, 5, HEADS, DIM) for _ in range(2)))
    made = (tensors.k, tensors.v, tensors.lengths, tensors.k_scale, tensors.v_scale)
    arrays = kilat.ContiguousCache(*(x.numpy() for x in made if x is not None))
    q = torch.randn(3, 1, HEADS, DIM)
    got = kilat.cached_attention(q.numpy(), arrays)
    assert same_bits(torch.from_numpy(got), kilat.cached_attention(q, tensors))
    with pytest.raises(TypeError, match=r"both torch tensors or both NumPy arrays|torch tensors or NumPy arrays"):
        kilat.ContiguousCache(*(x.numpy() for x in made[:3]), *made[3:])  # type: ignore[union-attr]


def test_autocast_casts_q_alone() -> None:
    cache = empty("cached", torch.int8, "token").append(*(torch.randn(3, 5, HEADS, DIM) for _ in range(2)))
    q = torch.randn(3, 1, HEADS, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        got = kilat.cached_attention(q, cache)
    assert same_bits(got, kilat.cached_attention(q.bfloat16(), cache))


@pytest.mark.parametrize("per", ["head", "token"])
def test_a_compiled_step(per: str) -> None:
    cache = empty("page3", torch.float8_e4m3fn, per).append(*(torch.randn(3, 5, HEADS, DIM) for _ in range(2)))
    q = torch.randn(3, 1, HEADS, DIM)
    compiled = torch.compile(lambda q: kilat.cached_attention(q, cache), backend="eager", fullgraph=True)
    assert same_bits(compiled(q), kilat.cached_attention(q, cache))


def test_wrong_scales() -> None:
    k, n = torch.zeros(2, 5, HEADS, DIM, dtype=torch.int8), torch.zeros(2, dtype=torch.int32)
    head, token = torch.ones(HEADS), torch.ones(2, 5, HEADS)
    for kind, args, text in (
        (ValueError, (None, None), r"k_scale must be given where k is torch.int8; got k_scale=None"),
        (ValueError, (head, None), "v_scale must be given"),
        (TypeError, (head.double(), head), r"k_scale must be float32; got dtype=torch.float64"),
        (
            ValueError,
            (token, token[:1]),
            r"v_scale must be \[num_heads_kv\] = \[2\] or .* = \[2, 5, 2\]; got shape",
        ),
        (ValueError, (head, token), "both one a head or both one a token and head"),
        (TypeError, (head, 0.1), "v_scale must be a torch tensor"),
    ):
        with pytest.raises(kind, match=text):
            kilat.ContiguousCache(k, k, n, *args)
    with pytest.raises(TypeError, match=r"k_scale must be None where k is not quantised; got dtype=torch.float32"):
        kilat.ContiguousCache(k.float(), k.float(), n, head, head)
    table = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="v_scale must be None where v_pages is None"):
        kilat.PagedCache(k, None, table, n, head, head, head_dim_v=4)
    cache = kilat.ContiguousCache(k, k, n, head, head)
    with pytest.raises(TypeError, match=r"k_new must be float16, bfloat16, float32, float64: .*; got dtype=torch.int8"):
        cache.append(k[:, :1], k[:, :1])
    mixed = kilat.ContiguousCache(k, k.to(torch.float8_e4m3fn), n, head, head)
    with pytest.raises(TypeError, match=r"same dtype; got q=torch.float32, cache.k=torch.int8, cache.v=torch.float8"):
        kilat.cached_attention(torch.zeros(2, 1, HEADS, DIM), mixed)
    with pytest.raises(TypeError, match=r"q must be float16"):
        kilat.cached_attention(torch.zeros(2, 1, HEADS, DIM, dtype=torch.int8), cache)
    expanded = kilat.ContiguousCache(k, k, n, *(torch.ones(2, 1, HEADS).expand(2, 5, HEADS) for _ in range(2)))
    with pytest.raises(ValueError, match="k_scale must not be expanded: each number needs a place"):
        expanded.append(*(torch.ones(2, 1, HEADS, DIM) for _ in range(2)))
    with pytest.raises(TypeError, match="same dtype"):
        kilat.attention(*(torch.zeros(1, 2, HEADS, DIM), k[:1, :2], k[:1, :2]))
