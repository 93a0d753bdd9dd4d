"""The host side of the backward on sm_90: what it takes, buffers, descriptors, three launches."""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kilat.backends.gluon.backward import backward_kernel
from kilat.backends.gluon.backward_dq import BLOCK_Q, backward_dq_kernel
from kilat.backends.gluon.backward_rows import finish_kernel, prepare_kernel
from kilat.masks.affine import Affine, affine
from kilat.numerics import LOG2E
from kilat.problem import Grads
from kilat.scores import Softcap

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.problem import Operands, Problem

BLOCK_KV = 128
MAX_DIM = 128
_ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def unsupported(problem: Problem) -> list[str]:
    """Every reason why this backward cannot do the problem, beyond the forward's own."""
    reasons: list[str] = []
    if max(problem.head_dim, problem.head_dim_v) > MAX_DIM:
        dims = f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}"
        reasons.append(f"the gluon backward takes head dimensions up to {MAX_DIM}; got {dims}")
    if problem.out_dtype != problem.dtype:
        reasons.append(f"the gluon backward needs out in q's dtype {problem.dtype}; got out_dtype={problem.out_dtype}")
    return reasons


@dataclass(frozen=True)
class Plan:
    """What follows from the Problem alone."""

    bounds: Affine
    width: int  # the head dimension that kernels work in
    block_q: int
    tiles: int  # of 64 rows, from one query head to the next
    tiles_kv: int
    all_tiles: int
    programs: int
    ragged: bool
    constants: dict[str, Any]
    numbers: dict[str, Any]


def plan_of(problem: Problem) -> Plan:
    """The plan of a Problem, remembered with it."""
    plan = problem.memo.get("gluon backward")
    if plan is None:
        plan = problem.memo["gluon backward"] = _make_plan(problem)
    return plan


