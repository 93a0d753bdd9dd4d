"""One tile of the backward: from Q, K, V, dO, lse and delta to P (for dV) and dS (for dQ and dK), in scratch.

The plain case ends each product in its own softmax step; scores and dropout take the steps one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilat.backends.cpu.backward_products import (
    BLOCK_Q,
    NEGATIVE_INFINITY,
    Products,
    geometry,
    gradient,
    padded,
    probability,
    row_bytes,
    vector_type,
)
from kilat.backends.cpu.emit import I16, I64, PTR, Function, Module, Value
from kilat.backends.cpu.gemm import Blocking
from kilat.backends.cpu.isa import Isa
from kilat.backends.cpu.layout import COMMON, SEQ
from kilat.backends.cpu.params import Params
from kilat.backends.cpu.tiles import from_bits, to_bits
from kilat.backends.cpu.tiles_dropout import build_dropout_bits
from kilat.backends.cpu.tiles_mask import ALL, PARTIAL
from kilat.backends.cpu.tiles_scores import SOFTCAP, USER, build_scores_backward, build_scores_forward

BACKWARD = Params(
    *COMMON,
    *("q", "q_b", "q_n", "q_h", "k", "k_b", "k_n", "k_h", "v", "v_b", "v_n", "v_h"),
    *("out", "out_b", "out_n", "out_h", "do", "do_b", "do_n", "do_h", "out_dtype"),
    *("dq", "dq_b", "dq_n", "dq_h", "dk", "dk_b", "dk_n", "dk_h", "dv", "dv_b", "dv_n", "dv_h"),
    # dq in the compute type, unscaled, one a split over keys; bytes from the first to the second, and between others
    *("acc", "acc_b", "acc_n", "acc_h", "acc_second", "acc_split"),
    *("lse", "dlse", "delta", "lse_b", "lse_h"),  # one layout, queries contiguous; dlse may be null
    *("sink", "dsink", "nseqs"),  # dsink: float64 [heads]
    *("need_q", "need_k", "need_v", "sub", "alone"),  # sub: key tiles a chunk; alone: keys are not split
    *("dbias", "dbias_b", "dbias_h", "dbias_i", "dbias_j", "stages"),
    *("at_q", "at_do", "at_out", "at_lse", "at_delta", "at_p", "at_ds", "at_raw", "at_tmp", "at_bits", "at_drop"),
    *("at_table", "at_k", "at_kt", "at_vt", "at_dk", "at_dv", "at_bad"),
    *("at_qt", "at_dot", "at_rows", "at_keys", "at_dq"),  # of the bfloat16 kernel alone
)

ALL_STAGES = 0
"""Value of the parameter `stages` that takes dS to the raw scores; else it is the one stage of scores_backward."""


class Scope:
    """Reads of parameters, of one sequence's record and of scratch inside a kernel function."""

    def __init__(self, f: Function, block: Blocking, p: Value, scratch: Value) -> None:
        self.f, self.block, self.p, self.scratch = f, block, p, scratch

    def read(self, name: str) -> Value:
        return BACKWARD.read(self.f, self.p, name)

    def pointer(self, name: str) -> Value:
        return BACKWARD.pointer(self.f, self.p, name)

    def floating(self, name: str) -> Value:
        return BACKWARD.floating(self.f, self.p, name, self.block.compute)

    def buffer(self, name: str) -> Value:
        """A buffer of this thread's scratch."""
        return self.scratch.at(self.read(name))

    def sequence(self, b: Value) -> dict[str, Value]:
        """The fields of sequence b's record, and the record itself as "seq"."""
        record = self.pointer("seqs").at(b * (8 * len(SEQ)))
        fields = {n: self.f.load(I64, record, 8 * i) for i, n in enumerate(SEQ) if n != "bounds"}
        return {"seq": record, **fields}

    def base(self, name: str, b: Value, head: Value, token: Value) -> Value:
        """Pointer to the row of one token and head of a tensor with strides b, n, h."""
        sb, sn, sh = (self.read(f"{name}_{axis}") for axis in "bnh")
        return self.pointer(name).at(b * sb + token * sn + head * sh)

    def per_query(self, name: str, b: Value, head: Value, token: Value) -> Value:
        """Pointer into lse, dlse or delta."""
        offset = b * self.read("lse_b") + head * self.read("lse_h") + token * self.block.compute.bytes
        return self.pointer(name).at(offset)


