"""Where a GPU suite's seconds go, and what it does less often for that."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fake_device import FakeDevice, Ticking

from kilat.bench import contenders, gpu, gpu_timing
from kilat.bench.cells import Cell, square
from kilat.bench.contenders import Contender, Inputs
from kilat.bench.run import Row
from kilat.bench.spent import Stopwatch
from kilat.bench.timing import Timing

CELL = square("forward", 1, 1, 9, 8, "float32", True)


def test_a_row_says_where_its_seconds_went(tmp_path: Path) -> None:
    """By part, beside those that belong to no cell; what a contender that fails took is counted, too."""

    def slow(cell: Cell, inputs: Inputs) -> Contender:
        del cell, inputs
        time.sleep(0.05)
        raise ValueError("no")

    path = tmp_path / "shard.json"
    shard = gpu.Shard.load(path, "h200", "1/1")
    makers = {"kilat": contenders.sdpa_contender, "slow": slow}
    device: Any = Ticking(FakeDevice())
    assert gpu.run_shard([CELL], shard, makers, device, gpu.Effort(reps=1, sustained=0), rate=lambda _: 1e12)
    document = json.loads(path.read_text(encoding="utf-8"))
    spent = document["rows"][0]["spent"]
    assert set(spent) == {
        *("inputs", "oracle", "first call, kilat", "check, kilat", "first call, slow"),
        *("warm-up", "rounds", "host time", "memory", "sustained"),
    }
    assert spent["first call, slow"] >= 0.05
    assert sum(spent.values()) <= document["cell_seconds"][CELL.name] * 1.01
    assert document["spent"] == pytest.approx(spent | document["seconds_aside"])
    assert set(document["seconds_aside"]) == {"matmul", "saving"}
    waited: list[int] = []
    watch = Stopwatch(lambda: waited.append(1))
    for _ in range(2):
        with watch.part("a"):
            assert len(waited) < 2
    assert len(waited) == 2  # or work would count where the host next waits for it


def test_kilat_and_its_best_peer_run_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(CELL)
    row.timings = {
        name: Timing(s, s, 1)
        for name, s in (("kilat", 2.0), ("kilat-deterministic", 1.0), ("cudnn", 3.0), ("fa4", 2.5))
    }
    assert gpu.held_for_seconds(row) == []
    monkeypatch.setattr(gpu, "SUSTAINED", frozenset({row.cell.name}))
    assert gpu.held_for_seconds(row) == ["kilat", "fa4"]
    device: Any = Ticking(FakeDevice())
    for seconds, held in ((0.0, set[str]()), (0.01, {"kilat", "cudnn"})):
        made = {"kilat": contenders.sdpa_contender, "cudnn": contenders.sdpa_contender}
        found = gpu.measure(row.cell, made, device, gpu.Effort(reps=1, seconds=0.0, sustained=seconds))
        assert set(found.sustained) == held


def test_calls_that_take_long_are_few() -> None:
    device = FakeDevice()
    for cost, calls in ((1e-5, 20), (5e-3, 10), (2e-2, 5), (3.0, 1)):
        device.log.clear()
        gpu_timing.host_seconds(device.call("a", 1.0), device, gpu_timing.Cost(gpu=cost, host=1e-6))
        assert len(device.log) == calls


def test_a_row_is_saved_before_the_next_cell_begins(tmp_path: Path) -> None:
    """Once a cell, with the attempt at the next one: a file of hundreds of rows takes a tenth of a second."""
    path, some = tmp_path / "shard.json", [square("forward", 1, 1, 8 + n, 8, "float32", True) for n in range(3)]
    seen: list[tuple[int, int]] = []

    def look(cell: Cell, inputs: Inputs) -> Contender:
        document = json.loads(path.read_text(encoding="utf-8"))
        seen.append((len(document["rows"]), len(document["attempts"])))
        return contenders.sdpa_contender(cell, inputs)

    device: Any = Ticking(FakeDevice())
    shard = gpu.Shard.load(path, "h200", "1/1")
    effort = gpu.Effort(reps=1, seconds=0.0, sustained=0.0)
    rates = iter([1e12, KeyboardInterrupt])

    def rate(dtype: str) -> float:
        found = next(rates)
        if not isinstance(found, float):
            raise found
        return found

    with pytest.raises(KeyboardInterrupt):
        gpu.run_shard(some, shard, {"kilat": look}, device, effort, rate=rate)
    assert seen == [(0, 1), (1, 2), (2, 3)]
    document = json.loads(path.read_text(encoding="utf-8"))  # the last row, too, although the run ended after it
    assert [row["limit"] for row in document["rows"]] == [1e12] * 3
