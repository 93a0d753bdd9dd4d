"""What the GPU suite measures: its cells and shards, the check of windows, ragged and grouped cells, and its peers."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kilat.bench import cells, contenders, gpu_warm, h200, oracle, peers, verify
from kilat.bench.cells import Cell, square
from kilat.bench.contenders import Contender, Inputs

GRID = cells.suite("h200")
WINDOW = Cell("forward", 2, 4, 2, 40, 40, 16, "float32", True, window=5)
RAGGED = Cell("forward", 3, 2, 2, 20, 20, 16, "float32", True, head_dim_v=8, lengths=(20, 1, 7))
UNEVEN = Cell("forward", 1, 6, 2, 9, 30, 24, "float32", False, head_dim_v=16)
FORWARD = (WINDOW, RAGGED, UNEVEN)
ALL = [replace(cell, direction=direction) for cell in FORWARD for direction in ("forward", "backward")]


def test_the_grid_is_what_it_should_be() -> None:
    plain = {
        (c.direction, c.dims, c.causal, c.seqlen_kv)
        for c in GRID
        if c.dtype == "bfloat16" and c.num_heads_q == c.num_heads_kv == 2048 // c.dim_v and not c.lengths
    }
    grid = itertools.product(
        ("forward", "backward"),
        ("64", "128", "256", "192/128"),
        (False, True),
        (512, 1024, 2048, 4096, 8192, 16384, 32768),
    )
    assert set(grid) <= plain
    grouped = {(c.num_heads_q, c.num_heads_kv, c.seqlen_kv) for c in GRID if c.dims == "128" and c.window is None}
    assert set(itertools.product((64, 32), (8,), (2048, 4096, 8192, 16384, 32768))) <= grouped
    assert {(c.window, c.dims, c.seqlen_kv) for c in GRID if c.window} == {(127, "64", 8192), (4095, "128", 32768)}
    assert {c.dims for c in GRID} == {"64", "128", "256", "192/128", "72", "96"}
    ragged = {c.lengths for c in GRID if c.lengths}
    assert [(len(x), sum(x), min(x), max(x)) for x in ragged] == [(16, 32768, 512, 4096)]
    wide, half = (sum(c.dtype == dtype for c in GRID) for dtype in ("bfloat16", "float16"))
    assert 0.17 < half / wide < 0.25
    assert all(c.device == "cuda" for c in GRID)


def test_sustained_cells_exist() -> None:
    assert {c.name for c in GRID} >= h200.SUSTAINED


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_shards_are_a_partition_by_families(count: int) -> None:
    shards = [h200.deal(GRID, n + 1, count) for n in range(count)]
    assert sorted(c.name for shard in shards for c in shard) == sorted(c.name for c in GRID)
    homes = [{h200.family(c) for c in shard} for shard in shards]
    assert all(not a & b for a, b in itertools.combinations(homes, 2))
    costs = [h200.estimate(shard) for shard in shards]
    if count <= 7:
        assert max(costs) < 1.1 * sum(costs) / count
    for shard in shards:
        tiers = [h200.tier(cell) for cell in shard]
        assert tiers == sorted(tiers)


def test_shards_take_nine_minutes_each() -> None:
    """By the estimate, with every peer: five, or two (15 minutes together) where 14 processes compile first."""
    assert max(h200.estimate(h200.deal(GRID, n + 1, 5)) for n in range(5)) < 540
    pair = [h200.estimate(h200.deal(GRID, n + 1, 2), jobs=14) for n in range(2)]
    assert max(pair) < 540
    assert sum(pair) < 900
    quick = ["kilat", "kilat-deterministic", "cudnn", "fa4"]
    assert h200.estimate(cells.suite("h200-quick"), quick, jobs=14, sustained=False) < 100


def test_the_estimate_counts_what_is_done() -> None:
    cell = next(cell for cell in GRID if cell.name in h200.SUSTAINED and cell.direction == "backward")
    alone = h200.estimate([cell], ["cudnn"])
    work = h200.CALLS * cell.flops / h200.CALL_RATE
    assert alone == pytest.approx(h200.CELL_SECONDS + h200.CONTENDER_SECONDS + h200.SUSTAINED_SECONDS + work)
    assert h200.estimate([cell], ["cudnn"], sustained=False) == pytest.approx(alone - h200.SUSTAINED_SECONDS)
    assert h200.estimate([cell], ["cudnn", "flex"]) > alone  # left out at 16k, but two run for seconds
    three, four = (
        h200.estimate([cell], names, sustained=True) for names in (["cudnn", "fa4"], ["cudnn", "fa4", "flex"])
    )
    assert three == four
    assert h200.estimate([cell], ["cudnn", "kilat"]) > alone + h200.COMPILE_SECONDS["kilat"]
    assert h200.estimate([cell] * 2, jobs=14) < h200.estimate([cell] * 2) + h200.WARM_UP_SECONDS
    twice = h200.estimate([cell, replace(cell, batch=2)], ["kilat"])
    assert twice < 2 * h200.estimate([cell], ["kilat"])  # compiled once
    long = GRID[-1]
    assert h200.seconds_of(long, "kilat") < h200.CALLS * long.flops / h200.CALL_RATE
    assert tuple(peers.makers()) == h200.CONTENDERS


def test_what_matters_most_is_measured_first() -> None:
    first, last = h200.deal(GRID, 1, 1)[:16], h200.deal(GRID, 1, 1)[-1]
    assert {(c.dims, c.seqlen_kv) for c in first} == set(itertools.product(("64", "128"), (2048, 16384)))
    assert {c.direction for c in first} == {"forward", "backward"}
    assert last == cells.suite("h200-long")[0]
    quick = h200.deal(cells.suite("h200-quick"), 1, 1)
    assert [c.seqlen_kv for c in quick] == [2048] * 8 + [16384] * 8
    for forward, backward in zip(quick[::2], quick[1::2], strict=True):
        assert (forward.direction, backward.direction) == ("forward", "backward")
        assert replace(backward, direction="forward") == forward
    assert [name for name in h200.CONTENDERS if not h200.why_left_out(last, name)] == ["kilat"]


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "a/3", "1/", "-1/3", "1/3/3"])
def test_shards_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shard must be i/n with 1 <= i <= n; got"):
        h200.parse_shard(text)


@pytest.mark.parametrize("cell", [*ALL, *GRID[:3], GRID[-1]], ids=lambda cell: cell.name)
def test_cells_survive_json(cell: Cell) -> None:
    assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (5, 5), (3, 8), (8, 3)])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_pairs_of_a_window(seqlen_q: int, seqlen_kv: int, window: int) -> None:
    cell = Cell("forward", 1, 1, 1, seqlen_q, seqlen_kv, 8, "float32", True, window=window)
    q_pos = [i + seqlen_kv - seqlen_q for i in range(seqlen_q)]
    assert cell.pairs == sum(p - window <= j <= p for p in q_pos for j in range(seqlen_kv))


def test_pairs_of_a_ragged_batch_and_operations_of_uneven_heads() -> None:
    assert RAGGED.pairs == 20 * 21 // 2 + 1 + 7 * 8 // 2
    assert RAGGED.flops == 2 * 2 * RAGGED.pairs * (16 + 8)


def _dense(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by the formula, in the dtype of q, with the cell's mask."""
    group = cell.num_heads_q // cell.num_heads_kv
    k, v = (x.repeat_interleave(group, -2) for x in (k, v))
    s = torch.einsum("...ihd,...jhd->...hij", q, k) * cell.head_dim**-0.5
    if cell.causal:
        i, j = torch.arange(q.shape[-3])[:, None] + k.shape[-3] - q.shape[-3], torch.arange(k.shape[-3])
        hidden = (j > i) | (i - j > (10**9 if cell.window is None else cell.window))
        s = s.masked_fill(hidden, -torch.inf)
    return torch.einsum("...hij,...jhd->...ihd", torch.softmax(s, -1), v)


