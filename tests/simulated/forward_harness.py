"""One forward call on the simulated machine, with tiles chosen by the test, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from simulated.gluon_sim import Desc, Ptr, launch

from kilat.backends.gluon import forward, schedule
from kilat.backends.gluon.heuristics import boxes
from kilat.masks.affine import Affine
from kilat.masks.core import FAR
from kilat.numerics import LOG2E


@dataclass(frozen=True)
class Shape:
    """A forward call and how it is cut up. `lengths_*` are used lengths, or sequences if `ragged`."""

    batch: int = 1
    seqlen: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (64, 64)
    bounds: tuple[int, int, int] = (FAR, FAR, FAR)
    lengths_q: tuple[int, ...] | None = None
    lengths_kv: tuple[int, ...] | None = None
    ragged: bool = False
    tail: int = 0  # tokens past the last offset
    scale: float | None = None
    cap: float = 0.0
    sink: bool = False
    block_kv: int = 64
    consumers: int = 2
    staging: int = 1
    q_stages: int = 2
    turns: bool = True
    stages: int = 2
    ordered: bool = True
    together: int = 2
    ctas: int = 3


class Call:
    """The tensors of a Shape, NaN in all that no sequence owns, and what came out."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, z = shape, shape
        rng = np.random.default_rng(seed)
        self.scale = z.dims[0] ** -0.5 if z.scale is None else z.scale
        batch, (seqlen_q, seqlen_kv) = z.batch, z.seqlen
        if z.ragged:
            batch, seqlen_q, seqlen_kv = 1, sum(z.lengths_q or ()) + z.tail, sum(z.lengths_kv or ()) + z.tail
        self.q = rng.standard_normal((batch, seqlen_q, z.heads[0], z.dims[0])).astype(np.float16)
        self.k = rng.standard_normal((batch, seqlen_kv, z.heads[1], z.dims[0])).astype(np.float16)
        self.v = rng.standard_normal((batch, seqlen_kv, z.heads[1], z.dims[1])).astype(np.float16)
        self.sink = rng.standard_normal(z.heads[0]).astype(np.float32)
        self.out = np.full((batch, seqlen_q, z.heads[0], z.dims[1]), 7, np.float16)
        self.lse = np.full((batch, z.heads[0], seqlen_q), 7, np.float32)
        self.places = self._places()
        for side, tensors in ((0, (self.q,)), (1, (self.k, self.v))):
            used = np.zeros(tensors[0].shape[:2], bool)
            for entry, *spans in self.places:
                used[entry, spans[side]] = True
            for x in tensors:
                x[~used] = np.nan

    def _places(self) -> list[tuple[int, slice, slice]]:
        """(first index, queries, keys) of each sequence."""
        z = self.shape
        if z.ragged:
            at = [np.cumsum([0, *lengths]) for lengths in (z.lengths_q or (), z.lengths_kv or ())]
            return [(0, *(slice(a[b], a[b + 1]) for a in at)) for b in range(len(at[0]) - 1)]
        long_q, long_kv = z.lengths_q or (z.seqlen[0],) * z.batch, z.lengths_kv or (z.seqlen[1],) * z.batch
        return [(b, slice(0, long_q[b]), slice(0, long_kv[b])) for b in range(z.batch)]

    def _arguments(self) -> dict[str, Any]:
        z = self.shape
        (d, d2), (v, v2) = boxes(z.dims[0]), boxes(z.dims[1])
        nothing = Ptr(self.lse.reshape(-1))
        offsets = [Ptr(np.cumsum([0, *(x or ())]).astype(np.int32)) for x in (z.lengths_q, z.lengths_kv)]
        used = [Ptr(np.array(x or (), np.int32)) for x in (z.lengths_q, z.lengths_kv)]
        batch = len(self.places) if z.ragged else z.batch
        seqlen_q, seqlen_kv = self.q.shape[1], self.k.shape[1]
        tiles = seqlen_q // (64 * z.consumers) + batch + 1 if z.ragged else -(-seqlen_q // (64 * z.consumers))
        units = z.heads[0] * (1 if z.ragged else batch)
        kind = sum((x < FAR) << i for i, x in enumerate(z.bounds))
        scale, slope = z.cap or self.scale or 1e-30, 2 * self.scale / z.cap if z.cap else 0.0
        ordered, order = not z.ragged and z.ordered, np.zeros((1, 1), np.int32)
        if ordered:
            blocks = schedule.key_blocks(Affine(*z.bounds), 64 * z.consumers, z.block_kv, seqlen_q, seqlen_kv)
            order = schedule.schedule(blocks, z.heads, batch, z.together, z.ctas)
        return {
            "q_desc": Desc(self.q, (1, 64, 1, d)), "q2_desc": Desc(self.q, (1, 64, 1, d2)),
            "k_desc": Desc(self.k, (1, z.block_kv, 1, d)), "k2_desc": Desc(self.k, (1, z.block_kv, 1, d2)),
            "v_desc": Desc(self.v, (1, z.block_kv, 1, v)), "v2_desc": Desc(self.v, (1, z.block_kv, 1, v2)),
            "o_desc": Desc(self.out, (1, 64, 1, 64 if z.staging == 3 else v)),
            "o2_desc": Desc(self.out, (1, 64, 1, v2)),
            "out_ptr": Ptr(self.out.reshape(-1)), "lse_ptr": nothing, "sink_ptr": Ptr(self.sink),
            "cu_q": offsets[0] if z.ragged else nothing, "cu_kv": offsets[1] if z.ragged else nothing,
            "used_q": used[0], "used_kv": used[1], "order": Ptr(order.reshape(-1)), "batch": batch, "heads": z.heads[0],
            "group": z.heads[0] // z.heads[1], "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "head_dim_v": z.dims[1],
            "left": z.bounds[0], "right": z.bounds[1], "right_top_left": z.bounds[2], "tiles_per_unit": tiles,
            "together": min(z.together, units), "n_turns": len(order) - 1 if ordered else -(-tiles * units // z.ctas),
            "scale_log2": np.float32(scale * LOG2E),
            "slope_log2": np.float32(slope * LOG2E), "CONSUMERS": z.consumers, "STAGES": z.stages, "D2": d2, "V2": v2,
            "RAGGED": z.ragged, "USED": 0 if z.ragged else (z.lengths_q is not None) + 2 * (z.lengths_kv is not None),
            "BOUNDS": kind, "ORDERED": ordered, "NEGATIVE": scale < 0, "SOFTCAP": bool(z.cap),
            "SINK": z.sink, "STAGING": z.staging, "REGISTERS": 240, "Q_STAGES": z.q_stages, "TURNS": z.turns,
        }  # fmt: skip

    def run(self, seed: int = 0, *, timeout: float = 20.0, also: dict[str, Any] | None = None) -> Call:
        """The kernel on every CTA; `also` replaces functions of the kernel by others."""
        launch(forward, "forward_kernel", (self.shape.ctas,), self._arguments(), seed=seed, timeout=timeout, also=also)
        return self

    def check(self, tolerance: float = 3e-3) -> None:
        """Compare every row of out and lse with float64; rows of no sequence must be 0 and -inf."""
        seen = np.zeros(self.out.shape[:2], bool)
        for entry, queries, keys in self.places:
            seen[entry, queries] = True
            out, lse = self._exact(entry, queries, keys)
            np.testing.assert_allclose(self.out[entry, queries], out, atol=tolerance)
            np.testing.assert_allclose(self.lse[entry, :, queries], lse, atol=tolerance)
        assert not self.out[~seen].any()
        assert (self.lse.transpose(0, 2, 1)[~seen] == -np.inf).all()

    def _exact(self, entry: int, queries: slice, keys: slice) -> tuple[Any, Any]:
        """(out [q_len, heads, dim], lse [heads, q_len]) of one sequence in float64."""
        z, group = self.shape, self.shape.heads[0] // self.shape.heads[1]
        q, k, v = (x.astype(np.float64) for x in (self.q[entry, queries], self.k[entry, keys], self.v[entry, keys]))
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        i, j = np.arange(len(q))[:, None], np.arange(len(k))[None]
        q_pos = i + len(k) - len(q)
        visible = (q_pos - z.bounds[0] <= j) & (j <= q_pos + z.bounds[1]) & (j <= i + z.bounds[2])
        s = np.einsum("ihd,jhd->hij", q, k) * self.scale
        if z.cap:
            s = z.cap * np.tanh(s / z.cap)
        s = np.where(visible, s, -np.inf)
        p = np.exp(s)
        total = p.sum(-1) + (np.exp(self.sink.astype(np.float64))[:, None] if z.sink else 0.0)
        with np.errstate(divide="ignore"):
            lse = np.log(total)
        return np.einsum("hij,jhd->ihd", p / np.where(total == 0, 1, total)[..., None], v), lse
