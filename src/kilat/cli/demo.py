"""`kilat demo`: train a small transformer on real text, then run it over a long document beside torch."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kilat.cli.output import (
    JsonFlag,
    ThreadsOption,
    errors,
    print_json,
    progress,
    seconds,
    set_threads,
    show,
    size,
    table,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.demo.compare import Difference, LongRun
    from kilat.demo.model import ByteTransformer
    from kilat.demo.train import StepReport

PROMPT = b"Alice "


def _train(document: Tensor, train_seconds: float, seed: int) -> tuple[ByteTransformer, list[StepReport]]:
    """Train on the document under a progress bar that shows the loss."""
    import torch

    from kilat.demo.model import ByteTransformer, ModelConfig, kilat_attention
    from kilat.demo.train import TrainConfig, train

    torch.manual_seed(seed)
    config = TrainConfig(batch=8, context=128, learning_rate=1.5e-3, seconds=train_seconds, seed=seed)
    model = ByteTransformer(ModelConfig())
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("training", total=1.0)

        def on_step(step: StepReport) -> None:
            text = f"training with kilat, step {step.step}, loss {step.loss / math.log(2):.2f} bits a byte"
            bar.update(task, completed=step.progress, description=text)

        bar.update(task, description="compiling kernels")
        train(copy.deepcopy(model), document, kilat_attention, replace(config, seconds=None, steps=1))
        reports = train(model, document, kilat_attention, config, on_step)
    return model, reports


def _smooth_losses(reports: list[StepReport], points: int = 8) -> list[float]:
    """Return the mean loss, in bits a byte, of equal parts of the run."""
    bounds = [len(reports) * i // points for i in range(points + 1)]
    parts = [reports[a:b] for a, b in itertools.pairwise(bounds) if b > a]
    return [sum(step.loss for step in part) / len(part) / math.log(2) for part in parts]


def _long_runs(model: ByteTransformer, document: Tensor, length: int) -> tuple[list[LongRun], str]:
    """Run the document as one sequence with kilat, with SDPA and, as far as memory goes, naively; say how far."""
    from kilat.bench.memory import available_bytes
    from kilat.demo.compare import naive_length, patient_length, run_long
    from kilat.demo.data import first_tokens

    free = available_bytes()
    # Where the system does not say what is free, 4 GB are assumed: less than any machine that trains has.
    fitting = naive_length(4 << 30 if free is None else free, model.config.num_heads, length)
    runs: list[LongRun] = []
    with progress() as bar:
        task = bar.add_task("", total=3)
        for name in ("kilat", "sdpa", "naive"):
            rows = patient_length(fitting, runs[1]) if name == "naive" else length
            bar.update(task, description=f"{name}: {rows:,} bytes as one sequence")
            tokens = first_tokens(document, rows + 1)
            runs.append(run_long(name, model, tokens, first_layer_only=name == "naive"))
            bar.advance(task)
    note = f"naive: the first layer alone, at {runs[2].length:,} bytes"
    if fitting < length:
        note += f"; the scores of {fitting:,} bytes fill half of the free memory, more does not fit"
    if runs[2].length < fitting:
        note += f"; at {fitting:,} bytes it would take more than a minute here"
    return runs, note


def _show_runs(runs: list[LongRun], note: str, differences: list[Difference], tolerance: float) -> None:
    kilat_run = runs[0]
    columns = ("attention", "bytes", "model", "attention call", "memory of a call", "error to float64", "bits a byte")
    made = table(f"The document as one sequence of {kilat_run.length:,} bytes", *columns)
    for run in runs:
        bits = "-" if run.bits_per_byte is None else f"{run.bits_per_byte:.4f}"
        made.add_row(
            run.name,
            f"{run.length:,}",
            seconds(run.model_seconds),
            seconds(run.attention_seconds),
            size(run.extra_bytes),
            f"{run.error:.1e}",
            bits,
        )
    show(made)
    show(
        "memory: peak above inputs and output of the largest attention call, each run in a process of its own "
        f"({kilat_run.memory_method}); error: sampled rows, as a share of the largest |v|, allowed {tolerance:.0e}"
    )
    show(note)
    for found in differences:
        verdict = "ok" if found.ok else "WRONG"
        show(
            f"{found.name} against {found.peer}: largest difference of the {found.of} over {found.rows:,} rows "
            f"{found.largest:.1e}, allowed {found.allowed:.1e}: {verdict}"
        )


def demo(
    file: Annotated[Path | None, typer.Option("--file", help="A text to use instead of the book inside.")] = None,
    length: Annotated[int, typer.Option("--length", min=512, help="Bytes of the long sequence.")] = 32768,
    train_seconds: Annotated[float, typer.Option("--train-seconds", min=0.1, help="Time for training.")] = 25.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights, batches and the generated line.")] = 0,
    threads: ThreadsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a byte-level transformer on real text with kilat, then run it over a long document beside torch.

    Exits with 1 if kilat's answer differs from torch's or from float64 by more than rounding.
    """
    from kilat.bench.machine import provenance
    from kilat.demo.compare import OUTPUT_TOLERANCE, difference
    from kilat.demo.data import load_bytes
    from kilat.demo.model import kilat_attention
    from kilat.demo.train import generate

    set_threads(threads)
    document = load_bytes(file)
    model, reports = _train(document, train_seconds, seed)
    losses = _smooth_losses(reports)
    line = generate(model, PROMPT, kilat_attention, seed=seed)
    step = sorted(report.seconds for report in reports)[len(reports) // 2]
    if not as_json:
        source = file.name if file is not None else "Alice's Adventures in Wonderland"
        show(f"{source}: {document.numel():,} bytes; {len(reports)} training steps, {seconds(step)} each (median)")
        show("loss in bits a byte: " + " ".join(f"{loss:.2f}" for loss in losses))
        show(f"generated: {PROMPT.decode()}{line}")
    runs, note = _long_runs(model, document, length)
    differences = [difference(runs[0], peer) for peer in runs[1:]]
    ok = all(found.ok for found in differences) and runs[0].error <= OUTPUT_TOLERANCE
    if as_json:
        print_json(
            {
                **provenance(),
                "training": {"steps": len(reports), "step_seconds": step, "loss_bits_per_byte": losses},
                "generated": PROMPT.decode() + line,
                "runs": [run.to_json() for run in runs],
                "naive": note,
                "differences": [{**vars(found), "ok": found.ok} for found in differences],
                "ok": ok,
            }
        )
    else:
        _show_runs(runs, note, differences, OUTPUT_TOLERANCE)
        show("the answer is right" if ok else "the answer is WRONG")
    if not ok:
        raise typer.Exit(1)
