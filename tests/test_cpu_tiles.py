"""Tile functions of the CPU backend against NumPy: mask bits, dropout bits, score modifiers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tile_harness import Place, geometries, geometry_id, guarded, numpy_type, places

from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import DTYPE_CODES, Geometry
from kilat.backends.cpu.tiles_dropout import build_dropout_bits
from kilat.backends.cpu.tiles_mask import ALL, NONE, PARTIAL, build_mask_bits
from kilat.backends.cpu.tiles_scores import SOFTCAP, USER, build_scores_backward, build_scores_forward

Host = tuple[Isa, Geometry]
every_geometry = pytest.mark.parametrize("host", geometries(), ids=geometry_id)


# ---- mask bits -------------------------------------------------------------------------------------------------------
def run_mask(place: Place, isa: Isa, expected: np.ndarray) -> int:
    """Run mask_bits; compare with bool [nr][nb]; returns the class."""
    bits = place.bits_tile()
    shown = place.run(build_mask_bits, isa, bits.ctypes.data)
    if shown != PARTIAL:
        assert expected.all() if shown == ALL else not expected.any()
        return shown
    got = place.unpack(bits)
    np.testing.assert_array_equal(place.from_tile(got), expected)
    assert got.sum() == expected.sum(), "bits outside nr x nb must be clear"
    return shown


def causal(q_len: int, kv_len: int, left: int | None = None) -> np.ndarray:
    """Bounds of a causal mask, aligned bottom-right, with a window to the left."""
    q_pos = np.arange(q_len) + kv_len - q_len
    start = np.zeros(q_len) if left is None else np.clip(q_pos - left, 0, kv_len)
    stop = np.clip(q_pos + 1, 0, kv_len)
    return np.stack([np.minimum(start, stop), stop]).astype(np.int32)


def interval_bounds(kind: str, q_len: int, kv_len: int) -> np.ndarray:
    whole = causal(q_len, kv_len)
    if kind == "streaming":  # a window and the first four keys
        return np.stack([causal(q_len, kv_len, 5), np.minimum(whole, 4)])
    return {"causal": whole, "window": causal(q_len, kv_len, 9), "short": np.minimum(whole, 3)}[kind][None]


def visible(bounds: np.ndarray, place: Place) -> np.ndarray:
    start, stop = bounds[:, 0, place.queries(), None], bounds[:, 1, place.queries(), None]
    return ((start <= place.keys()) & (place.keys() < stop)).any(0)


@every_geometry
@pytest.mark.parametrize("kind", ["causal", "window", "streaming", "short", "none"])
def test_intervals(host: Host, kind: str) -> None:
    isa, geo = host
    for i0, nr, j0, nb in places(geo):
        q_len, kv_len = i0 + nr, j0 + nb
        place = Place(geo, q_len, kv_len, i0, nr, j0, nb)
        if kind == "none":
            assert run_mask(place, isa, np.ones((nr, nb), bool)) == ALL
            continue
        bounds = interval_bounds(kind, q_len, kv_len)
        place.bounds = bounds
        run_mask(place, isa, visible(bounds, place))


@every_geometry
def test_interval_classes_are_decided_early(host: Host) -> None:
    isa, geo = host
    q_len, kv_len = 200, 300
    bounds = causal(q_len, kv_len)[None]
    for i0, j0, expected in ((0, 0, ALL), (0, 260, NONE), (150, 150, ALL)):
        place = Place(geo, q_len, kv_len, i0, min(16, geo.width), j0, min(16, geo.width), bounds=bounds)
        assert run_mask(place, isa, visible(bounds, place)) == expected


@every_geometry
@pytest.mark.parametrize("layout", ["keys", "queries", "odd", "key-padding", "query-row", "scalar"])
def test_dense_masks(host: Host, layout: str) -> None:
    isa, geo = host
    rng = np.random.default_rng(0)
    for i0, nr, j0, nb in places(geo):
        q_len, kv_len = i0 + nr, j0 + nb
        place = Place(geo, q_len, kv_len, i0, nr, j0, nb, b=1, h=2)
        full = strided(rng.random((2, 3, q_len, kv_len)) < 0.6, layout)
        view = np.broadcast_to(full, (2, 3, q_len, kv_len))
        expected = view[1, 2][i0 : i0 + nr, j0 : j0 + nb]
        place.set(n_dense=1, dense=np.array([full.ctypes.data, *view.strides], np.int64))
        run_mask(place, isa, expected)
        place.bounds = causal(q_len, kv_len)[None]
        run_mask(place, isa, expected & visible(place.bounds, place))


def strided(x: np.ndarray, layout: str) -> np.ndarray:
    """x [b][h][q][kv], or a part of it to broadcast, in the memory layout named, before an unreadable page."""
    if layout == "keys":
        return guarded(x)
    if layout == "queries":
        return guarded(x.swapaxes(2, 3)).swapaxes(2, 3)
    if layout == "odd":
        wide = np.zeros((*x.shape[:3], 2 * x.shape[3] - 1), x.dtype)
        wide[..., ::2] = x
        return guarded(wide)[..., ::2]
    if layout == "key-padding":
        return guarded(x[:, :1, :1])
    if layout == "query-row":
        return guarded(x[:, :, :, :1])
    return guarded(x[:1, :1, :1, :1])


@every_geometry
def test_a_dense_mask_may_show_all_or_nothing(host: Host) -> None:
    isa, geo = host
    for value in (True, False):
        place = Place(geo, 16, 16, 3, min(13, geo.width), 2, min(11, geo.width))
        flags = guarded(np.full((16, 16), value))
        place.set(n_dense=1, dense=np.array([flags.ctypes.data, 0, 0, 16, 1], np.int64))
        assert run_mask(place, isa, np.full((place.nr, place.nb), value)) == (ALL if value else NONE)


# ---- score modifiers -------------------------------------------------------------------------------------------------
def modified(place: Place, s: np.ndarray, cap: float, slope: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The built-in modifiers in float64 for scores [nr][nb]."""
    s = s.astype(np.float64)
    if cap:
        s = cap * np.tanh(s / cap)
    q_pos = place.queries() + place.kv_len - place.q_len
    s = s - slope[place.b, place.h].astype(np.float64) * np.abs(q_pos[:, None] - place.keys())
    i, j = slice(place.i0, place.i0 + place.nr), slice(place.j0, place.j0 + place.nb)
    return s + bias[place.b, place.h, i, j].astype(np.float64)


