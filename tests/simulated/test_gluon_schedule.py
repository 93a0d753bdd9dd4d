"""How evenly the forward's tiles fall to CTAs, that none is lost, and how many heads are worked on at a time."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from simulated import gluon_values
from simulated.gluon_rebind import Rebinder

from kilat.backends.gluon import backward_place, heuristics
from kilat.backends.gluon import schedule as schedules
from kilat.backends.gluon import tiles as kernel_tiles
from kilat.backends.gluon.schedule import OF_A_TILE, ONE_AFTER_ANOTHER, key_blocks, schedule
from kilat.masks import Causal, Window
from kilat.masks.affine import affine
from kilat.masks.core import Mask
from kilat.problem import Problem

PROCESSORS = 132
CAUSAL = Causal()


def problem(dim: int, heads: tuple[int, int], seqlen: int, mask: Mask | None = CAUSAL) -> Problem:
    """A dense problem of 16k tokens."""
    return Problem(
        layout="dense", dtype="bfloat16", out_dtype="bfloat16", device="cuda", head_dim=dim, head_dim_v=dim,
        num_heads_q=heads[0], num_heads_kv=heads[1], batch=16384 // seqlen, seqlen_q=seqlen, seqlen_kv=seqlen,
        mask=mask,
    )  # fmt: skip


def dealt(p: Problem, ctas: int = PROCESSORS) -> tuple[Any, Any]:
    """(the table, blocks of keys of a head's tiles)."""
    config, bounds = heuristics.forward_config(p), affine(p.mask)
    assert bounds is not None
    blocks = key_blocks(bounds, 64 * config.consumers, config.block_kv, p.seqlen_q, p.seqlen_kv)
    heads = (p.num_heads_q, p.num_heads_kv)
    return schedule(blocks, heads, p.batch, heuristics.heads_together(p), ctas), blocks


@pytest.mark.parametrize(("dim", "heads"), [(64, 32), (128, 16), (256, 8)])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 16384])
def test_ctas_are_equally_busy(dim: int, heads: int, seqlen: int) -> None:
    """Within 4 %, causal, 16k tokens."""
    table, blocks = dealt(problem(dim, (heads, heads), seqlen))
    load = np.where(table[..., 0] >= 0, blocks[table[..., 0]] + OF_A_TILE, 0).sum(0)
    assert load.max() <= 1.04 * load.mean()


