"""The cells of the GPU suite, who is measured on which, and how they are dealt to commands of limited length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kilat.bench.cells import Cell, Direction

# Query heads share 2048 columns; sequences share 16k tokens (one sequence where it is longer).
HIDDEN, TOKENS = 2048, 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# 16 sequences from 512 to 4096, 32k tokens in all, in no order.
RAGGED = (
    *(2048, 512, 3584, 1024, 4096, 1536, 2304, 768),
    *(2816, 640, 3968, 1280, 2560, 1792, 3072, 768),
)
# fp16 has a fifth of the grid: what the kernels do differently there is only a conversion.
HALF_LENGTHS = (2048, 16384)
SELDOM_LENGTHS = (2048, 8192)
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
FULL_AND_CAUSAL = (False, True)

CONTENDERS = ("kilat", "kilat-deterministic", "cudnn", "flash", "flex", "fa4")

# What a shard takes, in seconds, roughly: inputs and the check of a cell; a contender's clock, warm-up, host time and
# memory; so many of its calls at a low rate; a sustained run; compiling, once a family and direction, flex every cell.
# The first run on an H200 had cells of 15.2, 14.6 and 16.7 s (backward at 16k, three contenders): three sustained runs
# took 7 of them, flash-attn-4's compiler, which then ran in the cell, 5 to 10; its import added 14 to the first cell.
CELL_SECONDS, CONTENDER_SECONDS, SUSTAINED_SECONDS = 0.6, 0.3, 1.3
CALLS, LONG_CALLS, CALL_RATE = 12, 8, 400e12
COMPILE_SECONDS = {"kilat": 5.0, "kilat-deterministic": 5.0, "fa4": 8.0, "flex": 10.0}
# Contenders whose kernels are kept on disk, with the seconds that it takes to find them there; and that of a warm-up
# beside the compiling, which is shared by its processes: they start, and import torch, Triton and flash-attn-4.
WARMED = {"kilat": 0.3, "kilat-deterministic": 0.3, "fa4": 0.4, "flex": 2.0}
WARM_UP_SECONDS = 30.0
# Cells that kilat and its best peer also run for seconds, at the clock that the power limit leaves.
SUSTAINED = frozenset(
    f"{direction} bfloat16 {mask} N=16384 D={dim} B=1 H={HIDDEN // dim}"
    for direction in DIRECTIONS
    for mask in ("full", "causal")
    for dim in (64, 128)
)


def _both(batch: int, heads: int, heads_kv: int, seqlen: int, dims: tuple[int, int]) -> list[Cell]:
    """Forward and backward, full and causal, of self-attention in bfloat16."""
    head_dim, head_dim_v = dims
    sizes = (batch, heads, heads_kv, seqlen, seqlen, head_dim, "bfloat16")
    return [
        Cell(direction, *sizes, causal, None if head_dim_v == head_dim else head_dim_v, device="cuda")
        for direction in DIRECTIONS
        for causal in FULL_AND_CAUSAL
    ]


def _plain() -> list[Cell]:
    cells: list[Cell] = []
    for dims in ((64, 64), (128, 128), (256, 256), (192, 128)):
        heads = HIDDEN // dims[1]
        for seqlen in LENGTHS:
            cells += _both(max(1, TOKENS // seqlen), heads, heads, seqlen, dims)
    return cells


def _grouped() -> list[Cell]:
    lengths = [seqlen for seqlen in LENGTHS if seqlen >= 2048]
    return [
        cell
        for heads in (64, 32)
        for seqlen in lengths
        for cell in _both(max(1, TOKENS // seqlen), heads, 8, seqlen, (128, 128))
    ]


def _special() -> list[Cell]:
    """Windows, a ragged batch, heads of 72 and 96, many latent heads, and short sequences on a half empty GPU."""
    cells = [
        Cell(direction, *sizes, "bfloat16", True, window=window, device="cuda")
        for sizes, window in (((2, 64, 8, 8192, 8192, 64), 127), ((1, 32, 8, 32768, 32768, 128), 4095))
        for direction in DIRECTIONS
    ]
    longest = max(RAGGED)
    cells += [replace(cell, lengths=RAGGED) for cell in _both(len(RAGGED), 16, 16, longest, (128, 128))]
    cells += _both(16, 16, 16, 1024, (72, 72)) + _both(4, 16, 16, 4096, (96, 96))
    cells += _both(1, 128, 128, 4096, (192, 128))
    for batch in (1, 4, 8):
        cells += _both(batch, 16, 16, 512, (128, 128))
    return cells


def grid_cells() -> list[Cell]:
    """Every cell of the suite: bfloat16 first, then a fifth of it in float16."""
    wide = _plain() + _grouped() + _special()
    half = [cell for cell in _plain() + _grouped()[: len(_grouped()) // 2] if cell.seqlen_kv in HALF_LENGTHS]
    half += [cell for cell in _special() if cell.lengths]
    return wide + [replace(cell, dtype="float16") for cell in half] + long_cells()


def quick_cells() -> list[Cell]:
    """What a change to a kernel is judged by first: a short and a long length of the two common head sizes."""
    return [cell for cell in _plain() if cell.seqlen_kv in (2048, 16384) and cell.dims in ("64", "128")]


def long_cells() -> list[Cell]:
    """A million tokens: that it runs at all, and in which memory."""
    return [Cell("forward", 1, 8, 8, 1 << 20, 1 << 20, 128, "bfloat16", True, device="cuda")]


def why_left_out(cell: Cell, name: str) -> str:
    """Why a contender is left out of a cell, or "" where it is measured.

    torch's flash backend and FlexAttention are never the fastest on this GPU, and the latter compiles for seconds.
    """
    special = bool(cell.lengths) or cell.window is not None
    if cell.seqlen_kv > max(LENGTHS) and name != "kilat":
        return "left out: at this length it is asked whether kilat runs, and in which memory"
    if name == "flash" and cell.seqlen_kv not in SELDOM_LENGTHS and not special:
        return "left out: measured at 2k and 8k only"
    if name == "flex":
        if cell.dtype != "bfloat16":
            return "left out: measured in bfloat16 only"
        if cell.seqlen_kv not in SELDOM_LENGTHS and not special:
            return "left out: measured at 2k and 8k only"
    if name == "kilat-deterministic":
        if cell.direction != "backward":
            return "left out: a forward is always deterministic"
        if cell.seqlen_kv not in SELDOM_LENGTHS:
            return "left out: measured at 2k and 8k only"
    return ""


def family(cell: Cell) -> tuple[object, ...]:
    """What cells have in common that share compiled kernels, in kilat and in its peers."""
    return (cell.dtype, cell.dims, cell.num_heads_q // cell.num_heads_kv, cell.mask, bool(cell.lengths))


def parse_shard(text: str) -> tuple[int, int]:
    """Turn `i/n` into (i, n); raises ValueError unless 1 <= i <= n."""
    left, slash, right = text.partition("/")
    if not (slash and left.isdecimal() and right.isdecimal() and 1 <= int(left) <= int(right)):
        raise ValueError(f"shard must be i/n with 1 <= i <= n; got {text}")
    return int(left), int(right)


def tier(cell: Cell) -> int:
    """How early a cell is measured: what most people run first, so that a part of a shard is worth having."""
    plain = cell.num_heads_q == cell.num_heads_kv and cell.window is None and not cell.lengths
    if cell.seqlen_kv > max(LENGTHS):
        return 5
    if cell.dtype != "bfloat16":
        return 4
    if plain and cell.seqlen_kv in HALF_LENGTHS:
        return 0 if cell.dims in ("64", "128") else 1
    if plain:
        return 1 if cell.dims in ("64", "128") else 3
    return 2


def seconds_of(cell: Cell, name: str) -> float:
    """What a contender takes in a cell, compiling aside."""
    if why_left_out(cell, name):
        return 0.0
    calls = LONG_CALLS if cell.seqlen_kv > max(LENGTHS) else CALLS
    return CONTENDER_SECONDS + calls * cell.flops / CALL_RATE


def estimate(cells: Sequence[Cell], names: Sequence[str] = CONTENDERS, jobs: int = 1, sustained: bool = True) -> float:
    """Seconds that a command needs for these cells and contenders, if so many processes compile before."""
    total, compiled = WARM_UP_SECONDS * (jobs > 1), set[tuple[object, ...]]()
    for cell in cells:
        total += CELL_SECONDS + sum(seconds_of(cell, name) for name in names)
        total += SUSTAINED_SECONDS * min(2, len(names)) * (sustained and cell.name in SUSTAINED)
        for name in names:
            kernels = (name, cell.direction, family(cell), cell.name if name == "flex" else "")
            if name in COMPILE_SECONDS and not why_left_out(cell, name) and kernels not in compiled:
                compiled.add(kernels)
                warm = jobs > 1 and name in WARMED
                total += WARMED[name] + COMPILE_SECONDS[name] / jobs if warm else COMPILE_SECONDS[name]
    return total


def deal(cells: Sequence[Cell], index: int, count: int, names: Sequence[str] = CONTENDERS) -> list[Cell]:
    """Return shard `index` of `count` (from 1), what matters most first.

    Whole families, the most costly first, each to the shard that has least to do. Within a tier short sequences come
    first, and a shape's backward after its forward, so that a part of a shard covers much.
    """
    families: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        families.setdefault(family(cell), []).append(cell)
    load = [0.0] * count
    dealt: list[list[Cell]] = [[] for _ in range(count)]
    costs = {key: estimate(members, names) for key, members in families.items()}
    for key in sorted(families, key=lambda key: -costs[key]):
        least = load.index(min(load))
        load[least] += costs[key]
        dealt[least] += families[key]

    def early(cell: Cell) -> tuple[object, ...]:
        return tier(cell), cell.seqlen_kv, str(replace(cell, direction="forward")), cell.direction == "backward"

    return sorted(dealt[index - 1], key=early)
