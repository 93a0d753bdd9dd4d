"""One case on one backend of a GPU against the float64 oracle, and what becomes of many of them."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_pool import Row, find_sources

find_sources()


def attempt(case: Any, backends: Sequence[str]) -> list[Row]:
    """A row a backend: verdict ("pass", "refused", "failed"), reason, and error over budget by output.

    Outputs are out, lse and, but for caches, all gradients; the oracle runs on the CPU, once for all backends. Where
    there is no GPU tensors stay on the CPU: the `cpu` backend stands in to try a script out.
    """
    from gpu_calls import on_gpu, reasons
    from helpers import build, expectation

    call = build(case)
    moved, rows = on_gpu(call, device()), []
    expected = None
    for backend in backends:
        row: Row = {"case": case.name, "backend": backend, "dtype": case.dtype, "verdict": "pass", "reason": ""}
        rows.append(row)
        begin = time.perf_counter()
        try:
            if refused := reasons(moved, backend):
                row |= {"verdict": "refused", "reason": "; ".join(refused), "reasons": refused}
                continue
            found = _results(moved, backend, case.cached)
            if expected is None:
                expected = expectation(call, backward=not case.cached)
            row["shares"] = expected.check(found)
        except AssertionError as error:
            row |= {"verdict": "failed", "reason": str(error).strip().splitlines()[0]}
        except Exception as error:  # noqa: BLE001 (whatever it is belongs in the report)
            row |= {"verdict": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
        row["seconds"] = time.perf_counter() - begin
    return rows


def device() -> str:
    """Where calls are made."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _results(call: Any, backend: str, cached: bool) -> dict[str, Any]:
    """What a backend gives, by name, on the CPU, which waits for it."""
    if cached:
        out, lse = call.run(backend)
        grads: dict[str, Any] = {}
    else:
        out, lse, grads = call.gradients(backend)
    return {name: x.detach().cpu() for name, x in ({"out": out, "lse": lse} | grads).items()}


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """By backend: verdicts, by dtype too; refusals by reason without values; the largest error / budget by output."""
    found: dict[str, Any] = {}
    for row in rows:
        counts = {"verdicts": collections.Counter(), "refusals": collections.Counter()}
        one = found.setdefault(row["backend"], {"ran": 0, **counts, "by_dtype": {}, "largest": {}})
        one["ran"] += 1
        one["verdicts"][row["verdict"]] += 1
        one["by_dtype"].setdefault(row["dtype"], collections.Counter())[row["verdict"]] += 1
        if row["verdict"] == "refused":
            for reason in row["reasons"]:
                one["refusals"][kind_of(reason)] += 1
        for name, share in row.get("shares", {}).items():
            name = name.partition(".")[0]  # score.0.1 is a tensor of a score
            if share > one["largest"].get(name, {"share": -1.0})["share"]:
                one["largest"][name] = {"share": float(f"{share:.4g}"), "case": row["case"]}
    return found


def kind_of(reason: str) -> str:
    """A reason without what it got: refusals are counted by these."""
    return reason.partition("; got ")[0]
