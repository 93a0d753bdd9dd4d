"""From a Problem and its tensors to the int64 arrays that CPU kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kilat.backends.cpu import user
from kilat.backends.cpu.emit import F32, F64, Type
from kilat.backends.cpu.layout import COMMON, DTYPE_CODES, QUANTISED_CODES, SEQ, Geometry
from kilat.backends.cpu.params import float_bits
from kilat.masks import core as masks
from kilat.scores import Alibi, Bias, Score, Softcap

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kilat.backends.cpu.isa import Isa
    from kilat.problem import Operands, Problem

_INDEX = {name: i for i, name in enumerate(COMMON)}


def compute_type(problem: Problem) -> Type:
    """What the kernel accumulates in: float64 for float64 inputs, else float32."""
    return F64 if problem.dtype == "float64" else F32


def torch_compute(problem: Problem) -> torch.dtype:
    """`compute_type` as torch names it."""
    return torch.float64 if problem.dtype == "float64" else torch.float32


def dtype_code(t: Tensor) -> int:
    """How kernels are told the type of a tensor's elements."""
    name = str(t.dtype).removeprefix("torch.")
    return QUANTISED_CODES[name] if name in QUANTISED_CODES else DTYPE_CODES[name]


def byte_strides(t: Tensor) -> list[int]:
    """Strides in bytes."""
    size = t.element_size()
    return [s * size for s in t.stride()]


def broadcast_strides(t: Tensor) -> list[int]:
    """Byte strides of a tensor seen as [batch, heads, seqlen_q, seqlen_kv]; 0 along axes of length 1."""
    size = t.element_size()
    strides = [0 if n == 1 else s * size for n, s in zip(t.shape, t.stride(), strict=True)]
    return [0] * (4 - len(strides)) + strides


