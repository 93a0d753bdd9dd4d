"""The bench harness: its arithmetic, its oracle, and that nothing wrong is ever timed."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from torch import Tensor

from kilat.bench import cells, contenders, footprint, limits, machine, memory, oracle, run, timing, verify
from kilat.bench.cells import Cell, square

SMALL = square("forward", 1, 2, 33, 16, "float32", True)
SMALL_BACKWARD = square("backward", 2, 2, 33, 16, "float32", True)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (1, 9), (5, 5), (3, 8), (8, 3), (9, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_count_what_the_mask_shows(seqlen_q: int, seqlen_kv: int, causal: bool) -> None:
    cell = Cell("forward", 1, 1, 1, seqlen_q, seqlen_kv, 8, "float32", causal)
    seen = sum(
        not causal or j <= i + seqlen_kv - seqlen_q for i, j in itertools.product(range(seqlen_q), range(seqlen_kv))
    )
    assert cell.pairs == seen


def test_backward_counts_two_and_a_half_forwards() -> None:
    assert 2 * SMALL_BACKWARD.flops == 5 * square("forward", 2, 2, 33, 16, "float32", True).flops


@pytest.mark.parametrize("name", cells.SUITES)
def test_suites_have_distinct_cells(name: str) -> None:
    names = [cell.name for cell in cells.suite(name)]
    assert len(set(names)) == len(names) > 0


def test_the_cpu_suite_is_the_whole_grid() -> None:
    found = {(c.direction, c.dtype, c.head_dim, c.causal, c.seqlen_q) for c in cells.suite("cpu")}
    lengths = (512, 1024, 2048, 4096, 8192)
    grid = itertools.product(("forward", "backward"), ("float32", "bfloat16"), (64, 128), (False, True), lengths)
    assert found == set(grid)


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,x", "1,0,3,4", "1,2,3,4,5", ""])
def test_shapes_that_are_no_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"shape must be four positive integers B,H,N,D"):
        cells.parse_shape(text, ["float32"], ["forward"])


def test_contenders_take_turns_in_alternating_order() -> None:
    calls: list[str] = []
    ticks = itertools.count()
    found = timing.interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        reps=4,
        warmup=1,
        clock=lambda: float(next(ticks)),
    )
    assert "".join(calls) == "ab" + "abba" * 2
    assert found["a"] == timing.Timing(median=1.0, minimum=1.0, calls=4)


def test_geometric_mean() -> None:
    assert timing.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(timing.geometric_mean([]))


def _autograd(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> dict[str, Tensor]:
    """Float64 attention of one head by the formula, and its gradients by autograd."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    s = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(s.shape, dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
        s = s.masked_fill(hidden, -torch.inf)
    out = torch.softmax(s, -1) @ v
    grads = torch.autograd.grad(out, (q, k, v), do.double())
    return {"out": out.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (63, 63), (30, 129)])
def test_the_streaming_oracle_is_attention(seqlen_q: int, seqlen_kv: int, causal: bool) -> None:
    torch.manual_seed(0)
    q, do = torch.randn(2, seqlen_q, 8)
    k, v = torch.randn(2, seqlen_kv, 8)
    rows, keys = oracle.sample_rows(seqlen_q, 7), oracle.sample_rows(seqlen_kv, 7)
    right = _autograd(q, k, v, do, causal)
    found = oracle.head_gradients(q, k, v, do, rows, keys, causal=causal)
    out = oracle.forward_rows(q[None, :, None], k[None, :, None], v[None, :, None], rows, causal=causal)
    torch.testing.assert_close(out.exact[0, :, 0], right["out"][rows])
    torch.testing.assert_close(found["dq"].exact, right["dq"][rows])
    torch.testing.assert_close(found["dk"].exact, right["dk"][keys])
    torch.testing.assert_close(found["dv"].exact, right["dv"][keys])
    for result in (out, *found.values()):
        assert (result.magnitude >= result.exact.abs() - 1e-12).all()


def test_the_oracle_gives_rows_that_see_nothing_zero() -> None:
    q, k, v = torch.randn(5, 4), torch.randn(2, 4), torch.randn(2, 4)
    found = oracle.forward_rows(q[None, :, None], k[None, :, None], v[None, :, None], torch.arange(5), causal=True)
    assert (found.exact[0, :3] == 0).all()
    assert found.exact[0, 3:].abs().min() > 0


def test_sampled_rows_include_both_ends() -> None:
    rows = oracle.sample_rows(1000, 16)
    assert rows[0] == 0
    assert rows[-1] == 999
    assert len(rows) == 16
    assert oracle.sample_rows(3, 16).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cell", [SMALL, SMALL_BACKWARD], ids=lambda cell: cell.direction)
