"""Tile functions of the CPU backend against NumPy: mask bits, dropout bits, score modifiers."""

from __future__ import annotations

import numpy as np
import pytest

from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import Geometry
from kilat.backends.cpu.tiles_mask import ALL, NONE, PARTIAL, build_mask_bits
from tile_harness import Place, geometries, geometry_id, guarded, places

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
        bounds = {
            "causal": lambda: causal(q_len, kv_len)[None],
            "window": lambda: causal(q_len, kv_len, 9)[None],
            "streaming": lambda: np.stack([causal(q_len, kv_len, 5), np.minimum(causal(q_len, kv_len), 4)]),
            "short": lambda: np.minimum(causal(q_len, kv_len), 3)[None],
        }[kind]()
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