@dataclass(frozen=True)
class _Steps:
    """Element-wise steps over a tile."""

    clear: Function
    copy: Function
    probabilities: Function
    gradients: Function
    drop: Function
    hide: Function


def build_steps(m: Module, block: Blocking) -> _Steps:
    """The element-wise steps; tiles are [64][vectors] vectors, dense, so one loop runs over rows and vectors."""
    vec = vector_type(block)
    row, size = block.vectors * vec.bytes, block.compute.bytes

    def bits_at(f: Function, bits: Value, r: Value, v: int) -> Value:
        return from_bits(f, f.load(I16, bits, r * (2 * block.vectors) + 2 * v), block.lanes)

    with m.function("clear", [PTR, I64]) as f:
        dst, count = f.args
        with f.range(0, count, vec.bytes) as o:
            f.store(f.const(0.0, vec), dst, o)
    clear = f
    with m.function("copy", [PTR, PTR, I64]) as f:
        src, dst, nr = f.args
        with f.range(0, nr * row, vec.bytes) as o:
            f.store(f.load(vec, src, o), dst, o)
    copy = f
    # p = exp(s - lse), 0 where masked and where a bias of -inf hides the key (lse may be -inf too)
    with m.function("step_probabilities", [PTR, PTR, PTR, I64, I64]) as f:
        s, lse, bits, masked, nr = f.args
        with f.range(0, nr) as r:
            row_lse = f.splat(f.load(block.compute, lse, r * size), block.lanes)
            for v in range(block.vectors):
                x = f.load(vec, s, r * row + v * vec.bytes)
                p = f.var(vec, f.select(x.ne(NEGATIVE_INFINITY), probability(f, x, row_lse), 0.0))
                with f.when(masked.eq(PARTIAL)):
                    p.set(f.select(bits_at(f, bits, r, v), p.get(), 0.0))
                f.store(p.get(), s, r * row + v * vec.bytes)
    probabilities = f
    with m.function("step_gradients", [PTR, PTR, PTR, PTR, I64, I64]) as f:
        p, dp, delta, bits, bad, nr = f.args
        with f.range(0, nr) as r:
            row_delta = f.splat(f.load(block.compute, delta, r * size), block.lanes)
            for v in range(block.vectors):
                o = r * row + v * vec.bytes
                share, grad = f.load(vec, p, o), f.load(vec, dp, o)
                ds = f.var(vec, gradient(f, share, grad, row_delta))
                with f.when(bad.ne(0)):  # here a visible pair of no weight is NaN, as 0 times NaN is
                    ds.set(f.select(bits_at(f, bits, r, v), share * (grad - row_delta), 0.0))
                f.store(ds.get(), dp, o)
    gradients = f
    # x = kept ? x / (1 - p) : 0
    with m.function("step_drop", [PTR, PTR, block.compute, I64]) as f:
        x, bits, factor, nr = f.args
        with f.range(0, nr) as r:
            for v in range(block.vectors):
                o = r * row + v * vec.bytes
                f.store(f.select(bits_at(f, bits, r, v), f.load(vec, x, o) * f.splat(factor, block.lanes), 0.0), x, o)
    drop = f
    # clear the bits of pairs whose score is -inf; unless `masked` all bits count as set before
    with m.function("step_hide", [PTR, PTR, I64, I64]) as f:
        s, bits, masked, nr = f.args
        with f.range(0, nr) as r:
            for v in range(block.vectors):
                at = bits.at(r * (2 * block.vectors) + 2 * v)
                before = f.select(masked.eq(PARTIAL), f.load(I16, at), f.const(-1, I16))
                seen = f.load(vec, s, r * row + v * vec.bytes).ne(NEGATIVE_INFINITY)
                f.store(before & to_bits(f, seen), at)
    return _Steps(clear, copy, probabilities, gradients, drop, f)