def test_torch_passes_the_check(cell: Cell, dtype: str) -> None:
    cell = square(cell.direction, 1, 2, 33, 16, dtype, True)
    inputs = contenders.make_inputs(cell)
    verdicts = verify.verify(contenders.sdpa_contender(cell, inputs).results(), verify.expect(cell, inputs))
    assert [v.result for v in verdicts] == (["out"] if cell.direction == "forward" else ["dq", "dk", "dv"])
    assert all(v.ok and v.error < v.allowed for v in verdicts)


def _shifted(cell: Cell, inputs: contenders.Inputs) -> contenders.Contender:
    """A contender whose mask is off by one: it must be caught."""
    right = contenders.sdpa_contender(cell, inputs)
    return contenders.Contender(right.call, lambda: {n: x.roll(1, 1) for n, x in right.results().items()})


def _refusing(cell: Cell, inputs: contenders.Inputs) -> contenders.Contender:
    raise ValueError("head_dim must be even; got 33")


@pytest.mark.parametrize("cell", [SMALL, SMALL_BACKWARD], ids=lambda cell: cell.direction)
def test_what_is_wrong_is_not_timed(cell: Cell) -> None:
    row = run.measure(cell, reps=1, seconds=0, makers={"kilat": _shifted, "sdpa": contenders.sdpa_contender})
    assert not row.ok
    assert row.ratio is None
    assert list(row.timings) == ["sdpa"]
    assert row.not_timed["kilat"].startswith("wrong: ")


def test_a_refusal_is_kept_with_its_reason() -> None:
    row = run.measure(SMALL, reps=1, seconds=0, makers={"kilat": contenders.sdpa_contender, "sdpa": _refusing})
    assert row.ok
    assert row.not_timed == {"sdpa": "ValueError: head_dim must be even; got 33"}
    assert row.ratio is None


def test_nan_is_never_right() -> None:
    inputs = contenders.make_inputs(SMALL)
    truth = verify.expect(SMALL, inputs)
    (verdict,) = verify.verify({"out": torch.full_like(inputs.q, math.nan)}, truth)
    assert not verdict.ok


def test_kilat_is_checked_and_timed_beside_torch() -> None:
    decode = Cell("decode", 2, 4, 2, 1, 65, 16, "float32", True)
    rows, found = run.run_cells([SMALL, SMALL_BACKWARD, decode], reps=1, seconds=0)
    assert [row.not_timed for row in rows] == [{}, {}, {}]
    assert all(row.ratio is not None and row.limit for row in rows)
    assert set(found) == {"matmul_float32", "read"}
    document = run.report(rows, found, "test")
    text = json.dumps(document, allow_nan=False)
    assert {"command", "date", "versions", "device", "git", "groups", "limits", "rows", "suite"} <= set(document)
    assert json.loads(text)["rows"][0]["cell"]["name"] == SMALL.name


def test_groups_take_the_mean_of_what_was_measured() -> None:
    rows = [run.Row(SMALL), run.Row(SMALL), run.Row(SMALL)]
    for row, ours in zip(rows[:2], (1.0, 0.25), strict=True):
        row.timings = {"kilat": timing.Timing(ours, ours, 1), "sdpa": timing.Timing(1.0, 1.0, 1)}
    group = run.group_rows(rows)[0]
    assert (group.name, group.cells, group.measured) == ("forward float32", 3, 2)
    assert (group.ratio, group.smallest) == (pytest.approx(2.0), 1.0)


def test_the_peak_of_a_call_is_what_it_allocates() -> None:
    memory.return_freed_memory()
    megabytes = 64 << 20

    def call() -> Tensor:
        work = torch.ones(megabytes // 4)
        return work[:10].clone()

    for _ in range(2):
        _, peak = memory.measure_peak(call)
        if peak.method.startswith("VmHWM"):
            assert 0.9 * megabytes < peak.extra < 1.3 * megabytes


def _fail(message: str) -> None:
    raise ValueError(message)


def test_a_fresh_process_hands_its_exception_back() -> None:
    with pytest.raises(ValueError, match="what went wrong"):
        memory.in_fresh_process(_fail, "what went wrong", "a test")


def test_footprint_measures_a_checked_call() -> None:
    found = footprint.footprint(square("backward", 1, 2, 300, 16, "float32", True), "kilat")
    assert found.reason == ""
    assert found.extra_bytes is not None
    assert found.output_bytes == 4 * 2 * 300 * 16 * 4


def test_limits_are_positive() -> None:
    assert limits.matmul_rate("float32", size=64, reps=1) > 0


def test_provenance_names_versions_and_machine() -> None:
    found = machine.provenance()
    assert {"python", "kilat", "torch", "numpy", "llvmlite"} == set(machine.versions())
    assert str(found["command"]).startswith("kilat")
    assert json.dumps(found)


def test_a_recorded_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kilat", "bench", "--json", "/somebody/private/x.json", "--shape", "1,2,3,4"])
    assert machine.provenance()["command"] == "kilat bench --json x.json --shape 1,2,3,4"
