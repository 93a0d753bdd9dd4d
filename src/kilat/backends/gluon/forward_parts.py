# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
"""The steps of the forward kernel: loads, turns, S, the way out. Names ending in 2 are a row's second box."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from kilat.backends.gluon import heuristics
from kilat.backends.gluon._compat import aggregate, async_load, async_store, cta_barrier

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
PIECE = gl.constexpr(heuristics.PIECE)


@aggregate
class Shared:
    """Buffers and barriers: Q by consumer, K and V rings, the output's staging by consumer."""

    q: gl.shared_memory_descriptor
    q2: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k2: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    v2: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    o2: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor
    v_raw: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, q2, k, k2, v, v2, o, o2, q_full, q_free, k_full, k_free, v_full, v_free, v_raw, turn):
        self.q = q
        self.q2 = q2
        self.k = k
        self.k2 = k2
        self.v = v
        self.v2 = v2
        self.o = o
        self.o2 = o2
        self.q_full = q_full
        self.q_free = q_free
        self.k_full = k_full
        self.k_free = k_free
        self.v_full = v_full
        self.v_free = v_free
        self.v_raw = v_raw
        self.turn = turn


@gluon.jit
def load(x, x2, full, desc, desc2, b, h, row, at, D2: gl.constexpr):
    """Box(es) at a row of head h into buffer `at`; their bytes count at the barrier `full`."""
    if D2:
        mbarrier.expect(full, desc.block_type.nbytes + desc2.block_type.nbytes)
        async_load(desc2, [b, row, h, desc.block_shape[3]], full, x2.index(at))
    else:
        mbarrier.expect(full, desc.block_type.nbytes)
    async_load(desc, [b, row, h, 0], full, x.index(at))


