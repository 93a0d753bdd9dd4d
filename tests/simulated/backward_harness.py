"""One backward call on the simulated machine: NumPy stands in for the kernels before and after the main one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import simulated.gluon_sim as gluon_sim
import torch
from simulated.gluon_sim import Desc, Ptr

from kilat import reference
from kilat.backends.gluon import backward, backward_broad, backward_dq
from kilat.backends.gluon.heuristics import BackwardConfig, backward_config
from kilat.masks.affine import affine
from kilat.problem import Operands, Problem

LOG2E = 1.4426950408889634


@dataclass
class Setting:
    """A call: lengths per sequence if ragged or padded, else q_len and kv_len for all of `batch`."""

    q_len: int = 64
    kv_len: int = 128
    batch: int = 1
    heads: tuple[int, int] = (1, 1)
    dim: int = 128
    dim_v: int = 0  # 0: as dim
    mask: Any = None
    softcap: float = 0.0
    scale: float = 0.1
    ragged: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    padded: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    down: bool = False  # the last block of queries first
    deterministic: bool = False  # dQ by a kernel of its own
    lead: int = 0  # heads that come one after another, before the others; see `backward_place.take_place`
    together: int = 2  # heads whose tiles take turns; 0 and if ragged: one after another


def tensors(s: Setting, seed: int) -> dict[str, np.ndarray]:
    """q, k, v, do as [batch, seqlen, heads, dim] (ragged: batch 1) with NaN in what no sequence owns."""
    rng = np.random.default_rng(seed)
    batch = 1 if s.ragged else s.batch
    made = {}
    dim_v = s.dim_v or s.dim
    for name, heads, side, dim in (("q", 0, 0, s.dim), ("k", 1, 1, s.dim), ("v", 1, 1, dim_v), ("do", 0, 0, dim_v)):
        n = sum(s.ragged[side]) + 3 if s.ragged else (s.q_len, s.kv_len)[side]
        x = rng.standard_normal((batch, n, s.heads[heads], dim)).astype(np.float32)
        if s.ragged:
            x[:, n - 3 :] = np.nan
        for b, lengths in enumerate(zip(*s.padded, strict=True) if s.padded else ()):
            x[b, lengths[side] :] = np.nan
        made[name] = x
    return made


def problem(s: Setting, x: dict[str, np.ndarray]) -> tuple[Problem, Operands]:
    """For the oracle."""
    from kilat.scores import Softcap

    t = {name: torch.from_numpy(a[0] if s.ragged else a) for name, a in x.items()}
    op = Operands(t["q"], t["k"], t["v"])
    scores = (Softcap(s.softcap),) if s.softcap else ()
    op.score_tensors = ((),) * len(scores)
    if s.ragged:
        op.cu_seqlens_q, op.cu_seqlens_kv = (torch.from_numpy(_offsets(n)) for n in s.ragged)
    if s.padded:
        op.seqlens_q, op.seqlens_kv = (torch.tensor(n, dtype=torch.int32) for n in s.padded)
    p = Problem(
        layout="ragged" if s.ragged else "dense", dtype="float32", out_dtype="float32", device="cpu",
        head_dim=s.dim, head_dim_v=s.dim_v or s.dim, num_heads_q=s.heads[0], num_heads_kv=s.heads[1], mask=s.mask,
        scores=scores,
        padded_q=bool(s.padded), padded_kv=bool(s.padded), needs_grad=True, grad_of=frozenset("qkv"),
        batch=len(s.ragged[0]) if s.ragged else s.batch, seqlen_q=x["q"].shape[1], seqlen_kv=x["k"].shape[1],
        scale=s.scale,
    )  # fmt: skip
    return p, op


def _offsets(lengths: tuple[int, ...]) -> np.ndarray:
    return np.cumsum((0, *lengths)).astype(np.int32)


def run(s: Setting, seed: int = 0, timeout: float = 20.0) -> dict[str, float]:
    """Largest error of dq, dk and dv, relative to the largest exact value of each (0.1 at least)."""
    x = tensors(s, seed)
    p, op = problem(s, x)
    out, lse = reference.forward(p, op, exact=True)
    do = torch.from_numpy(x["do"][0] if s.ragged else x["do"])
    exact = reference.backward(p, op, out, lse, do, None, exact=True)
    found = simulate(s, p, x, out.numpy(), lse.numpy(), seed, timeout)
    errors = {}
    for name, value in found.items():
        want = getattr(exact, name).numpy().reshape(value.shape)
        error = np.abs(value - want).max() / max(np.abs(want).max(), 0.1)
        errors[name] = np.inf if np.isnan(error) else float(error)
    return errors


def simulate(
    s: Setting, p: Problem, x: dict[str, np.ndarray], out: np.ndarray, lse: np.ndarray, seed: int, timeout: float
) -> dict[str, np.ndarray]:
    """dq, dk, dv of the simulated kernel."""
    heads_q, heads_kv = s.heads
    sequences, config = p.batch, backward_config(p)
    block_q, block_kv, width = config.block_q, config.block_kv, sum(config.d)
    q_total, kv_total = x["q"].shape[1], x["k"].shape[1]
    if s.ragged:
        tiles = (q_total // block_q + sequences) * (block_q // 64)
        tiles_kv = kv_total // block_kv + sequences
        programs = tiles_kv * heads_kv
        all_tiles = tiles * heads_q
    else:
        tiles = -(-q_total // block_q) * (block_q // 64)
        tiles_kv = -(-kv_total // block_kv)
        programs = tiles_kv * heads_kv * sequences
        all_tiles = tiles * heads_q * sequences
    places = list(_rows(s, p, tiles, block_q))
    lse_rows, delta_rows = _prepared(s, x, out, lse, places, all_tiles)
    dq_pieces = np.zeros((all_tiles * (width // 64) * 32, 128), np.float32)
    dk, dv = (_poisoned(s, x[name], 1) for name in "kv")
    bounds = affine(s.mask)
    assert bounds is not None
    factor = s.scale * LOG2E if not s.softcap else 2 * LOG2E * s.scale / s.softcap
    args = {
        **_boxes(x, dict.fromkeys("kv", 64) | dict.fromkeys(("q", "do"), block_q), config),
        **_boxes({"dk": dk, "dv": dv}, {"dk": 64, "dv": 64}, config),
        "lse_desc": Desc(lse_rows, (1, 64)),
        "delta_desc": Desc(delta_rows, (1, 64)),
        "dq_desc": Desc(dq_pieces, (32, 128)),
        "dq_ptr": Ptr(dq_pieces.reshape(-1)),
        "dk_ptr": Ptr(dk.reshape(-1)),
        "dv_ptr": Ptr(dv.reshape(-1)),
        "offsets_q": Ptr(_offsets(s.ragged[0])) if s.ragged else None,
        "offsets_kv": Ptr(_offsets(s.ragged[1])) if s.ragged else None,
        "lengths_q": Ptr(np.array(s.padded[0], np.int32)) if s.padded else None,
        "lengths_kv": Ptr(np.array(s.padded[1], np.int32)) if s.padded else None,
        "batch": sequences, "seqlen_q": q_total, "seqlen_kv": kv_total, "num_heads_kv": heads_kv,
        "left": bounds.left, "right": bounds.right,
        "right_top_left": bounds.right_top_left, "tiles_kv": tiles_kv,
        "lead": 0 if s.ragged else s.lead, "together": None if s.ragged else s.together or None,
        "tiles": tiles, "dim": s.dim, "dim_v": p.head_dim_v,
        "scale": np.float32(s.scale), "factor": np.float32(factor), "cap_log2": np.float32(s.softcap * LOG2E),
        "BM": block_q, "D": width, "GROUP": heads_q // heads_kv, "BUFFERS": 3, "STAGES": 3 if width == 128 else 2,
        "D1": config.d[0], "D2": config.d[1], "V1": config.v[0], "V2": config.v[1],
        "FOREIGN": bool(s.ragged or s.padded),
        "MASKED": bool(s.mask or s.ragged or s.padded or s.kv_len % block_kv), "SOFTCAP": bool(s.softcap),
        "DOWN": s.down, "WITH_DQ": not s.deterministic,
    }  # fmt: skip
    module, kernel = (backward_broad, "backward_broad_kernel") if config.broad else (backward, "backward_kernel")
    _launch(module, kernel, programs, args, seed, timeout)
    found = {"k": dk[..., : s.dim], "v": dv}
    dq = _poisoned(s, x["q"], 0)
    if s.deterministic:
        _dq_by_queries(s, x, args | {"config": config, "dq": dq}, (lse_rows, delta_rows), seed, timeout)
    else:
        rows = unfragmented(dq_pieces, width)[..., : s.dim] * s.scale
        for b, h, start, n, tile in places:
            dq[0 if s.ragged else b, start : start + n, h] = rows[tile * 64 : tile * 64 + n]
    return found | {"q": dq}


def _poisoned(s: Setting, x: np.ndarray, side: int) -> np.ndarray:
    """A gradient of x as `prepare_kernel` leaves it: 0 in what no sequence owns, NaN in all else."""
    made = np.full(x.shape, np.nan, np.float32)
    if s.ragged:
        made[:, sum(s.ragged[side]) :] = 0
    for b, n in enumerate(s.padded[side] if s.padded else ()):
        made[b, n:] = 0
    return made


def _boxes(x: dict[str, np.ndarray], rows: dict[str, int], config: BackwardConfig) -> dict[str, Desc | None]:
    """Descriptors of the one or two boxes of tensors, as a kernel names them."""
    made: dict[str, Desc | None] = {}
    for name, array in x.items():
        first, second = config.v if name in ("v", "do", "dv") else config.d
        made[f"{name}_desc"] = Desc(array, (1, rows[name], 1, first))
        made[f"{name}2_desc"] = Desc(array, (1, rows[name], 1, second)) if second else None
    return made


def _launch(module: Any, kernel: str, programs: int, args: dict[str, Any], seed: int, timeout: float) -> None:
    """The kernel, with those of `args` that it takes."""
    taken = inspect.signature(getattr(module, kernel).fn).parameters
    given = {name: args[name] for name in taken}
    gluon_sim.launch(module, kernel, (programs,), given, seed=seed, timeout=timeout)


def _prepared(s: Setting, x: Any, out: Any, lse: Any, places: list[Any], all_tiles: int) -> tuple[Any, Any]:
    """lse in log2 units and delta, in tiles of 64 rows."""
    lse_rows = np.full((all_tiles, 64), np.inf, np.float32)
    delta_rows = np.zeros((all_tiles, 64), np.float32)
    for b, h, start, n, tile in places:
        one = lse[h, start : start + n] if s.ragged else lse[b, h, :n]
        o = (out if s.ragged else out[b])[start : start + n, h]
        g = (x["do"][0] if s.ragged else x["do"][b])[start : start + n, h]
        lse_rows.reshape(-1)[tile * 64 : tile * 64 + n] = np.where(np.isneginf(one), np.inf, one * LOG2E)
        delta_rows.reshape(-1)[tile * 64 : tile * 64 + n] = (o * g).sum(-1)
    return lse_rows, delta_rows


def _dq_by_queries(
    s: Setting, x: dict[str, np.ndarray], args: dict[str, Any], rows: Any, seed: int, timeout: float
) -> None:
    """Fill args["dq"] by the kernel that owns queries."""
    dq, config, sequences = args["dq"], args["config"], args["batch"]
    block_kv, total = config.dq_block_kv, dq.shape[1]
    blocks = total // 128 + sequences if s.ragged else -(-total // 128)
    rows_of = dict.fromkeys("kv", block_kv) | dict.fromkeys(("q", "do", "dq"), 64)
    given = args | _boxes(x | {"dq": dq}, rows_of, config)
    given |= {"dq_ptr": Ptr(dq.reshape(-1)), "lse_tiles": Ptr(rows[0].reshape(-1))}
    given |= {"delta_tiles": Ptr(rows[1].reshape(-1)), "num_heads_q": s.heads[0], "blocks": blocks, "BN": block_kv}
    given |= {"D": config.d[0], "V": config.v[0]}
    programs = blocks * s.heads[0] * (1 if s.ragged else sequences)
    _launch(backward_dq, "backward_dq_kernel", programs, given, seed, timeout)


def _rows(s: Setting, p: Problem, tiles: int, block_q: int) -> Any:
    """(batch entry, head, first row, rows, first tile) of every sequence and query head."""
    for b in range(p.batch):
        for h in range(p.num_heads_q):
            if s.ragged:
                start = int(_offsets(s.ragged[0])[b])
                yield b, h, start, s.ragged[0][b], h * tiles + (start // block_q + b) * (block_q // 64)
            else:
                n = s.padded[0][b] if s.padded else s.q_len
                yield b, h, 0, n, (b * p.num_heads_q + h) * tiles


def unfragmented(pieces: np.ndarray, width: int) -> np.ndarray:
    """dQ's accumulator in fragment order, [tiles * width / 64 * 32, 128] -> [tiles * 64, width]."""
    x = pieces.reshape(-1, width // 64, 4, 8, 8, 4, 2, 2)  # tile, 64 columns, warp, 8 columns, row, lane, half, pair
    return x.transpose(0, 2, 6, 4, 1, 3, 5, 7).reshape(-1, width)
