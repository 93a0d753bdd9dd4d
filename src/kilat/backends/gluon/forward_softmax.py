# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
"""Softmax that keeps its shift m until a maximum has grown by more than 2^8, so that O is seldom rescaled.

P = exp(S - m) is then up to 2^8, where float16 ends at 2^16; l and O are float32, and m is that of P, so that O / l and
lse = m + log l stay what they are. Each row decides for itself, whatever other rows of its warp hold, and alpha is
exactly 1 where it keeps m; only whether a warp of 16 rows multiplies at all takes a vote.
H200, 16k causal, rescaled at every block and so: 518 and 534 TFLOP/s at head_dim 64, 675 and 708 at 128, 702 and 767
at 256, where the multiplications are a quarter of all instructions.

The votes and the branches around the multiplications stand in PTX, since Triton's values of a warp are not its scalars.
Registers of a thread: of a row's tensor [64] rows r and r + 8; of O two columns of row r, two of r + 8, and so on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SETTLE = gl.constexpr("""{
    .reg .pred upper, lower, any;
    .reg .f32 growth;
    mov.f32 $0, $8;
    mov.f32 $1, $9;
    mov.f32 $2, 0f3F800000;
    mov.f32 $3, 0f3F800000;
    sub.f32 growth, $6, $8;
    setp.gt.f32 upper, growth, 0f41000000;
    sub.f32 growth, $7, $9;
    setp.gt.f32 lower, growth, 0f41000000;
    or.pred any, upper, lower;
    vote.sync.any.pred any, any, 0xffffffff;
    selp.s32 $4, 1, 0, any;
    mov.s32 $5, $4;
    @!any bra.uni STAYS;
    selp.f32 $0, $6, $8, upper;
    selp.f32 $1, $7, $9, lower;
    sub.f32 growth, $8, $0;
    @upper ex2.approx.ftz.f32 $2, growth;
    sub.f32 growth, $9, $1;
    @lower ex2.approx.ftz.f32 $3, growth;
STAYS:
}""")
"""Outputs: m' (0, 1), exp(m - m') (2, 3), whether any row of the warp moved (4, 5). Inputs: best (6, 7), m (8, 9).

Not a number (both -inf: no key seen yet) is no growth. 0f3F800000 is 1, 0f41000000 is 8.
"""


@gluon.jit
def row_max(x, m, scale_log2, NEGATIVE: gl.constexpr):
    """The largest of m and the scores of each row, in log2 units."""
    # per thread first, two columns at a time: one chain of maxima a row would be 4 cycles a column
    pairs = gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])
    if NEGATIVE:
        best = gl.min(gl.min(pairs, 1), 1)
    else:
        best = gl.max(gl.max(pairs, 1), 1)
    return gl.maximum(m, gl.convert_layout(best, m.type.layout) * scale_log2)


@gluon.jit
def settled(best, m):
    """(m', exp(m - m'), moved): m' is m, or the largest score so far where that is greater by more than 8 (log2).

    moved: 0 where all of a warp's rows kept m. The branch also keeps ptxas from drawing the second row's maxima out
    under the first row's exponentials.
    """
    return gl.inline_asm_elementwise(
        SETTLE, "=&f,=&f,=&f,=&f,=&r,=&r,f,f,f,f", [best, m], (gl.float32, gl.float32, gl.int32), is_pure=False, pack=2
    )


@gluon.jit
def softmax(x, m, scale_log2, L_L: gl.constexpr):
    """P and its row sums [64, 8] of one block of scores; these are summed per thread, its columns belong together.

    A row that has seen no key has m = -inf; its shift is 0, so that exp gives 0 and not NaN.
    """
    shift = gl.where(m == float("-inf"), 0.0, m)
    p = gl.exp2(x * scale_log2 - gl.expand_dims(shift, 1))
    part = gl.sum(gl.reshape(p, [x.shape[0], x.shape[1] // 8, 8]), 1)
    return p, gl.convert_layout(part, L_L)


@gluon.jit
def packed(p, dtype: gl.constexpr):
    """P in half precision, two to a register.

    As a conversion LLVM would put it behind the branch of `rescaled`, where no exponential is left to hide it.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], gl.float16, is_pure=False, pack=2
        )


@gluon.constexpr_function
def _scaling(n):
    """Outputs (n) are the first n inputs, times the second n unless the third, all equal, are 0."""
    lines = [f"mov.f32 ${i}, ${n + i};" for i in range(n)]
    lines += [".reg .pred stays;", f"setp.eq.s32 stays, ${3 * n}, 0;", "@stays bra.uni STAYS;"]
    lines += [f"mul.f32 ${i}, ${n + i}, ${2 * n + i};" for i in range(n)]
    return "\n".join(["{", *lines, "STAYS:", "}"])


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=&f"] * n + ["f"] * (2 * n) + ["r"] * n)


@gluon.jit
def rescaled(o, alpha, moved):
    """O [64, V] times alpha of each row, without a multiplication in a warp where no row moved."""
    N: gl.constexpr = o.shape[1] // 2  # registers of a thread
    of_o: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    alpha = gl.expand_dims(gl.convert_layout(alpha, of_o), 1)
    moved = gl.expand_dims(gl.convert_layout(moved, of_o), 1)
    return gl.inline_asm_elementwise(_scaling(N), _operands(N), [o, alpha, moved], gl.float32, is_pure=False, pack=N)