@gluon.jit
def clear_rows(x, first, ROWS: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a [1, ROWS, 1, D] buffer from `first` on; a warp does 8 rows of 64 columns at a time."""
    WIDE: gl.constexpr = 64 if D > 64 else D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [gl.num_warps(), 1], [1, 0])
    tile = x.reshape([ROWS, D])
    for r in gl.static_range(0, ROWS, 8):
        if r + 8 > first:
            row = r + gl.arange(0, 8, gl.SliceLayout(1, layout))
            for c in gl.static_range(0, D, WIDE):  # more at once would spill the producer's few registers
                part = tile.slice(r, 8, dim=0).slice(c, WIDE, dim=1)
                part.store(gl.where(gl.expand_dims(row, 1) < first, part.load(layout), 0.0).to(x.dtype))


@gluon.jit
def load_seen_v(
    m, v_desc, v2_desc, b, h, row, slot, seen, count, ROWS: gl.constexpr, D: gl.constexpr, V2: gl.constexpr
):
    """A block of V of which only `seen` rows are seen by anybody, the rest zero: P = 0 there, but 0 * NaN is NaN."""
    load(m.v, m.v2, m.v_raw, v_desc, v2_desc, b, h, row, slot, V2)
    mbarrier.wait(m.v_raw, count & 1)
    clear_rows(m.v.index(slot), seen, ROWS, D)
    if V2:
        clear_rows(m.v2.index(slot), seen, ROWS, V2)
    fence_async_shared()
    mbarrier.arrive(m.v_full.index(slot), count=1)


@gluon.jit
def capped(x, slope_log2):
    """tanh(x * scale / cap), where slope_log2 is 2 scale / cap in log2 units: the scores without their cap."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * slope_log2))


@gluon.jit
def take_turn(m, turns, W: gl.constexpr, TURNS: gl.constexpr):
    """Wait until it is consumer W's turn to issue products; it has had `turns` of them."""
    if TURNS:
        mbarrier.wait(m.turn.index(W), (turns & 1) ^ (1 if W == 0 else 0))


@gluon.jit
def pass_turn(m, W: gl.constexpr, CONSUMERS: gl.constexpr, TURNS: gl.constexpr):
    """The next consumer's turn to issue products."""
    if TURNS:
        mbarrier.arrive(m.turn.index((W + 1) % CONSUMERS), count=1)


@gluon.jit
def issue_qk(m, at, zero, slot, D: gl.constexpr, D2: gl.constexpr, BLOCK_KV: gl.constexpr):
    """S = Q K^T under way: [64, BLOCK_KV], of buffer `at` of Q and buffer `slot` of K."""
    q = m.q.index(at).reshape([64, D])
    k = m.k.index(slot).reshape([BLOCK_KV, D])
    st = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if D2:
        q2 = m.q2.index(at).reshape([64, D2])
        k2 = m.k2.index(slot).reshape([BLOCK_KV, D2])
        st = warpgroup_mma(q2, k2.permute((1, 0)), st, is_async=True)
    return st


@gluon.jit
def hide(x, col, start, stop, LEFT: gl.constexpr, NEGATIVE: gl.constexpr):
    """x [64, BLOCK_KV] with the keys outside [start, stop) of each query hidden: -inf after a scale of either sign.

    A thread's columns differ from those of its neighbours in bits 1 and 2. These are taken to the row's side of the
    comparison, which leaves constants: else each column is a register, and at 160 registers they are spilled.
    """
    hidden: gl.constexpr = float("inf") if NEGATIVE else float("-inf")
    lane = col & 6
    visible = col - lane < gl.expand_dims(stop, 1) - lane
    if LEFT:
        visible = visible & (col - lane >= gl.expand_dims(start, 1) - lane)
    return gl.where(visible, x, hidden)


@gluon.jit
def store_rows(ptr, x, row, rows, stride, dim):
    """Write x [64, D] to rows of `stride` elements at ptr: rows below `rows`, columns below `dim`.

    The tile's first query belongs into `row`, not into ptr: else the offsets are the same for all tiles, and ptxas
    keeps (and spills) them instead of working them out.
    """
    layout: gl.constexpr = x.type.layout
    col = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))
    inside = gl.expand_dims(row < rows, 1) & gl.expand_dims(col < dim, 0)
    at = gl.expand_dims(row.to(gl.int64) * stride, 1) + gl.expand_dims(col, 0)
    gl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def copy_rows(ptr, buffer, rows, stride, dim, N: gl.constexpr):
    """Write rows of a [64, N] buffer below `rows`, columns below `dim`, to rows of `stride` elements at ptr."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    col = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, layout)), 0)
    for r in gl.static_range(0, 64, 8):
        row = gl.expand_dims(r + gl.arange(0, 8, gl.SliceLayout(1, layout)), 1)
        part = buffer.slice(r, 8, dim=0).load(layout)
        gl.store(ptr + row * stride + col, part, mask=(row < rows) & (col < dim))


@gluon.jit
def store_box(buffer, desc, x, ptr, b, token, h, rows, stride, dim, FIRST: gl.constexpr, RAGGED: gl.constexpr):
    """Write x [64, N] through shared memory to columns from FIRST on of tokens from `token` on; `rows` of them exist.

    A box drops what lies past the tensor's end. In a ragged tensor another sequence may follow: then rows are copied.
    """
    N: gl.constexpr = x.shape[1]
    flat = buffer.reshape([64, N])
    flat.store(x.to(desc.dtype))
    fence_async_shared()
    cta_barrier()
    if RAGGED and rows < 64:
        copy_rows(ptr + FIRST, flat, rows, stride, dim - FIRST, N)
    else:
        async_store(desc, [b, token, h, FIRST], buffer)


@gluon.jit
def half(x, UPPER: gl.constexpr):
    """The lower or upper half of the columns of x; no data moves between threads."""
    low, high = gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))
    if UPPER:
        return high
    else:
        return low


@gluon.jit
def store_pieces(m, desc, x, ptr, b, token, h, rows, stride, dim, W: gl.constexpr, RAGGED: gl.constexpr):
    """Write x [64, 4 PIECE] a piece at a time; the third and fourth wait for the first and second to leave.

    The first waits for all of the tile before: that may have been copied, and then to count stores would say nothing.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    for i in gl.static_range(4):
        if i == 0:
            tma.store_wait(0)
            cta_barrier()
        if i >= 2:
            tma.store_wait(1)
            cta_barrier()
        part = gl.convert_layout(half(half(x, i // 2), i % 2), layout, assert_trivial=True)
        buffer = m.o.index(W * 2 + i % 2)
        store_box(buffer, desc, part, ptr, b, token, h, rows, stride, dim, i * PIECE, RAGGED)


@gluon.jit
def finish(m, l, sink_ptr, h, SINK: gl.constexpr):
    """(factor of O, lse) of each row; (0, -inf) where nothing was seen and there is no sink."""
    if SINK:
        sink = gl.load(sink_ptr + h).to(gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        shift = gl.where(top == float("-inf"), 0.0, top)
        seen = gl.exp2(m - shift)
        total = l * seen + gl.exp2(sink - shift)
    else:
        shift = m
        seen = 1.0
        total = l
    factor = gl.where(total == 0.0, 0.0, seen / total)
    return factor, (shift + gl.log2(total)) * LN2


@gluon.jit
def write_tile(
    m, s, o_desc, o2_desc, out_ptr, lse_ptr, sink_ptr, o, o2, top, l, row, rows,
    W: gl.constexpr, V2: gl.constexpr, RAGGED: gl.constexpr, USED: gl.constexpr, SINK: gl.constexpr,
    STAGING: gl.constexpr,
):  # fmt: skip
    """Write O / l and lse of a consumer's 64 rows; `rows` is where they lie (see `locate`), o the sum of P V."""
    b, h, row_q, i0, q_rows, q_len, head_dim_v = rows
    V: gl.constexpr = o.shape[1]
    of_o: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    of_o2: gl.constexpr = gl.SliceLayout(1, o2.type.layout)
    factor, lse = finish(top, gl.convert_layout(gl.sum(l, 1), top.type.layout), sink_ptr, h, SINK)
    unused = i0 + row >= q_len  # rows past a used length, tokens past the last offset
    lse = gl.where(unused, float("-inf"), lse)
    factor = gl.where(unused, 0.0, factor)
    if RAGGED or USED & 1:
        o = gl.where(gl.expand_dims(gl.convert_layout(unused, of_o), 1), 0.0, o)
    o = o * gl.expand_dims(gl.convert_layout(factor, of_o), 1)
    # ragged: b is 0, row_q the sequence's first token, and `batch` rows of lse are heads
    token = row_q + i0
    lse_at = h.to(gl.int64) * s.seqlen_q + token
    if not RAGGED:
        lse_at = (b * s.heads + h).to(gl.int64) * s.seqlen_q + token
    gl.store(lse_ptr + lse_at + row, lse, mask=i0 + row < q_rows)
    stride = s.heads * head_dim_v
    out = out_ptr + ((b.to(gl.int64) * s.seqlen_q + row_q) * stride + h * head_dim_v)
    left = q_rows - i0
    if V2:
        if RAGGED or USED & 1:
            o2 = gl.where(gl.expand_dims(gl.convert_layout(unused, of_o2), 1), 0.0, o2)
        o2 = o2 * gl.expand_dims(gl.convert_layout(factor, of_o2), 1)
    if STAGING:
        if STAGING == 1:
            tma.store_wait(0)
            cta_barrier()  # the output of the tile before has left the buffer
        out += (i0 + W * 64).to(gl.int64) * stride
        token += W * 64
        left -= W * 64
        if STAGING == 3:
            store_pieces(m, o_desc, o, out, b, token, h, left, stride, head_dim_v, W, RAGGED)
        else:
            store_box(m.o.index(W), o_desc, o, out, b, token, h, left, stride, head_dim_v, 0, RAGGED)
        if V2:
            store_box(m.o2.index(W), o2_desc, o2, out, b, token, h, left, stride, head_dim_v, V, RAGGED)
    else:
        store_rows(out, o, i0 + row, q_rows, stride, head_dim_v)
        if V2:
            store_rows(out + V, o2, i0 + row, q_rows, stride, head_dim_v - V)
