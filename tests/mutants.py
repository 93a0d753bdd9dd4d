"""Single-line bugs that the tests must catch, planted one at a time by `scripts/mutation_check.py`.

Each names a file below src/kilat, a text that stands there exactly once, what replaces it, and the tests to run.
"""

from __future__ import annotations

from typing import NamedTuple

MASKS = "tests/test_masks.py tests/test_forward.py tests/test_masks_proof.py"
FORWARD = "tests/test_cpu_forward.py tests/test_forward.py tests/test_nan.py"
BACKWARD = "tests/test_backward.py tests/test_cpu_backward.py"
CACHED = "tests/test_cached.py tests/test_ragged.py"
UNREAD = "tests/test_append_unread.py"
SPLITS = "tests/test_cpu_splits.py"
RING = "tests/test_ring.py"
FUSED = "tests/test_cached_fused.py"
QUANTISED = "tests/test_quantised.py"
TILES = "tests/test_cpu_tiles.py tests/test_cpu_user.py"
HALF = "tests/test_cpu_backward_half.py"  # skipped, and its mutants not caught, where bfloat16 pairs have no product


class Mutant(NamedTuple):
    """One planted bug."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    # ---- masks: every bound shifted by one, every rule bent
    Mutant("masks/causal.py", "return q_pos + 1", "return q_pos + 2", MASKS),
    Mutant("masks/causal.py", "return i + 1", "return i", MASKS),
    Mutant("masks/window.py", "maximum(q_pos - p.left, p.first)", "maximum(q_pos - p.left + 1, p.first)", MASKS),
    Mutant("masks/window.py", "return q_pos + p.right + 1", "return q_pos + p.right", MASKS),
    Mutant("masks/window.py", "return q_pos * 0 + p.first", "return q_pos * 0 + p.first + 1", MASKS),
    Mutant(
        "masks/chunked.py", "return fdiv(q_pos, p.size) * p.size + p.size", "return fdiv(q_pos, p.size) * p.size", MASKS
    ),
    Mutant("masks/prefix.py", "maximum(q_pos + 1, p.lengths)", "maximum(q_pos + 1, p.lengths + 1)", MASKS),
    Mutant("masks/key_range.py", "return q_pos * 0 + p.stop", "return q_pos * 0 + p.stop + 1", MASKS),
    Mutant(
        "masks/documents.py", "np.where(np.repeat(runs, length) >= 0,", "np.where(np.repeat(runs, length) > 0,", MASKS
    ),
    Mutant(
        "masks/ranges.py",
        "full_start = -(-start[:, last] // block_kv)",
        "full_start = start[:, last] // block_kv",
        MASKS,
    ),
    Mutant(
        "masks/ranges.py",
        'np.searchsorted(stop, keys, side="right")',
        'np.searchsorted(stop, keys, side="left")',
        MASKS,
    ),
    # ---- tile functions of the CPU
    Mutant(
        "backends/cpu/tiles_mask.py",
        "(_key(f, starts.at(last)) <= tile.j0)",
        "(_key(f, starts) <= tile.j0)",
        TILES + " " + FORWARD,
    ),
    Mutant("backends/cpu/tiles_mask.py", "(highest > tile.j0)", "(highest > tile.j0 + 1)", TILES + " " + FORWARD),
    Mutant(
        "backends/cpu/tiles_mask.py",
        "mask = mask | _inside(key, *interval)",
        "mask = mask & _inside(key, *interval)",
        TILES,
    ),
    Mutant(
        "backends/cpu/tiles_dropout.py",
        "narrow(f, (seed ^ offset) >> 32)",
        "narrow(f, seed >> 32)",
        TILES + " tests/test_dropout.py",
    ),
    Mutant("backends/cpu/tiles_scores.py", "(1.0 - t) * (1.0 + t)", "(1.0 - t)", TILES + " " + BACKWARD),
    Mutant("backends/cpu/tiles_scores.py", "f.fma(-slope, distance,", "f.fma(slope, distance,", TILES + " " + FORWARD),
    Mutant("backends/cpu/tiles_scores.py", "cell.i + shift - cell.j", "cell.i - cell.j", TILES + " " + FORWARD),
    Mutant("backends/cpu/tiles_scores.py", "k = n - 1 - done", "k = done", TILES + " " + BACKWARD),
    # ---- the forward kernel
    Mutant(
        "backends/cpu/forward_tiles.py",
        "rise = tops[v].get() > f.load(vec, mp, v * vec.bytes) + LAZY_RISE",
        "rise = tops[v].get() > f.load(vec, mp, v * vec.bytes) + 200.0",
        FORWARD,
    ),
    Mutant(
        "backends/cpu/forward_tiles.py",
        "total.set(f.fma(total.get(), alpha, exp(f, sinks - base)))",
        "total.set(f.fma(total.get(), alpha, exp(f, sinks)))",
        FORWARD,
    ),
    Mutant(
        "backends/cpu/forward_tiles.py",
        "top.get() + log(f, f.select(dead, 1.0, total.get()))",
        "top.get() - log(f, f.select(dead, 1.0, total.get()))",
        FORWARD,
    ),
    Mutant(
        "backends/cpu/forward_tiles.py",
        "stop.set(f.select(seen, n + 1, stop.get()))",
        "stop.set(f.select(seen, n, stop.get()))",
        FORWARD,
    ),
    Mutant("backends/cpu/forward_tiles.py", "return f.select(x.eq(-math.inf), 0.0, x)", "return x", FORWARD),
    Mutant(
        "backends/cpu/forward.py", "careful = partial.get() & bad.ne(0)", "careful = partial.get() & bad.eq(2)", FORWARD
    ),
    Mutant(
        "backends/cpu/forward_tasks.py",
        "np.where(join, np.maximum(hi0, hi1), hi0)",
        "hi0",
        FORWARD + " tests/test_cpu_forward.py",
    ),
    Mutant("backends/cpu/forward_tasks.py", "hi = np.maximum(hi, lo)", "hi = np.maximum(hi - 1, lo)", FORWARD),
    Mutant(
        "backends/cpu/rows.py",
        "f.masked_load(elem.vec(lanes), src.at(whole * elem.bytes), tail)",
        "f.load(elem.vec(lanes), src.at(whole * elem.bytes))",
        FORWARD,
    ),
    Mutant("backends/cpu/rows.py", "row.set(j % page_size)", "row.set(j % page_size + 1)", CACHED),
    Mutant(
        "backends/cpu/host.py",
        "strides = [0 if n == 1 else s * size",
        "strides = [s * size if n == 1 else s * size",
        FORWARD,
    ),
    # ---- few queries
    Mutant(
        "backends/cpu/decode_tiles.py",
        "f.store(f.load(t, lp) * alpha, lp)",
        "f.store(f.load(t, lp), lp)",
        CACHED + " " + FORWARD,
    ),
    Mutant("backends/cpu/rows.py", "page * more[4] + row * more[3]", "row * more[3]", CACHED),
    Mutant("backends/cpu/rows.py", "b * per_b + kv_head * per_h", "b * per_b", CACHED),
    Mutant("backends/cpu/math.py", "denormal = magnitude < 8\n", "denormal = magnitude < 7\n", QUANTISED),
    Mutant("backends/cpu/math.py", "f.select(magnitude.eq(0x7F),", "f.select(magnitude.eq(0x80),", QUANTISED),
    Mutant("kv/quantise.py", ".round().clamp(-128.0, 127.0)", ".round()", QUANTISED),
    Mutant("kv/quantise.py", "x.abs().amax(-1, keepdim=True)", "x.amax(-1, keepdim=True)", QUANTISED),
    Mutant("kv/quantise.py", "torch.where(scale == 0, 1.0, scale)", "scale", QUANTISED),
    Mutant("backends/cpu/rows.py", "row.set(first + (j - first) % ring)", "row.set(first + j % ring)", RING),
    Mutant("masks/window.py", "x.first <= first]", "x.first <= first + 1]", RING),
    Mutant("masks/window.py", "slots - first - x.left for", "slots - first - x.left + 1 for", RING),
    Mutant("kv/ring.py", "position >= after - around", "position > after - around", RING),
    Mutant("backends/cpu/forward_host.py", "if lone and not p.batch_invariant else", "if lone else", SPLITS),
    Mutant("backends/cpu/forward_host.py", "<= FILL[kind] * block_q", "< 0 * block_q", SPLITS),
    Mutant(
        "backends/cpu/decode_tasks.py", "[INVARIANT_CHUNK] * len(blocks)", "[64 * len(blocks)] * len(blocks)", SPLITS
    ),
    Mutant("kv/append.py", "t < counts[entry]", "t <= counts[entry]", UNREAD),
    Mutant("kv/append.py", "owned = owned & room & (position >= 0)", "owned = owned & (position >= 0)", UNREAD),
    Mutant("kv/quantise.py", "x if some is None else torch.where(some, x, to[where])", "x", UNREAD),
    Mutant("cached.py", "i + lengths.long()[b] - stop[b]", "i + lengths.long()[b] - stop[b] - 1", FUSED),
    Mutant(
        "cached.py", "operands.seqlens_kv = cache.lengths + new.counts", "operands.seqlens_kv = cache.lengths", FUSED
    ),
    Mutant("backends/cpu/decode.py", 'done.eq(get["parts"] - 1)', "done.eq(0)", CACHED),
    Mutant("backends/cpu/decode.py", "total.set(f.extract(weight(sink), 0))", "total.set(1.0)", CACHED + " " + FORWARD),
    Mutant("backends/cpu/decode_tasks.py", "range(lo, hi, size)", "range(lo, hi - 1, size)", CACHED + " " + FORWARD),
    # ---- the backward kernel
    Mutant(
        "backends/cpu/backward_products.py",
        "return f.select(p.ne(0.0), p * (dp - delta), 0.0)",
        "return p * (dp + delta)",
        BACKWARD,
    ),
    Mutant(
        "backends/cpu/backward_products.py",
        "return exp(f, f.select(x > 0.0, 0.0, x), accurate=False)",
        "return exp(f, x * 0.5, accurate=False)",
        BACKWARD,
    ),
    Mutant(
        "backends/cpu/backward_products.py",
        "f.store(f.minimum(stop_row[v].get(), nr)",
        "f.store(f.minimum(stop_row[v].get() - 1, nr)",
        BACKWARD,
    ),
    Mutant(
        "backends/cpu/backward_tile.py",
        "f.load(vec, x, o) * f.splat(factor, block.lanes)",
        "f.load(vec, x, o)",
        BACKWARD,
    ),
    Mutant("backends/cpu/backward_half_products.py", '"k") >> 1, JOB', '"k") >> 2, JOB', HALF),
    Mutant("backends/cpu/backward_half_products.py", "k_pitch, BLOCK, 2)", "k_pitch, BLOCK - 2, 2)", HALF),
    Mutant("backends/cpu/backward_half_tiles.py", "low | (high << 16)", "low | (low << 16)", HALF),
    Mutant(
        "backends/cpu/backward_half_tiles.py",
        "f.fma(s, scale, -lse)) * LOG2_E",
        "f.fma(s, scale, -lse))",
        HALF,
    ),
    # ---- merging, caches, expressions
    Mutant("merging.py", "peak + torch.log(safe)", "torch.log(safe)", "tests/test_merge.py"),
    Mutant(
        "merging.py",
        "term = share * torch.where(share == 0, 0.0, out.to(work))",
        "term = share * out.to(work)",
        "tests/test_merge.py",
    ),
)
