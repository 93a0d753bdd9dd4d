"""The GPU suite without a GPU: timing, shards that go on, and merging, on a device whose clock is made up."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, Ticking

from kilat.bench import cells, contenders, gpu, gpu_groups, gpu_timing, h200, machine, peers
from kilat.bench.cells import Cell, square
from kilat.bench.contenders import Contender, Inputs
from kilat.bench.run import Row
from kilat.bench.timing import Timing
from kilat.cli import main

EFFORT = gpu.Effort(reps=1, sustained=0)


def test_contenders_take_turns_behind_a_flush() -> None:
    device = FakeDevice()
    ready = {"a": device.call("a", 2.0), "b": device.call("b", 0.5)}
    costs = {name: gpu_timing.cost_of(one, device) for name, one in ready.items()}
    assert costs["a"].gpu == pytest.approx(2e-3)
    device.log.clear()
    slow = {name: replace(cost, host=100e-6) for name, cost in costs.items()}
    found = gpu_timing.take_turns(ready, device, slow, reps=4, seconds=0)
    assert "".join(device.log) == "abba" * 2
    assert device.flushes == 8 * 3  # three flushes outlast 100 us of Python
    assert found["a"].median == pytest.approx(2e-3)
    assert found["b"].median == pytest.approx(5e-4)
    assert found["a"].calls == 4
    many = gpu_timing.take_turns(ready, device, slow, reps=4, seconds=0.1)
    assert many["a"].calls == 3 * gpu_timing.ROUNDS_AHEAD  # the medians stand still


def test_medians_that_move_want_more_rounds() -> None:
    device = FakeDevice()
    cost = {"a": gpu_timing.Cost(gpu=1e-3, host=1e-6)}
    found = gpu_timing.take_turns({"a": device.call("a", 1.0)}, device, cost, reps=40, seconds=0.1)
    assert found["a"].calls == 40  # at least those asked for
    times = itertools.count(1)

    class Drifting(FakeDevice):
        """Each call is slower than the one before."""

        def flush(self) -> None:
            self.now += 0.06

    drifting = Drifting()

    def work() -> None:
        drifting.now += 1.0 + next(times) / 100

    one = {"a": Contender(work, dict)}
    assert gpu_timing.take_turns(one, drifting, cost, reps=4, seconds=0.1)["a"].calls > 60
    slow = {"a": gpu_timing.Cost(gpu=3.0, host=1e-6)}
    assert gpu_timing.take_turns(one, drifting, slow, reps=7, seconds=0.1)["a"].calls == gpu_timing.FEW_ROUNDS


def test_memory_is_above_inputs_and_outputs() -> None:
    device = FakeDevice()
    assert gpu_timing.extra_bytes(device.call("a", 1.0, extra=5000), device) == 5000


def test_sustained_figures_leave_the_first_quarter_out() -> None:
    device = FakeDevice()
    cost = gpu_timing.Cost(gpu=5e-3, host=1e-6)
    found = gpu_timing.sustain(device.call("a", 5.0), device, cost, seconds=2.0, clock=lambda: device.now * 1e-3)
    assert found.seconds == pytest.approx(5e-3)
    assert 290 < found.calls < 310
    assert gpu_timing.sustain(device.call("a", 9000.0), device, cost, seconds=2.0).calls >= 1


def _document(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _cells(count: int) -> list[Cell]:
    return [square("forward", 1, 1, 8 + n, 8, "float32", True) for n in range(count)]


def _run(path: Path, some: list[Cell], effort: gpu.Effort = EFFORT, **more: Any) -> bool:
    makers = more.pop("makers", {"kilat": contenders.sdpa_contender, "cudnn": contenders.sdpa_contender})
    shard = gpu.Shard.load(path, "h200", "1/1")
    device = more.pop("device", FakeDevice())
    return gpu.run_shard(some, shard, makers, Ticking(device), effort, rate=lambda _: 1e12, **more)


def test_a_shard_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, some = tmp_path / "shard.json", _cells(4)
    ticks = itertools.count()  # three of them a cell
    assert not _run(path, some, gpu.Effort(1, 0.0, 0.0, deadline=6.5), clock=lambda: float(next(ticks)))
    assert len(_document(path)["rows"]) == 2
    seen: list[str] = []
    assert _run(path, some, on_cell=lambda row: seen.append(row.cell.name))
    assert seen == [cell.name for cell in some[2:]]
    document = _document(path)
    assert [row["cell"]["name"] for row in document["rows"]] == [cell.name for cell in some]
    assert all(row["limit"] == 1e12 and row["ratio"] for row in document["rows"])
    assert {"command", "date", "versions", "device", "git", "limits", "groups", "shard"} <= set(document)
    assert list(document["cell_seconds"]) == [cell.name for cell in some]
    assert "triton" in document["versions"]
    assert document["device"]["kind"] == "gpu"
    rows = [Row.from_json(row) for row in document["rows"]]
    assert [gpu._finite(row.to_json()) for row in rows] == document["rows"]


def test_another_revision_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shard.json"
    _run(path, _cells(1))
    monkeypatch.setattr(machine, "revision", lambda: {"commit": "f" * 40, "dirty": False})
    with pytest.raises(ValueError, match=r"must hold git .* to be gone on with"):
        gpu.Shard.load(path, "h200", "1/1")
    with pytest.raises(ValueError, match="must hold suite h200-long to be gone on with; got h200"):
        gpu.Shard.load(path, "h200-long", "1/1")


def test_a_lost_device_costs_one_cell(tmp_path: Path) -> None:
    path, some, device = tmp_path / "shard.json", _cells(2), FakeDevice()

    def crash(cell: Cell, inputs: Inputs) -> Contender:
        device.lost = cell == some[0]
        return contenders.sdpa_contender(cell, inputs)

    with pytest.raises(gpu.LostDeviceError, match="run the same command again to go on"):
        _run(path, some, makers={"kilat": crash}, device=device)
    assert "illegal memory access" in _document(path)["rows"][0]["not_timed"]["kilat"]
    device.lost = False
    assert _run(path, some, makers={"kilat": crash}, device=device)
    assert [list(row["seconds"]) for row in _document(path)["rows"]] == [[], ["kilat"]]


def test_a_cell_that_ends_the_process_is_given_up(tmp_path: Path) -> None:
    path, some = tmp_path / "shard.json", _cells(2)

    def die(cell: Cell, inputs: Inputs) -> Contender:
        if cell == some[0]:
            raise KeyboardInterrupt  # stands for a kill: nothing may catch it
        return contenders.sdpa_contender(cell, inputs)

    for _ in range(gpu.MAX_ATTEMPTS):
        with pytest.raises(KeyboardInterrupt):
            _run(path, some, makers={"kilat": die})
    assert _run(path, some, makers={"kilat": die})
    assert "given up: the process ended 2 times" in _document(path)["rows"][0]["not_timed"]["kilat"]


def _shards(tmp_path: Path, some: list[Cell]) -> list[Path]:
    paths = [tmp_path / f"{n}.json" for n in range(2)]
    for n, path in enumerate(paths):
        _run(path, some[n::2])
    return paths


def test_shards_merge_into_one_document(tmp_path: Path) -> None:
    some = _cells(4)
    paths = _shards(tmp_path, some[:3])
    document = gpu.merge(paths, some, "h200")
    assert [row["cell"]["name"] for row in _list(document["rows"])] == [cell.name for cell in some[:3]]
    assert document["missing"] == [some[3].name]
    assert len(_list(document["runs"])) == 2
    again = gpu.dumps(document)
    assert json.loads(again)["rows"][1]["limit"] == 1e12
    later = _document(paths[0])
    later["rows"][0]["seconds"]["kilat"]["median"] = 123.0
    (tmp_path / "later.json").write_text(json.dumps(later))
    merged = gpu.merge([*paths, tmp_path / "later.json"], some, "h200")
    assert _list(merged["rows"])[0]["seconds"]["kilat"]["median"] == 123.0


def test_groups_say_what_there_is_to_say() -> None:
    some = [square("backward", 1, 1, n, 8, "float32", True) for n in (8, 9)]
    rows = [Row(cell, limit=2.0 * cell.flops) for cell in some]
    for row, ours, peer in zip(rows, (1.0, 2.0), (1.0, 8.0), strict=True):
        row.timings = {name: Timing(s, s, 1) for name, s in (("kilat", ours), ("fa4", peer), ("cudnn", 9.0))}
        row.host_seconds = {"kilat": ours * 1e-6, "fa4": 5e-6, "cudnn": 1.0}
        row.extra_bytes = {"kilat": int(ours) * 256, "fa4": 10**9}
    rows[0].timings["kilat-deterministic"] = Timing(1.5, 1.5, 1)
    rows[1].sustained = {n: gpu_timing.Sustained(s, 1, None, None) for n, s in (("kilat", 2.0), ("fa4", 3.0))}
    whole, dtype, kind = gpu_groups.summaries(rows)
    assert whole == dtype | {"name": "backward all"} == kind | {"name": "backward all"}
    assert (kind["name"], kind["cells"], kind["measured"]) == ("backward float32 D=8 causal", 2, 2)
    assert (whole["ratio"], whole["smallest"], whole["smallest_cell"]) == (2.0, 1.0, some[0].name)
    assert whole["share_of_limit"] == pytest.approx((0.5 * 0.25) ** 0.5)
    assert (whole["deterministic"], whole["deterministic_largest"]) == (1.5, 1.5)
    assert whole["extra_bytes"] == 512
    assert whole["extra_share"] == 512 / (2 * 9 * 16 * 4 * 2)  # q, k, v, out and their gradients
    assert (whole["host_seconds"], whole["host_largest"], whole["host_peer"]) == (1.5e-6, 2e-6, 5e-6)
    assert whole["sustained"] == 1.5
    (nothing, *_) = gpu_groups.summaries([Row(some[0])])
    assert {name for name, value in nothing.items() if value is not None} == {"name", "cells", "measured"}


def _list(value: Any) -> list[Any]:
    return value


@pytest.mark.parametrize("name", ["git", "suite", "device", "versions"])
def test_what_does_not_belong_together_is_not_merged(tmp_path: Path, name: str) -> None:
    some = _cells(2)
    paths = _shards(tmp_path, some)
    other = _document(paths[1])
    other[name] = {"model": "other"} if name == "device" else "other"
    paths[1].write_text(json.dumps(other))
    with pytest.raises(ValueError, match=name):
        gpu.merge(paths, some, "h200")
    with pytest.raises(ValueError, match="at least one file"):
        gpu.merge([], some, "h200")


def test_ours_with_other_options_is_no_peer() -> None:
    row = Row(_cells(1)[0])
    row.timings = {name: Timing(s, s, 1) for name, s in (("kilat", 2.0), ("kilat-deterministic", 1.0), ("fa4", 3.0))}
    assert (row.best_peer, row.ratio) == ("fa4", 1.5)
    del row.timings["fa4"]
    assert (row.best_peer, row.ratio, row.ratio_of_minima) == (None, None, None)


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """A machine that claims to have a GPU, and a suite of small CPU cells for it."""
    some = [*_cells(3), square("backward", 1, 1, 9, 8, "float32", True)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_timing, "Cuda", lambda: Ticking(FakeDevice()))
    monkeypatch.setattr(gpu, "gpu_provenance", lambda: machine.provenance() | {"versions": {}, "device": {}})
    monkeypatch.setattr("kilat.cli.bench_gpu._processes", lambda: 1)
    monkeypatch.setattr(gpu, "matmul_rate", lambda dtype, device: 1e12)
    monkeypatch.setattr(h200, "SUSTAINED", frozenset({some[0].name}))
    monkeypatch.setattr(gpu, "Effort", lambda **options: EFFORT)
    monkeypatch.setitem(cells.SUITES, "h200", lambda: some)
    made = {"kilat": contenders.kilat_contender, "sdpa": contenders.sdpa_contender, "fa4": peers.fa4}
    monkeypatch.setattr(peers, "makers", lambda backend: made)
    return some


def _bench(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--suite", "h200", *words])
    return int(ended.value.code or 0)


def test_the_command_line_measures_and_merges(
    gpu_machine: list[Cell], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two shards, one of them twice, and their merging; the absent peer is named."""
    paths = [str(tmp_path / f"{n}.json") for n in (1, 2)]
    for n, path in enumerate(paths):
        assert _bench("--shard", f"{n + 1}/2", "--json", path, "--reps", "1") == 0
    assert _bench("--shard", "1/2", "--json", paths[0]) == 0
    merged = tmp_path / "merged.json"
    assert _bench("--merge", paths[0], "--merge", paths[1], "--json", str(merged)) == 0
    assert len(_document(merged)["rows"]) == len(gpu_machine)
    assert _bench("--merge", paths[1], "--json", str(merged)) == 1
    out = capsys.readouterr().out
    assert "Geometric means of best peer / kilat" in out
    assert "% of matmul" in out
    assert "4 cells, about" in out
    assert "not timed: fa4, 4 cells: AbsentError: flash-attn-4 cannot be imported here" in out
    assert f"missing: {gpu_machine[0].name}" in out


def test_contenders_that_were_not_asked_for_say_so(gpu_machine: list[Cell], tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    assert _bench("--contender", "fa4", "--json", str(path)) == 0
    rows = _document(path)["rows"]
    assert len(rows) == len(gpu_machine)
    assert all("not asked for" in row["not_timed"]["sdpa"] and list(row["seconds"]) == ["kilat"] for row in rows)


def test_sensors_ask_nvidia_smi_where_nvml_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse() -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "clock_rate", refuse)
    device = object.__new__(gpu_timing.Cuda)
    script = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for printed, found in (("1605, 688.52", (1605.0, 688.52)), ("1605, [N/A]", None), ("", None)):
        script.write_text(f"#!/bin/sh\necho '{printed}'\n")
        script.chmod(0o755)
        assert device.sensors() == found


def test_an_archive_says_which_revision_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "src" / "kilat" / "bench" / "machine.py"
    place.parent.mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(place))
    assert machine.revision() is None
    for text, found in (("node: $Format:%H$\n", None), (f"node: {'a' * 40}\n", {"commit": "a" * 40, "dirty": False})):
        (tmp_path / ".git_archival.txt").write_text(text)
        assert machine.revision() == found
