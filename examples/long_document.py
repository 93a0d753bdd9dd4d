"""Attention over a book as one sequence of 128k bytes, on two cores: time, memory, and a check against float64.

The score matrix of one head would take 64 GB in float32; here it never exists.

    python examples/long_document.py               # forward: about three minutes on two cores
    python examples/long_document.py --backward    # and backward: nine more
    python examples/long_document.py --quick       # 2k bytes
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

import kilat
from kilat.bench.cells import square
from kilat.bench.machine import provenance
from kilat.bench.memory import measure_peak, return_freed_memory
from kilat.bench.oracle import Expected, forward_rows, head_gradients, sample_rows
from kilat.demo.data import first_tokens, load_bytes
from kilat.numerics import max_error

Tensors = tuple[torch.Tensor, ...]


def document_heads(length: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensors:
    """Turn the first bytes of the book into q, k, v `[1, length, heads, head_dim]` by random embeddings.

    Each byte's vectors depend on the two bytes before it too, so that keys differ as the words of a text do.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = first_tokens(load_bytes(), length)
    made = []
    for _ in range(3):
        x = torch.zeros(1, length, heads, head_dim)
        for back in range(3):
            table = torch.randn(256, heads * head_dim, generator=generator) * 3**-0.5
            x[:, back:] += table[tokens[:, : length - back]].unflatten(-1, (heads, head_dim))
        made.append(x.to(dtype))
    return tuple(made)


class Run:
    """The tensors of a run, what was measured of it and what was wrong with it."""

    def __init__(self, options: argparse.Namespace) -> None:
        length, heads = (2047, 2) if options.quick else (options.length, options.heads)
        self.dtype: str = options.dtype
        self.size = (1, heads, length, options.head_dim)
        self.inputs = document_heads(length, heads, options.head_dim, getattr(torch, options.dtype))
        self.do = torch.randn(self.inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(self.inputs[0].dtype)
        self.rows = sample_rows(length, 16)
        self.results: dict[str, object] = {**provenance(), "length": length, "heads": heads, "dtype": options.dtype}
        self.errors: dict[str, dict[str, float]] = {}

    def measure(self, name: Literal["forward", "backward"], call: Callable[[], Tensors]) -> Tensors:
        """Run a call once; print and keep its time, its rate and its memory above inputs and outputs."""
        start = time.perf_counter()
        outputs, peak = measure_peak(call)
        seconds = time.perf_counter() - start
        rate = square(name, *self.size, self.dtype, True).flops / seconds
        output_bytes = sum(x.numel() * x.element_size() for x in outputs)
        extra = max(0, peak.extra - output_bytes)
        print(f"{name}: {seconds:.2f} s, {rate / 1e9:.0f} GFLOP/s", end="", flush=True)
        print(
            f"; memory above inputs and outputs {extra / 1e6:.1f} MB (outputs {output_bytes / 1e6:.1f} MB)", flush=True
        )
        numbers = {"seconds": seconds, "flops_per_second": rate, "extra_bytes": extra, "output_bytes": output_bytes}
        self.results[name] = numbers
        return outputs

    def check(self, name: str, actual: torch.Tensor, right: Expected) -> None:
        """Compare sampled rows with float64, within the error budget."""
        error, allowed = max_error(actual, right.exact), right.allowed(self.dtype)
        self.errors[name] = {"error": error, "allowed": allowed}
        print(f"{name}: error to float64 on sampled rows {error:.1e}, allowed {allowed:.1e}", flush=True)

    def check_gradients(self, grads: Tensors) -> None:
        """Check one head's gradients at the end of the document.

        The last keys are seen by the last queries only, so float64 over those rows, against all keys, is the whole sum.
        """
        last = min(1024, self.size[2])
        q, k, v = (x.detach()[0, :, 0] for x in self.inputs)
        rows = sample_rows(last, 16)
        keys = rows + len(k) - last
        right = head_gradients(q[-last:], k, v, self.do[0, -last:, 0], rows, keys, causal=True)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            self.check(name, grad[0, keys, 0], right[name])


def warm_up(inputs: Tensors, backward: bool) -> None:
    """Run a short piece first: compiling kernels is not what is measured, nor what torch imports at its first gradient.

    (torch imports sympy when a gradient is first handed to it: 0.2 s or more and 36 MB, which count as the call's own.)
    """
    q, k, v = (x[:, :256].detach().requires_grad_(backward) for x in inputs)
    out = kilat.attention(q, k, v, mask=kilat.Causal())
    if backward:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def main() -> int:
    """Run, print, optionally write JSON; return 1 if a sampled row or key is off by more than the error budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,047 bytes, 2 heads")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--json", type=Path, default=None, help="write the result to this file")
    options = parser.parse_args()
    if min(options.length, options.heads, options.head_dim) < 1:
        parser.error(f"sizes must be at least 1; got {options.length}, {options.heads}, {options.head_dim}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json must be a file in an existing folder; got {options.json}")

    return_freed_memory()
    run = Run(options)
    _, heads, length, head_dim = run.size
    print(f"{length:,} bytes of text, {heads} heads of {head_dim}, {run.dtype}, {torch.get_num_threads()} threads")
    warm_up(run.inputs, options.backward)
    q, k, v = (x.requires_grad_(options.backward) for x in run.inputs)
    (out,) = run.measure("forward", lambda: (kilat.attention(q, k, v, mask=kilat.Causal()),))
    plain = [x.detach() for x in (q, k, v)]
    run.check("out", out[:, run.rows], forward_rows(*plain, run.rows, causal=True))
    if options.backward:
        run.check_gradients(run.measure("backward", lambda: torch.autograd.grad(out, (q, k, v), run.do)))
    run.results["errors"] = run.errors
    if options.json is not None:
        options.json.write_text(json.dumps(run.results, indent=2) + "\n")
    return int(not all(found["error"] <= found["allowed"] for found in run.errors.values()))


if __name__ == "__main__":
    sys.exit(main())