@every_geometry
@pytest.mark.parametrize("layout", ["keys", "queries", "odd", "key-padding", "query-row", "scalar"])
def test_built_in_scores(host: Host, layout: str) -> None:
    isa, geo = host
    rng = np.random.default_rng(1)
    for i0, nr, j0, nb in places(geo):
        q_len, kv_len = i0 + nr, j0 + nb + 2
        place = Place(geo, q_len, kv_len, i0, nr, j0, nb, b=1, h=2)
        real = numpy_type(geo)
        raw = (rng.standard_normal((nr, nb)) * 20).astype(real)
        slopes = rng.random((1, 3)).astype(real)
        part = strided(rng.standard_normal((2, 3, q_len, kv_len)).astype(real), layout)
        bias = np.broadcast_to(part, (2, 3, q_len, kv_len))
        place.set(softcap=15.0, alibi=slopes, alibi_b=0, alibi_h=slopes.strides[1], bias=part.ctypes.data)
        place.set(bias_dtype=DTYPE_CODES[np.dtype(real).name], **strides_of("bias", bias))
        tile = place.score_tile(raw)
        place.run(build_scores_forward, isa, tile.ctypes.data)
        expected = modified(place, raw, 15.0, np.broadcast_to(slopes, (2, 3)), bias)
        np.testing.assert_allclose(place.from_tile(tile), expected, rtol=0, atol=40 * 4 * np.finfo(real).eps)


def strides_of(name: str, x: np.ndarray) -> dict[str, int]:
    return {f"{name}_{axis}": stride for axis, stride in zip("bhij", x.strides, strict=True)}