def _right(cell: Cell, inputs: Inputs) -> dict[str, Tensor]:
    """Results of a cell in float64, by the formula and autograd."""
    q, k, v = (x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    if cell.lengths:
        parts = zip(*(x.split(list(cell.lengths)) for x in (q, k, v)), strict=True)
        out = torch.cat([_dense(cell, *part) for part in parts])
    else:
        out = _dense(cell, q, k, v)
    if inputs.do is None:
        return {"out": out.detach()}
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), inputs.do.double()), strict=True))


@pytest.fixture(params=["cpu", "gpu"])
def effort(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check as on a CPU, or a few heads at sampled positions as on a GPU."""
    if request.param == "gpu":
        monkeypatch.setattr(verify, "_EFFORT", {"cpu": verify._Effort(30, 5, 4)})


@pytest.mark.usefixtures("effort")
@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.name)
def test_the_check_knows_windows_ragged_and_grouped_cells(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact results are those of the formula, kilat passes, and each kind of mistake is found."""
    monkeypatch.setattr(oracle, "CHUNK", 8)
    inputs = contenders.make_inputs(cell)
    truth = verify.expect(cell, inputs)
    right = _right(cell, inputs)
    for part in truth:
        torch.testing.assert_close(part.take(right[part.result]), part.exact)
    found = contenders.kilat_contender(cell, inputs).results()
    assert all(verdict.ok for verdict in verify.verify(found, truth))
    for name in right:
        wrong = {**found, name: found[name] * 1.01}
        assert [v.result for v in verify.verify(wrong, truth) if not v.ok] == [name]
        holed = found[name].clone()
        holed.view(-1)[-3] = torch.nan
        assert [v.result for v in verify.verify({**found, name: holed}, truth) if not v.ok] == [name]


def test_who_is_left_out_is_said() -> None:
    makers = peers.makers()
    assert list(makers) == ["kilat", "kilat-deterministic", "cudnn", "flash", "flex", "fa4"]
    long = square("forward", 1, 1, 4096, 64, "bfloat16", True)
    reasons = {name: h200.why_left_out(long, name) for name in makers}
    assert [name for name, reason in reasons.items() if reason] == ["kilat-deterministic", "flash", "flex"]
    half = replace(long, dtype="float16", seqlen_kv=8192, direction="backward")
    assert [name for name in makers if h200.why_left_out(half, name)] == ["flex"]


def test_an_absent_peer_says_so() -> None:
    with pytest.raises(peers.AbsentError, match="flash-attn-4 cannot be imported here: "):
        peers.fa4(WINDOW, contenders.make_inputs(WINDOW))


@pytest.mark.parametrize("make", [peers.flash, peers.flex, peers.makers()["cudnn"]])
def test_peers_refuse_what_their_arguments_cannot_say(make: Callable[[Cell, Inputs], Contender]) -> None:
    cell = replace(RAGGED, window=3) if make is peers.flash else RAGGED
    with pytest.raises(peers.AbsentError, match=r"ragged|window"):
        make(cell, contenders.make_inputs(cell))


class FakeFlashAttention:
    """flash-attn-4's two calls, as the formula."""

    @staticmethod
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int] | None = None
    ) -> tuple[Tensor, None]:
        window = None if window_size is None else window_size[0]
        cell = Cell("forward", 1, q.shape[2], k.shape[2], 1, 1, q.shape[3], "float32", causal or window is not None)
        return _dense(replace(cell, window=window), q, k, v), None

    @staticmethod
    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, causal: bool, **ends: Any) -> tuple[Tensor, None]:
        lengths = ends["cu_seqlens_q"].diff().tolist()
        cell = Cell("forward", 1, q.shape[1], k.shape[1], 1, 1, q.shape[2], "float32", causal)
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return torch.cat([_dense(cell, *part) for part in parts]), None


