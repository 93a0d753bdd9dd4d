"""`kilat explain`: which backend would compute an attention of some shape, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kilat.cli.output import JsonFlag, print_json, show, table

if TYPE_CHECKING:
    from torch import Tensor

MASKS = "full, causal, window:LEFT,RIGHT (empty: no bound) or chunked:SIZE"


def _bound(text: str, option: str) -> int | None:
    """Read a window bound: empty for none, else a whole number."""
    if not text.strip():
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{option} must be a whole number or empty; got {text!r}") from error


def parse_mask(text: str) -> Any:
    """Turn an option's text into a mask; raises ValueError with the forms that are known."""
    import kilat

    kind, _, values = text.partition(":")
    if kind == "full" and not values:
        return None
    if kind == "causal" and not values:
        return kilat.Causal()
    if kind == "window" and values.count(",") == 1:
        left, right = (_bound(part, "mask window") for part in values.split(","))
        return kilat.Window(left, right)
    if kind == "chunked" and values.isdigit():
        return kilat.Chunked(int(values))
    raise ValueError(f"mask must be {MASKS}; got {text!r}")


def _inputs(shape: str, heads_kv: int | None, seqlen_kv: int | None, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Make tensors of `B,H,N,D` that are never written, so that their memory is never touched."""
    import torch

    from kilat.bench.cells import DTYPES, parse_shape

    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype}")
    cell = parse_shape(shape, [dtype], ["forward"])[0]
    kv = (cell.batch, seqlen_kv or cell.seqlen_kv, heads_kv or cell.num_heads_kv, cell.head_dim)
    q = torch.empty(cell.batch, cell.seqlen_q, cell.num_heads_q, cell.head_dim, dtype=getattr(torch, dtype))
    return q, q.new_empty(kv), q.new_empty(kv)


def explain(
    *,
    shape: Annotated[str, typer.Option("--shape", help="B,H,N,D: batch, heads, seqlen, head_dim.")] = "1,8,1024,64",
    heads_kv: Annotated[int | None, typer.Option("--heads-kv", min=1, help="Key/value heads; default: H.")] = None,
    seqlen_kv: Annotated[int | None, typer.Option("--seqlen-kv", min=1, help="Keys; default: N.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.")] = "float32",
    mask: Annotated[str, typer.Option("--mask", help=MASKS)] = "causal",
    softcap: Annotated[float | None, typer.Option("--softcap", help="Cap of the scores; default: none.")] = None,
    grad: Annotated[bool, typer.Option("--grad", help="With gradients.")] = False,
    backend: Annotated[str, typer.Option("--backend", help="auto, or the backend asked for by name.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Say which backend would compute an attention of this shape, and why each other one would not.

    Exits with 1 if none can.
    """
    import kilat

    q, k, v = _inputs(shape, heads_kv, seqlen_kv, dtype)
    for x in (q, k, v):
        x.requires_grad_(grad)
    scores = () if softcap is None else (kilat.Softcap(softcap),)
    report = kilat.explain(q, k, v, mask=parse_mask(mask), scores=scores, backend=backend)
    if as_json:
        reasons = {name: list(found) for name, found in report.reasons.items()}
        problem = report.problem.short_id()
        print_json({"problem": problem, "asked": report.asked, "chosen": report.chosen, "reasons": reasons})
    else:
        made = table(report.problem.short_id(), "backend", "verdict", left=2)
        for name, found in report.reasons.items():
            verdict = "chosen" if name == report.chosen else "; ".join(found) or "able, not chosen"
            made.add_row(name, verdict)
        show(made)
    if report.chosen is None:
        raise typer.Exit(1)