def build_tile(m: Module, block: Blocking, products: Products, isa: Isa) -> Function:
    """tile(P, seq, b, h, i0, nr, j0, nb, kind, bad, KT, VT, scratch) -> kind: P and dS of one tile.

    kind: class of mask_bits, not NONE; bad: Q, K, V or dO holds a non-finite number. Afterwards at_p holds P with
    dropout applied, at_ds dS to the stage that `stages` names, both 0 outside the mask, and at_table the extents.
    """
    steps, geo = build_steps(m, block), geometry(block)
    parts = (build_scores_forward(m, geo, isa), build_scores_backward(m, geo, isa), build_dropout_bits(m, geo))
    with m.function("tile", [PTR, PTR] + [I64] * 8 + [PTR, PTR, PTR], I64) as f:
        p, _, _, _, _, nr, _, nb, kind, bad, kt, vt, scratch = f.args
        scope = Scope(f, block, p, scratch)
        names = ("q", "do", "p", "ds", "lse", "delta", "bits", "table")
        buffers = {n: scope.buffer("at_" + n) for n in names}
        dim, dim_v = scope.read("head_dim"), scope.read("head_dim_v")
        with f.when(kind.eq(PARTIAL)):
            f.call(products.extents, buffers["bits"], nr, buffers["table"])
            for name in ("p", "ds"):
                f.call(steps.clear, buffers[name], f.const(BLOCK_Q * geo.row_bytes, I64))
        with f.when(kind.eq(ALL)):
            f.call(products.extents_all, nr, nb, buffers["table"])
        to_s = (buffers["q"], row_bytes(dim, block), kt, padded(dim, block), buffers["table"], nr, buffers["p"])
        to_dp = (buffers["do"], row_bytes(dim_v, block), vt, padded(dim_v, block), buffers["table"], nr, buffers["ds"])
        result = f.var(I64, kind)
        plain = scope.read("has_scores").eq(0) & scope.read("dropout").eq(0) & bad.eq(0)
        with f.when(plain):
            for masked, callee in ((ALL, products.probabilities), (PARTIAL, products.probabilities_masked)):
                with f.when(kind.eq(masked)):
                    f.call(callee, *to_s, buffers["lse"], buffers["bits"])
            f.call(products.gradients, *to_dp, buffers["delta"], buffers["p"])
        with f.unless(plain):
            result.set(_step_by_step(scope, products, steps, parts, (to_s, to_dp)))
        f.ret_value(result.get())
    return f


def _step_by_step(
    scope: Scope, products: Products, steps: _Steps, parts: tuple[Function, Function, Function],
    operands: tuple[Sequence[Value], Sequence[Value]],
) -> Value:  # fmt: skip
    """The tile with scores or dropout: S, its modifiers, P, dP, dropout, dS, the modifiers' derivatives."""
    f, (scores_forward, scores_backward, dropout_bits) = scope.f, parts
    where, nr, kind, bad = f.args[:8], f.args[5], f.args[8], f.args[9]
    result = f.var(I64, kind)
    has_scores, dropout = scope.read("has_scores").ne(0), scope.read("dropout").ne(0)
    p, ds, raw, drop = (scope.buffer(n) for n in ("at_p", "at_ds", "at_raw", "at_drop"))
    f.call(products.scores, *operands[0])
    with f.when(has_scores):
        f.call(steps.copy, p, raw, nr)
        f.call(scores_forward, *where, p)
    bits = scope.buffer("at_bits")
    with f.when(bad.ne(0)):  # a score of -inf hides a key as a mask does
        f.call(steps.hide, p, bits, kind, nr)
        result.set(PARTIAL)
    f.call(steps.probabilities, p, scope.buffer("at_lse"), bits, result.get(), nr)
    f.call(products.scores, *operands[1])
    with f.when(dropout):
        f.call(dropout_bits, *where, drop)
        f.call(steps.drop, ds, drop, scope.floating("dropout_scale"), nr)
    f.call(steps.gradients, p, ds, scope.buffer("at_delta"), bits, bad, nr)
    with f.when(has_scores):
        tmp, stages = scope.buffer("at_tmp"), scope.read("stages")
        whole = stages.eq(ALL_STAGES)
        f.call(scores_backward, *where, raw, ds, tmp, f.select(whole, f.const(USER, I64), stages))
        with f.when(whole):
            f.call(scores_backward, *where, raw, ds, tmp, f.const(SOFTCAP, I64))
    with f.when(dropout):
        f.call(steps.drop, p, drop, scope.floating("dropout_scale"), nr)
    return result.get()
