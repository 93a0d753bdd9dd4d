"""Which CTA works on which tiles of a dense problem: list scheduling on the host, once a Problem.

Tiles are dealt in an order to the CTA that is free first: a few heads at a time, so that their keys and values are
read from memory once, the longest tiles first; at the end more heads at a time, so that the last tiles are short. An
order that a CTA can compute cannot do both: a few heads at a time did not even out over the CTAs (20 to 36 % at 16k),
and all heads at a time read the keys again for every row of tiles (head_dim 128, 2k, causal: 446 TFLOP/s, now 590).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kilat.masks.affine import Affine

OF_A_TILE = 1.5
"""What a tile costs beside its blocks of keys, in blocks: its first products and its way out."""
MAX_BYTES = 64 << 20
"""Of all tables on all devices. They are kept for good, since a CUDA graph may hold the address of any of them."""
PROCESSORS = 132
"""Of an H100 or H200; for the backward, whose programs the hardware deals."""
OF_A_PROGRAM = 4
"""What a program of the backward costs beside its turns, in turns."""
EVEN_PROGRAMS, EVEN_GROUPS = 1.02, 1.035
OF_TURNS = 0.05
"""What it costs that heads take turns, as a part of their time: what their tiles share is read from memory again."""
MAX_DEALT = 1 << 14
EVEN = 1.015
"""Busiest CTA / mean at which more heads at the end are not tried."""


_tables: dict[Any, Tensor] = {}


def on_device(
    device: torch.device, blocks: NDArray[np.int64], heads: tuple[int, int], batch: int, fit: int, ctas: int
) -> Tensor | None:
    """The table of `schedule` on a device; None where tables take up `MAX_BYTES`: then CTAs work the order out."""
    key = device, blocks.tobytes(), heads, batch, fit, ctas
    table = _tables.get(key)
    if table is None:
        made = torch.from_numpy(schedule(blocks, heads, batch, fit, ctas))
        if made.nbytes + sum(x.nbytes for x in _tables.values()) > MAX_BYTES:
            return None
        table = _tables[key] = made.to(device)
    return table


def key_blocks(bounds: Affine, block_q: int, block_kv: int, seqlen_q: int, seqlen_kv: int) -> NDArray[np.int64]:
    """Blocks of keys of each tile of a sequence, as the kernel counts them: [tiles]."""
    first = np.arange(0, seqlen_q, block_q)
    last, shift = np.minimum(first + block_q, seqlen_q) - 1, seqlen_kv - seqlen_q
    stop = np.minimum(last + shift + bounds.right, last + bounds.right_top_left) + 1
    high = np.clip(stop, 0, seqlen_kv)
    low = np.clip(first + shift - bounds.left, 0, high)
    return np.maximum(-(-(high - low) // block_kv), 1)


def query_blocks(bounds: Affine, block_q: int, block_kv: int, seqlen_q: int, seqlen_kv: int) -> NDArray[np.int64]:
    """Blocks of queries that see some key of each tile of keys: [tiles]."""
    first, shift = np.arange(0, seqlen_kv, block_kv), seqlen_kv - seqlen_q
    last = np.minimum(first + block_kv, seqlen_kv) - 1
    low = np.clip(np.maximum(first - shift - bounds.right, first - bounds.right_top_left), 0, seqlen_q)
    high = np.clip(last - shift + bounds.left + 1, low, seqlen_q)
    return np.where(low < high, -(-high // block_q) - low // block_q, 0)


class Order(NamedTuple):
    """In what order a backward kernel takes the heads of all sequences, see `backward_place.take_place`."""

    lead: int
    together: int | None


ONE_AFTER_ANOTHER = Order(0, None)


def order_of_heads(costs: NDArray[np.int64], units: int, group: int = 1) -> Order:
    """The order in which programs are evenly busy and what the tiles of a head share stays in the L2 cache.

    costs [tiles] are the turns of a head's programs, the first tile's first; units are heads of all sequences. Where
    one head after another is not even, the last would begin with its longest tiles when the others are done: 5 to 7 %
    at 512 to 8k, head_dim 128, and 12 % with groups of heads. So tiles of some heads take turns, the longest first.

    Single heads: only the last ones. By turns 66 heads at 512 and 256 at 1k read Q, dO and dQ from memory again for
    every tile (705 us at 1k causal, not 610). Groups of heads: a few at a time, all along. A group's Q, dO and dQ do
    not fit anyway; tiles of about the same length begin and end together, and go down the queries in step (8k causal,
    64/8 heads: 521 TFLOP/s, not 458).
    """
    costs = costs + OF_A_PROGRAM
    if units < 2 or len(costs) < 2 or (costs == costs[0]).all():
        return ONE_AFTER_ANOTHER
    fills = max(1, -(-PROCESSORS // len(costs)))
    if units * len(costs) > MAX_DEALT:
        return Order(units - min(fills, units), fills) if fills > 1 else ONE_AFTER_ANOTHER
    return _groups_by_turns(costs, units, fills) if group > 1 else _last_by_turns(costs, units, fills)


def _last_by_turns(costs: NDArray[np.int64], units: int, fills: int) -> Order:
    found: list[tuple[float, int]] = []
    for last in (n for n in (0, fills, 3 * fills // 2, *(n * fills for n in range(2, 5))) if n <= units):
        uneven = _uneven(np.concatenate([np.tile(costs, units - last), np.repeat(costs, last)]))
        found.append((uneven + OF_TURNS * last / units, last))
        if uneven <= EVEN_PROGRAMS:
            break
    last = min(found)[1]
    return Order(units - last, last) if last else ONE_AFTER_ANOTHER


def _groups_by_turns(costs: NDArray[np.int64], units: int, fills: int) -> Order:
    found: list[tuple[float, int]] = []
    near = (fills + 1, fills - 1, fills, fills + 2, 2 * fills + 1, 2 * fills, 5 * fills // 2, 3 * fills, 4 * fills)
    for together in (n for n in (1, *near) if 1 <= n <= units):
        uneven = _uneven(
            np.concatenate([np.repeat(costs, min(together, units - n)) for n in range(0, units, together)])
        )
        found.append((uneven, together))
        if uneven <= EVEN_GROUPS:
            break
    together = min(found)[1]
    return Order(0, together) if together > 1 else ONE_AFTER_ANOTHER


def _uneven(costs: NDArray[np.int64]) -> float:
    """Busiest processor / mean, as the hardware deals programs."""
    return deal(costs.tolist(), PROCESSORS)[1]


def in_order(costs: NDArray[np.float64], units: int, together: int, at_the_end: int) -> NDArray[np.int64]:
    """[tiles, 2] of (slot, unit): `together` units (heads of a sequence) at a time, then the last `at_the_end` of them.

    Of these the tile that costs most comes first; costs [slots] are those of a unit's tiles.
    """
    first = np.argsort(-costs, kind="stable")
    ends = [*range(together, units - at_the_end + 1, together), units]
    parts = [np.arange(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    return np.concatenate([np.stack(np.meshgrid(first, part, indexing="ij"), -1).reshape(-1, 2) for part in parts])


def deal(costs: list[float], ctas: int) -> tuple[list[list[int]], float]:
    """(indices of each CTA's tiles in turn, busiest CTA / mean) if each takes the next tile when it is free."""
    free = [(0.0, cta) for cta in range(ctas)]
    dealt: list[list[int]] = [[] for _ in range(ctas)]
    for tile, cost in enumerate(costs):
        load, cta = free[0]
        heapq.heapreplace(free, (load + cost, cta))
        dealt[cta].append(tile)
    return dealt, max(free)[0] * ctas / sum(costs)


def schedule(blocks: NDArray[np.int64], heads: tuple[int, int], batch: int, fit: int, ctas: int) -> NDArray[np.int32]:
    """(slot, sequence, head, key/value head) of each CTA's tile in its turn: [turns + 1, ctas, 4]; slot -1: none left.

    blocks [slots] are the blocks of keys of a head's tiles; heads are (query, key/value) heads; keys and values of
    `fit` query heads stay in the L2 cache. More than that at the end, to even out, cost a fifth of the speed.
    """
    units, group = heads[0] * batch, heads[0] // heads[1]
    costs = blocks.astype(np.float64) + OF_A_TILE
    if (blocks == blocks[0]).all():
        tiles = np.stack([np.tile(np.arange(len(blocks)), units), np.repeat(np.arange(units), len(blocks))], -1)
        return _table(tiles, [list(range(cta, len(tiles), ctas)) for cta in range(ctas)], heads)
    together = at_the_end = min(-(-ctas // (len(blocks) * group)) * group, units)
    found: list[tuple[float, NDArray[np.int64], list[list[int]]]] = []
    while not found or (found[-1][0] > EVEN and at_the_end * 2 <= min(fit, units)):
        at_the_end = min(at_the_end * 2, units)
        tiles = in_order(costs, units, together, at_the_end)
        dealt, uneven = deal(costs[tiles[:, 0]].tolist(), ctas)
        found.append((uneven, tiles, dealt))
    _, tiles, dealt = min(found, key=lambda entry: entry[0])
    return _table(tiles, dealt, heads)


def _table(tiles: NDArray[np.int64], dealt: list[list[int]], heads: tuple[int, int]) -> NDArray[np.int32]:
    table = np.full((max(map(len, dealt)) + 1, len(dealt), 4), -1, np.int32)
    for cta, mine in enumerate(dealt):
        slot, unit = tiles[mine].T
        head = unit % heads[0]
        table[: len(mine), cta] = np.stack([slot, unit // heads[0], head, head // (heads[0] // heads[1])], -1)
    return table