def _make_plan(p: Problem) -> Plan:
    bounds = affine(p.mask)
    if bounds is None:
        raise ValueError(f"the gluon backend takes masks of one moving interval; got mask={p.mask!r}")
    width = 64 if max(p.head_dim, p.head_dim_v) <= 64 else 128
    block_q = 128 if width == 64 else 64
    ragged = p.layout == "ragged"
    per_block = block_q // 64
    if ragged:
        tiles, tiles_kv = (p.seqlen_q // block_q + p.batch) * per_block, p.seqlen_kv // BLOCK_KV + p.batch
        sequences = 1
    else:
        tiles, tiles_kv = -(-p.seqlen_q // block_q) * per_block, -(-p.seqlen_kv // BLOCK_KV)
        sequences = p.batch
    foreign = ragged or p.padded_q or p.padded_kv
    cap = next((s.cap for s in p.scores if isinstance(s, Softcap)), 0.0)
    constants = {
        "BM": block_q,
        "D": width,
        "BUFFERS": 3 if width == 64 else 4,
        "GROUP": p.group,
        "FOREIGN": foreign,
        "MASKED": p.mask is not None or foreign or p.seqlen_kv % BLOCK_KV > 0,
        "SOFTCAP": bool(cap),
        "TURNS": width == 128 and (bounds.kind[1] or bounds.kind[2]),
        "WITH_DQ": "q" in p.grad_of and not p.deterministic,
    }
    numbers = {
        "batch": p.batch, "seqlen_q": p.seqlen_q, "seqlen_kv": p.seqlen_kv, "num_heads_kv": p.num_heads_kv,
        "left": bounds.left, "right": bounds.right, "right_top_left": bounds.right_top_left,
        "tiles_kv": tiles_kv, "tiles": tiles, "dim": p.head_dim, "dim_v": p.head_dim_v, "scale": p.scale,
        "factor": 2.0 * LOG2E * p.scale / cap if cap else LOG2E * p.scale, "cap_log2": cap * LOG2E,
    }  # fmt: skip
    all_tiles, programs = tiles * p.num_heads_q * sequences, tiles_kv * p.num_heads_kv * sequences
    return Plan(bounds, width, block_q, tiles, tiles_kv, all_tiles, programs, ragged, constants, numbers)


def backward(
    problem: Problem, operands: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Gradients of what `problem.grad_of` names; see `Backend.backward`."""
    plan, o, wanted = plan_of(problem), operands, problem.grad_of
    exact = not plan.constants["FOREIGN"]  # every row of a gradient is written
    dq, dk, dv = ((torch.empty if exact else torch.zeros)(x.shape, dtype=x.dtype, device=x.device) for x in (o.q, o.k, o.v))
    sink = None if o.sink is None else torch.zeros_like(o.sink)
    if not (problem.batch and o.q.numel()):
        return _grads(problem, dq, dk.zero_(), dv.zero_(), sink)
    lse_tiles, delta_tiles = torch.empty((2, plan.all_tiles, 64), dtype=torch.float32, device=o.q.device)
    sums_dq = plan.constants["WITH_DQ"]
    pieces = plan.all_tiles * (plan.width // 64) * 32 if sums_dq else 32
    dq_pieces = torch.empty((pieces, 128), dtype=torch.float32, device=o.q.device)
    _prepare(problem, o, (out, lse, dout, dlse), (lse_tiles, delta_tiles, dq_pieces))
    if o.k.numel() and not wanted.isdisjoint("qkv"):
        _main(problem, o, dout, (lse_tiles, delta_tiles, dq_pieces), (dk, dv))
    if "q" in wanted and not sums_dq:
        _dq_by_queries(problem, o, dout, (lse_tiles, delta_tiles), dq)
    elif sums_dq:
        _finish(problem, o, dq_pieces, dq)
    if sink is not None and "sink" in wanted and o.sink is not None:
        sink = _sink_gradient(problem, o.sink, lse_tiles, delta_tiles)
    return _grads(problem, dq, dk, dv, sink)


def _grads(problem: Problem, dq: Tensor, dk: Tensor, dv: Tensor, sink: Tensor | None) -> Grads:
    grads = Grads(*(x if name in problem.grad_of else None for name, x in zip("qkv", (dq, dk, dv), strict=True)))
    grads.sink = sink if "sink" in problem.grad_of else None
    grads.score_tensors = [[] for _ in problem.scores]
    return grads


def _strides(x: Tensor, ragged: bool) -> tuple[int, ...]:
    """Strides (batch, token, head)."""
    return (0, *x.stride()[:2]) if ragged else tuple(x.stride()[:3])


def _prepare(problem: Problem, o: Operands, given: tuple[Any, ...], made: tuple[Tensor, ...]) -> None:
    plan, (out, lse, dout, dlse) = plan_of(problem), given
    of_dlse = (0, 0, 0)
    if dlse is not None:
        dlse = dlse.float()
        of_h, of_n = dlse.stride()[-2:]
        of_dlse = (0 if plan.ragged else dlse.stride(0), of_n, of_h)
    prepare_kernel[(plan.all_tiles // (plan.block_q // 64),)](
        out, dout, lse.contiguous(), dlse, *made, o.cu_seqlens_q, o.seqlens_q,
        problem.batch, problem.seqlen_q, problem.num_heads_q, plan.tiles, problem.head_dim_v,
        *_strides(out, plan.ragged), *_strides(dout, plan.ragged), *of_dlse,
        BLOCK=plan.block_q, D=plan.width, WITH_DQ=plan.constants["WITH_DQ"], num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _finish(problem: Problem, o: Operands, dq_pieces: Tensor, dq: Tensor) -> None:
    plan = plan_of(problem)
    finish_kernel[(plan.all_tiles // (plan.block_q // 64),)](
        dq_pieces, dq, o.cu_seqlens_q, o.seqlens_q, problem.batch, problem.seqlen_q, problem.num_heads_q, plan.tiles,
        problem.head_dim, problem.scale, BLOCK=plan.block_q, D=plan.width, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _main(problem: Problem, o: Operands, dout: Tensor, made: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> None:
    plan = plan_of(problem)
    lse_tiles, delta_tiles, dq_pieces = made
    dout = dout if dout.dtype == o.q.dtype else dout.to(o.q.dtype)
    rows = [TensorDescriptor.from_tensor(x, [1, 64], _ROW_LAYOUT) for x in (lse_tiles, delta_tiles)]
    backward_kernel[(plan.programs,)](
        descriptor(o.q, plan.block_q, plan), descriptor(o.k, 64, plan), descriptor(o.v, 64, plan),
        descriptor(dout, plan.block_q, plan), *rows, TensorDescriptor.from_tensor(dq_pieces, [32, 128], _ROW_LAYOUT),
        *(descriptor(x, 64, plan) for x in out), *out, o.cu_seqlens_q, o.cu_seqlens_kv, o.seqlens_q, o.seqlens_kv,
        **plan.numbers, **plan.constants, num_warps=4, maxnreg=168, enable_fp_fusion=True,
    )  # fmt: skip


def _dq_by_queries(
    problem: Problem, o: Operands, dout: Tensor, rows: tuple[Tensor, ...], dq: Tensor
) -> None:
    """dQ without atomics, for deterministic=True."""
    if not o.k.numel():
        dq.zero_()
        return
    plan, constants = plan_of(problem), plan_of(problem).constants
    dout = dout if dout.dtype == o.q.dtype else dout.to(o.q.dtype)
    block_kv = 8192 // plan.width
    block_q = BLOCK_Q.value
    blocks = problem.seqlen_q // block_q + problem.batch if plan.ragged else -(-problem.seqlen_q // block_q)
    programs = blocks * problem.num_heads_q * (1 if plan.ragged else problem.batch)
    shared = "batch seqlen_q seqlen_kv left right right_top_left tiles dim scale factor cap_log2".split()
    backward_dq_kernel[(programs,)](
        descriptor(o.q, 64, plan), descriptor(o.k, block_kv, plan), descriptor(o.v, block_kv, plan),
        descriptor(dout, 64, plan), descriptor(dq, 64, plan), dq, *rows,
        o.cu_seqlens_q, o.cu_seqlens_kv, o.seqlens_q, o.seqlens_kv, num_heads_q=problem.num_heads_q, blocks=blocks,
        **{name: plan.numbers[name] for name in shared},
        **{name: constants[name] for name in ("BM", "D", "GROUP", "SOFTCAP", "FOREIGN")}, BN=block_kv,
        num_warps=4, maxnreg=168, enable_fp_fusion=True,
    )  # fmt: skip


def descriptor(x: Tensor, rows: int, plan: Plan) -> TensorDescriptor:
    """Boxes [1, rows, 1, width] of x as [batch, seqlen, heads, dim]; what TMA cannot read is copied.

    TMA wants addresses and strides in multiples of 16 bytes and none of them 0.
    """
    x = x.detach().unsqueeze(0) if plan.ragged else x.detach()
    unit = 16 // x.element_size()
    readable = x.data_ptr() % 16 == 0 and x.stride(3) == 1
    if not readable or any(n > 1 and (s == 0 or s % unit) for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)):
        whole = x.new_empty((*x.shape[:3], -(-x.shape[3] // unit) * unit))
        x = whole[..., : x.shape[3]].copy_(x)
    strides = [s if n > 1 else unit for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)]
    box = [1, rows, 1, plan.width]
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(x, list(x.shape), [*strides, 1], box, gl.NVMMASharedLayout.get_default_for(box, kind))


def _sink_gradient(problem: Problem, sink: Tensor, lse_tiles: Tensor, delta_tiles: Tensor) -> Tensor:
    """dsink = - sum over rows of exp(sink - lse) * (delta - dlse)."""
    shape = (-1, problem.num_heads_q, plan_of(problem).tiles * 64)
    share = torch.exp2(sink.float()[:, None] * LOG2E - lse_tiles.view(shape))
    return -(share * delta_tiles.view(shape)).sum((0, 2)).to(sink.dtype)


__all__ = ["backward", "descriptor", "unsupported"]