@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.name)
def test_flash_attn_4_is_called_as_it_wants(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_fa4", lambda: FakeFlashAttention)
    inputs = contenders.make_inputs(cell)
    found = peers.fa4(cell, inputs).results()
    assert all(v.ok for v in verify.verify(found, verify.expect(cell, inputs)))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_backend_of_sdpa_is_chosen_around_the_call(direction: cells.Direction) -> None:
    """On CPUs the math backend takes everything; the same code asks for cuDNN on a GPU."""
    cell = Cell(direction, 2, 4, 2, 20, 20, 16, "float32", True)
    inputs = contenders.make_inputs(cell)
    made = peers.sdpa_backend(cell, inputs, peers.SDPBackend.MATH)
    with made.context():
        found = made.results()
    assert all(v.ok for v in verify.verify(found, verify.expect(cell, inputs)))


def test_what_is_compiled_before_the_clock() -> None:
    some = [cell for cell in GRID if cell.dims == "128" and cell.dtype == "bfloat16" and not cell.lengths]
    tasks = gpu_warm.tasks(some, h200.CONTENDERS, "auto")
    assert len(set(tasks)) == len(tasks)
    assert {name for _, name, _ in tasks} == set(h200.WARMED)
    ours = [cell for cell, name, _ in tasks if name == "kilat"]
    assert {(cell.direction, h200.family(cell)) for cell in some} == {(c.direction, h200.family(c)) for c in ours}
    assert len(ours) == len({(cell.direction, h200.family(cell)) for cell in some})
    flex = [cell.name for cell, name, _ in tasks if name == "flex"]
    assert flex
    assert set(flex) == {cell.name for cell in some if not h200.why_left_out(cell, "flex")}


def test_what_takes_longest_to_compile_is_begun_first() -> None:
    costs = [h200.COMPILE_SECONDS[name] for _, name, _ in gpu_warm.tasks(GRID, h200.CONTENDERS, "auto")]
    assert costs == sorted(costs, reverse=True)


def test_flash_attn_4_keeps_its_kernels_where_no_one_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads while it is imported is set by then, also in the processes that compile; it is not there here."""
    enabled, folder = (f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR"))
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path))
    for said, found in (({}, ("1", str(tmp_path / "flash-attn-4"))), ({enabled: "0", folder: "x"}, ("0", "x"))):
        for name in (enabled, folder):
            monkeypatch.setenv(name, "")  # so that the test's end takes away what is set here
            monkeypatch.delenv(name)
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        peers._fa4.cache_clear()
        peers.load_fa4()
        assert (os.environ[enabled], os.environ[folder]) == found
    assert gpu_warm.warm_one((WINDOW, "fa4", "auto")) == ""  # absent: every row says so
    loaded: list[int] = []
    monkeypatch.setattr(gpu_warm, "load_fa4", lambda: loaded.append(1))
    assert gpu_warm.warm([(WINDOW, "fa4", "auto")], 1) == []
    assert loaded == [1]  # here, too, while the others compile
    cell = square("forward", 1, 2, 9, 8, "float32", True)
    assert gpu_warm.warm([(cell, "kilat", "cpu")], 1) == []
    assert loaded == [1]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_contender_is_called_once_to_compile(direction: cells.Direction) -> None:
    cell = square(direction, 1, 2, 9, 8, "float32", True)
    assert gpu_warm.warm_one((cell, "kilat", "cpu")) == ""
    assert "gluon backend works on CUDA tensors" in gpu_warm.warm_one((cell, "kilat", "gluon"))


def _dies(task: object) -> str:
    os._exit(7)


def test_a_process_that_dies_while_it_compiles_costs_time_only() -> None:
    cell = square("forward", 1, 2, 9, 8, "float32", True)
    (reason,) = gpu_warm.aside([(cell, "kilat", "cpu")] * 2, _dies, 1, seconds=5.0)
    assert reason == "2 of 2 were not done after 5 s"
    assert gpu_warm.warm([(cell, "kilat", "cpu"), (cell, "nobody", "cpu")], 2) == [
        f"{cell.name}, nobody: KeyError: 'nobody'"
    ]