@pytest.mark.parametrize("mask", [None, Causal(), Causal("top_left"), Window(100, 0), Window(0, 30)], ids=str)
@pytest.mark.parametrize(("heads", "ctas"), [((3, 1), 1), ((8, 2), 7), ((1, 1), 132)])
def test_every_tile_is_dealt_once(mask: Mask | None, heads: tuple[int, int], ctas: int) -> None:
    table, blocks = dealt(problem(64, heads, 4096, mask=mask), ctas)
    found = table[table[..., 0] >= 0]
    assert len(found) == len(blocks) * heads[0] * 4
    assert len(np.unique(found[:, :3], axis=0)) == len(found)
    assert (found.max(0) == [len(blocks) - 1, 3, heads[0] - 1, heads[1] - 1]).all()
    assert (found[:, 3] == found[:, 2] // (heads[0] // heads[1])).all()
    assert (table[-1, :, 0] == -1).all()


@pytest.mark.parametrize("seqlen", [512, 1024, 4096, 16384])
def test_few_heads_at_a_time(seqlen: int) -> None:
    """Tiles that run at about the same time are of heads whose keys and values fit the L2 cache."""
    p = problem(128, (16, 16), seqlen)
    table, blocks = dealt(p)
    cost = np.where(table[..., 0] >= 0, blocks[table[..., 0]] + OF_A_TILE, 0)
    end = cost.cumsum(0)
    for moment in np.linspace(0, end.max(), 50)[:-5]:  # at the very end there are more
        running = table[(end - cost <= moment) & (moment < end)]
        heads = len(np.unique(running[:, 1] * 16 + running[:, 2]))
        assert heads * seqlen * 512 <= 40 << 20, (moment, heads)


@pytest.mark.parametrize("heads", [(16, 16), (32, 8), (64, 8)])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
def test_backward_ctas_are_equally_busy(heads: tuple[int, int], seqlen: int) -> None:
    """Within 3.5 %, causal; one head after another it is up to 7 %, and 14 % with groups of heads."""
    bounds, units, tiles = affine(CAUSAL), heads[1] * (16384 // seqlen), seqlen // 128
    assert bounds is not None
    costs = schedules.query_blocks(bounds, 64, 128, seqlen, seqlen) * (heads[0] // heads[1])
    lead, together = schedules.order_of_heads(costs, units, heads[0] // heads[1])
    assert (together is not None) == (seqlen < 16384)
    order = programs(units, tiles, lead, together)
    assert sorted(order) == [(unit, tile) for unit in range(units) for tile in range(tiles)]
    assert order[: lead * tiles] == sorted(order[: lead * tiles])
    assert heads[0] == heads[1] or lead == 0
    _, uneven = schedules.deal([float(costs[tile] + schedules.OF_A_PROGRAM) for _, tile in order], PROCESSORS)
    assert uneven <= 1.035


def programs(units: int, tiles: int, lead: int, together: int | None) -> list[tuple[int, int]]:
    """(unit, tile) of each program, by the kernels' own function."""
    found: list[tuple[int, int]] = []
    i32 = gluon_values.I32
    for pid in range(units * tiles):
        functions = types.SimpleNamespace(**{**gluon_values.FUNCTIONS, "program_id": lambda axis, pid=pid: i32(pid)})
        section = Rebinder({"gl": functions}, {}).bind(kernel_tiles.unit_and_slot)
        call = Rebinder({"gl": functions, "unit_and_slot": section}, {}).bind(backward_place.take_place)
        _, head, tile = map(int, call(i32(1), i32(units), i32(tiles), i32(lead), together and i32(together)))
        found.append((head, tile))
    return found


def test_backward_heads_follow_one_another_where_tiles_are_equal() -> None:
    assert schedules.order_of_heads(np.full(16, 8), 64) == ONE_AFTER_ANOTHER
    assert schedules.order_of_heads(np.arange(16), 1) == ONE_AFTER_ANOTHER
    fills = -(-PROCESSORS // 16)
    assert schedules.order_of_heads(np.arange(16, 0, -1), 1 << 16) == ((1 << 16) - fills, fills)  # too many to deal


@pytest.mark.parametrize("mask", [None, Causal(), Causal("top_left"), Window(70, 20), Window(5, None)], ids=str)
@pytest.mark.parametrize("sizes", [(300, 300), (300, 130), (130, 300), (1, 1)])
def test_turns_are_those_that_see_a_key(mask: Mask | None, sizes: tuple[int, int]) -> None:
    """By looking at every query of every tile of keys; blocks of queries without any are not counted at the ends."""
    bounds, shift = affine(mask), sizes[1] - sizes[0]
    assert bounds is not None
    q, k = np.arange(sizes[0])[:, None], np.arange(sizes[1])[None]
    seen = (k >= q + shift - bounds.left) & (k <= q + shift + bounds.right) & (k <= q + bounds.right_top_left)
    expected = []
    for first in range(0, sizes[1], 128):
        rows = np.flatnonzero(seen[:, first : first + 128].any(1))
        expected.append(rows[-1] // 64 - rows[0] // 64 + 1 if len(rows) else 0)
    assert schedules.query_blocks(bounds, 64, 128, *sizes).tolist() == expected


def test_tables_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_tables", {})
    blocks, cpu = np.arange(1, 9), torch.device("cpu")

    def table(batch: int) -> torch.Tensor | None:
        return schedules.on_device(cpu, blocks, (4, 2), batch, 8, 5)

    first = table(1)
    assert first is not None
    assert np.array_equal(first.numpy(), schedule(blocks, (4, 2), 1, 8, 5))
    assert table(1) is first
    monkeypatch.setattr(schedules, "MAX_BYTES", first.nbytes + 1)
    assert table(2) is None  # and the kernel works the order out
    assert table(1) is first


@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        ((None, 0), (300, 300)),
        ((None, 1), (300, 300)),
        ((97, 0), (300, 300)),
        ((70, 20), (300, 400)),
        ((5, 0), (400, 100)),
        ((None, None), (64, 999)),
    ],
)
def test_blocks_are_those_of_the_kernel(bounds: tuple[int | None, int | None], sizes: tuple[int, int]) -> None:
    """By counting the keys that any query of a tile sees."""
    window = affine(Window(*bounds))
    assert window is not None
    q, k = np.arange(sizes[0])[:, None] + sizes[1] - sizes[0], np.arange(sizes[1])[None]
    seen = (k >= q - window.left) & (k <= q + window.right)
    expected = [max(1, -(-int(seen[i : i + 64].any(0).sum()) // 32)) for i in range(0, sizes[0], 64)]
    assert key_blocks(window, 64, 32, *sizes).tolist() == expected