class Call:
    """One call: lengths and mask bounds of every sequence, the parameter slots common to all kernels, and what the
    pointers in them keep alive (`keep`)."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.problem, self.operands = problem, operands
        self.keep: list[Any] = []
        self.q_token, self.q_len = _spans(problem.batch, problem.seqlen_q, operands.cu_seqlens_q, operands.seqlens_q)
        self.kv_token, self.kv_len = _spans(
            problem.batch, problem.seqlen_kv, operands.cu_seqlens_kv, operands.seqlens_kv
        )
        self.ragged_q = operands.cu_seqlens_q is not None
        self.ragged_kv = operands.cu_seqlens_kv is not None
        total = operands.q.shape[0] if self.ragged_q else problem.batch * problem.seqlen_q
        self.covers_queries = int(self.q_len.sum()) == total
        self.mask = None
        self.parts = None
        if problem.mask is not None:
            self.mask = problem.mask.with_tensors(tuple(_numpy(t) for t in operands.mask_tensors))
            self.parts = masks.decompose(self.mask)
        self.bounds = self._bounds()
        self.n_intervals = self.bounds[0].shape[0] if self.bounds else 0

    def _bounds(self) -> list[NDArray[np.int32]]:
        """Per sequence int32 [n_intervals, 2, q_len]; empty if every key is visible as far as intervals go."""
        if self.parts is None or self.parts.interval is None:
            return []
        interval, out = self.parts.interval, []
        if not masks.depends_on_batch(interval):
            known: dict[tuple[int, int], NDArray[np.int32]] = {}
            for key in zip(self.q_len.tolist(), self.kv_len.tolist(), strict=True):
                if key not in known:
                    known[key] = np.ascontiguousarray(masks.bounds(interval, 0, *key), dtype=np.int32)
                out.append(known[key])
            return out
        for b, (n, m) in enumerate(zip(self.q_len.tolist(), self.kv_len.tolist(), strict=True)):
            out.append(np.ascontiguousarray(masks.bounds(interval, b, n, m), dtype=np.int32))
        return out

    def pointer(self, array: NDArray[Any] | Tensor) -> int:
        """Address of an array that must outlive the call."""
        self.keep.append(array)
        return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data

    def common(self, params: NDArray[np.int64], tasks: NDArray[np.int64], geometry: Geometry, isa: Isa) -> None:
        """Fill the COMMON slots, scratch and counter excepted."""
        p, o = self.problem, self.operands
        seqs = np.zeros((max(p.batch, 1), len(SEQ)), np.int64)
        seqs[: p.batch, 0], seqs[: p.batch, 1] = self.q_token, self.kv_token
        seqs[: p.batch, 2], seqs[: p.batch, 3] = self.q_len, self.kv_len
        seqs[: len(self.bounds), 4] = [self.pointer(b) for b in self.bounds]
        put: dict[str, int] = {
            "seqs": self.pointer(seqs),
            "tasks": self.pointer(tasks),
            "ntasks": len(tasks),
            "num_heads_q": p.num_heads_q,
            "group": p.group,
            "head_dim": p.head_dim,
            "head_dim_v": p.head_dim_v,
            "dtype": dtype_code(o.q),
            "scale": float_bits(p.scale),
            "n_intervals": self.n_intervals,
            "dropout_scale": float_bits(1.0),
        }
        self._put_masks(put, geometry, isa)
        self._put_scores(put, geometry, isa)
        self._put_dropout(put)
        for name, value in put.items():
            params[_INDEX[name]] = value

    def _put_masks(self, put: dict[str, int], geometry: Geometry, isa: Isa) -> None:
        if self.parts is None:
            return
        tensors = self.operands.mask_tensors
        dense = [tensors[i] for i in self.parts.dense]
        rows = np.array([[t.data_ptr(), *broadcast_strides(t)] for t in dense], np.int64)
        put.update(n_dense=len(dense), dense=self.pointer(rows))
        if self.parts.predicates:
            table = []
            for predicate in self.parts.predicates:
                ts = tuple(tensors[i] for i in predicate.tensors)
                function = user.predicate_function(predicate.expr, user.dtype_names(ts), geometry, isa)
                table.append([function, self.pointer(user.environment(ts))])
            put.update(n_predicates=len(table), predicates=self.pointer(np.array(table, np.int64)))

    def _put_scores(self, put: dict[str, int], geometry: Geometry, isa: Isa) -> None:
        p, users = self.problem, []
        for modifier, tensors in zip(p.scores, self.operands.score_tensors, strict=True):
            put["has_scores"] = 1
            if isinstance(modifier, Softcap):
                put["softcap"] = float_bits(modifier.cap)
            elif isinstance(modifier, Alibi):
                slopes = tensors[0].detach().to(torch_compute(p)).contiguous()
                of_b, of_h = [0, *byte_strides(slopes)][-2:]
                put.update(alibi=self.pointer(slopes), alibi_b=of_b, alibi_h=of_h)
            elif isinstance(modifier, Bias):
                bias = tensors[0].detach()
                names = ("bias_b", "bias_h", "bias_i", "bias_j")
                put.update(zip(names, broadcast_strides(bias), strict=True))
                put.update(bias=self.pointer(bias), bias_dtype=dtype_code(bias))
            elif isinstance(modifier, Score):
                users.append(self._user(modifier, tensors, geometry, isa))
        if users:
            put.update(n_scores=len(users), scores=self.pointer(np.array(users, np.int64)))

    def _user(self, modifier: Score, tensors: Sequence[Tensor], geometry: Geometry, isa: Isa) -> list[int]:
        """Forward function, backward function (in tiles of the backward), environment of a user score."""
        plain = [t.detach() for t in tensors]
        self.keep.extend(plain)
        dtypes, backward = user.dtype_names(plain), 0
        forward = user.score_function(modifier.expr, dtypes, geometry, isa)
        if not geometry.query_lanes:
            backward = user.score_backward_function(modifier.d_expr, dtypes, geometry, isa)
        return [forward, backward, self.pointer(user.environment(plain))]

    def _put_dropout(self, put: dict[str, int]) -> None:
        p, o = self.problem, self.operands
        if not p.dropout:
            return
        keep_share = 1.0 - p.dropout_p
        put["dropout_scale"] = float_bits(1.0 / keep_share if keep_share > 0 else 0.0)
        if p.dropout == "keep":
            if o.keep is None:
                raise ValueError("keep must be a bool tensor when Problem.dropout is 'keep'; got None")
            put.update(zip(("keep_b", "keep_h", "keep_i", "keep_j"), broadcast_strides(o.keep), strict=True))
            put.update(dropout=2, keep=self.pointer(o.keep))
            return
        threshold = min(int(p.dropout_p * 2.0**32 + 0.5), 1 << 32)
        put.update(dropout=1, dropout_threshold=threshold, seed=_signed(o.seed), offset=_signed(o.offset))


def _signed(x: Tensor | int) -> int:
    """Seed or offset as the int64 with the same 64 bits."""
    value = int(x) & 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def _numpy(t: Any) -> Any:
    return t.detach().numpy() if isinstance(t, torch.Tensor) else t


def _spans(
    batch: int, seqlen: int, offsets: Tensor | None, lengths: Tensor | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first token, length) of every sequence."""
    if offsets is not None:
        cu = offsets.numpy().astype(np.int64)
        return cu[:-1], np.diff(cu)
    token = np.zeros(batch, np.int64)
    if lengths is not None:
        return token, lengths.numpy().astype(np.int64)
    return token, np.full(batch, seqlen, np.int64)