@every_geometry
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_bias_of_any_type_reaches_its_extremes(host: Host, dtype: str) -> None:
    """Infinities hide a key, the lowest finite number does not, denormal halves are exact."""
    isa, geo = host
    nr, nb = min(geo.width, 7), min(geo.width, 13)
    types = torch.finfo(getattr(torch, dtype))
    extremes = [0.0, -0.0, 1.5, -math.inf, math.inf, math.nan, types.min, types.max, types.tiny, types.tiny / 2]
    values = torch.tensor(extremes, dtype=torch.float64)
    bias = values.repeat(-(-nr * nb // len(values)))[: nr * nb].reshape(nr, nb).to(getattr(torch, dtype))
    place = Place(geo, nr, nb, 0, nr, 0, nb)
    size = bias.element_size()
    place.set(bias=bias.data_ptr(), bias_dtype=DTYPE_CODES[dtype], bias_i=size * nb, bias_j=size)
    tile = place.score_tile(np.zeros((nr, nb), numpy_type(geo)))
    place.run(build_scores_forward, isa, tile.ctypes.data)
    expected = bias.to(torch.float64).numpy()
    finite = np.isfinite(expected)
    expected[finite] = np.clip(expected[finite], np.finfo(numpy_type(geo)).min, np.finfo(numpy_type(geo)).max)
    np.testing.assert_array_equal(place.from_tile(tile), expected.astype(numpy_type(geo)))


@every_geometry
def test_softcap_backward_keeps_hidden_pairs_at_zero(host: Host) -> None:
    isa, geo = host
    rng = np.random.default_rng(2)
    for i0, nr, j0, nb in places(geo):
        place = Place(geo, i0 + nr, j0 + nb, i0, nr, j0, nb).set(softcap=5.0)
        raw = (rng.standard_normal((nr, nb)) * 8).astype(numpy_type(geo))
        ds = rng.standard_normal((nr, nb)).astype(numpy_type(geo))
        hidden = rng.random((nr, nb)) < 0.3
        expected = ds * (1 - np.tanh(raw.astype(np.float64) / 5.0) ** 2)
        raw[hidden], ds[hidden], expected[hidden] = np.nan, 0.0, 0.0
        raw[0, 0], ds[0, 0], expected[0, 0] = np.nan, 1.0, np.nan  # visible: shows
        raw_tile, ds_tile, tmp = place.score_tile(raw), place.score_tile(ds), place.score_tile(raw)
        before = ds_tile.copy()
        tiles = [t.ctypes.data for t in (raw_tile, ds_tile, tmp)]
        place.run(build_scores_backward, isa, *tiles, USER)
        np.testing.assert_array_equal(ds_tile, before)
        place.run(build_scores_backward, isa, *tiles, SOFTCAP)
        eps = np.finfo(numpy_type(geo)).eps
        np.testing.assert_allclose(place.from_tile(ds_tile), expected, rtol=1e-4 if eps > 1e-9 else 1e-12, atol=8 * eps)


# ---- dropout ---------------------------------------------------------------------------------------------------------
def philox(counter: list[np.ndarray], key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 on uint64 arrays that hold 32-bit words: [..., 4]."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) & 0xFFFFFFFF for c in counter)
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> 32) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), -1)


def test_the_philox_of_these_tests_knows_its_known_answers() -> None:
    """Two answers of Random123's kat_vectors, which its authors publish for philox4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    assert philox([0, 0, 0, 0], (0, 0)).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([ones] * 4, (ones, ones)).tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def kept(place: Place, seed: int, offset: int, threshold: int, num_heads: int) -> np.ndarray:
    i, j = place.queries()[:, None], place.keys()[None, :]
    key = (seed & 0xFFFFFFFF, (seed >> 32 ^ offset >> 32) & 0xFFFFFFFF)
    words = philox([j // 4, i, np.array(place.b * num_heads + place.h), np.array(offset & 0xFFFFFFFF)], key)
    word = np.take_along_axis(words, np.broadcast_to(j % 4, words.shape[:2])[..., None], -1)[..., 0]
    return word >= threshold


@every_geometry
@pytest.mark.parametrize("threshold", [0, 1, 2**30, 3 * 2**30, 2**32 - 1, 2**32])
def test_philox_dropout(host: Host, threshold: int) -> None:
    isa, geo = host
    seed, offset, num_heads = 0x123456789ABCDEF0, 0x0FEDCBA987654321, 5
    for i0, nr, j0, nb in places(geo):
        place = Place(geo, i0 + nr, j0 + nb, i0, nr, j0, nb, b=3, h=2)
        place.set(dropout=1, dropout_threshold=threshold, seed=seed, offset=offset, num_heads_q=num_heads)
        bits = place.bits_tile()
        place.run(build_dropout_bits, isa, bits.ctypes.data)
        expected = kept(place, seed, offset, threshold, num_heads)
        np.testing.assert_array_equal(place.from_tile(place.unpack(bits)), expected)


@every_geometry
def test_keep_tensors(host: Host) -> None:
    isa, geo = host
    rng = np.random.default_rng(3)
    for i0, nr, j0, nb in places(geo):
        place = Place(geo, i0 + nr, j0 + nb, i0, nr, j0, nb, b=1, h=1)
        part = guarded(rng.random((2, 1, place.q_len, place.kv_len)) < 0.5)
        keep = np.broadcast_to(part, (2, 2, place.q_len, place.kv_len))
        place.set(dropout=2, keep=part.ctypes.data, **strides_of("keep", keep))
        bits = place.bits_tile()
        place.run(build_dropout_bits, isa, bits.ctypes.data)
        expected = keep[1, 1, i0 : i0 + nr, j0 : j0 + nb]
        np.testing.assert_array_equal(place.from_tile(place.unpack(bits)), expected)
