"""The memory suite: peak of one call above its inputs and outputs, each contender in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kilat.bench.cells import Cell
from kilat.bench.contenders import make_inputs
from kilat.bench.memory import in_fresh_process, measure_peak, return_freed_memory
from kilat.bench.verify import expect, verify

CONTENDERS = ("kilat", "sdpa")
# The float64 check of a backward goes through all rows; above 8k it would take longer than what is measured.
LARGEST_CHECKED_PAIRS = 1 << 26


@dataclass(frozen=True)
class Footprint:
    """Bytes above inputs and outputs that a call needed at its peak, or the reason why there is no number."""

    cell: Cell
    contender: str
    extra_bytes: int | None
    output_bytes: int
    method: str
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain values."""
        return {**vars(self), "cell": self.cell.to_json()}


def _tensors(cell: Cell, contender: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and do in the contender's layout, as leaves where the cell is a backward."""
    inputs = make_inputs(cell)
    do = torch.ones_like(inputs.q) if inputs.do is None else inputs.do
    tensors = (inputs.q, inputs.k, inputs.v, do)
    if contender != "kilat":
        tensors = tuple(x.transpose(1, 2).contiguous() for x in tensors)
    q, k, v, do = tensors
    if cell.direction == "backward":
        for x in (q, k, v):
            x.requires_grad_()
    return q, k, v, do


def _attention(cell: Cell, contender: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if contender == "kilat":
        import kilat

        return kilat.attention(q, k, v, mask=kilat.Causal() if cell.causal else None)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)


def _results(cell: Cell, contender: str, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Run forward, and backward where the cell asks for it; return what stays afterwards."""
    q, k, v, do = tensors
    out = _attention(cell, contender, q, k, v)
    if cell.direction != "backward":
        return {"out": out}
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), do), strict=True)) | {"out": out}


def _warm_up(cell: Cell, contender: str) -> None:
    """Run a short cell of the same kind first: compiled kernels and threads are not what is measured."""
    short = Cell(
        cell.direction, 1, cell.num_heads_q, cell.num_heads_kv, 256, 256, cell.head_dim, cell.dtype, cell.causal
    )
    _results(short, contender, _tensors(short, contender))


def _measure(job: tuple[Cell, str]) -> Footprint:
    cell, contender = job
    return_freed_memory()
    _warm_up(cell, contender)
    tensors = _tensors(cell, contender)
    results, peak = measure_peak(lambda: _results(cell, contender, tensors))
    output_bytes = sum(x.numel() * x.element_size() for x in results.values())
    reason = ""
    if cell.seqlen_q * cell.seqlen_kv <= LARGEST_CHECKED_PAIRS:
        mine = results if contender == "kilat" else {name: x.transpose(1, 2) for name, x in results.items()}
        wrong = [v.result for v in verify(mine, expect(cell, make_inputs(cell))) if not v.ok]
        reason = f"wrong: {', '.join(wrong)}" if wrong else ""
    extra = None if reason else max(0, peak.extra - output_bytes)
    return Footprint(cell, contender, extra, output_bytes, peak.method, reason)


def footprint(cell: Cell, contender: str) -> Footprint:
    """Measure one contender on one cell in a fresh process; a refusal or a death is the row's reason."""
    if contender not in CONTENDERS:
        raise ValueError(f"contender must be one of {', '.join(CONTENDERS)}; got {contender}")
    try:
        return in_fresh_process(_measure, (cell, contender), f"{contender}, {cell.name}")
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        return Footprint(cell, contender, None, 0, "", f"{type(error).__name__}: {error}")
