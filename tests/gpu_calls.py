"""Calls of tests/cases.py on a GPU, and why a backend there refuses one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from helpers import Call

from kilat.backends import registry
from kilat.dropout import Dropout


def on_gpu(call: Call, device: str = "cuda") -> Call:
    """The same call with every tensor on the GPU; strides stay as they are."""

    def move(x: torch.Tensor) -> torch.Tensor:
        return moved(x, device)

    tensors: dict[str, Any] = {name: move(getattr(call, name)) for name in ("q", "k", "v", "dout", "dlse")}
    tensors["sink"] = None if call.sink is None else move(call.sink)
    tensors["lengths"] = {name: move(x) for name, x in call.lengths.items()}
    tensors["mask"] = None if call.mask is None else call.mask.with_tensors([move(x) for x in call.mask.tensors()])
    tensors["scores"] = tuple(s.with_tensors([move(x) for x in s.tensors()]) for s in call.scores)
    if call.dropout is not None and call.dropout.keep is not None:
        tensors["dropout"] = Dropout(call.dropout.p, keep=move(call.dropout.keep))
    return dataclasses.replace(call, **tensors)


def moved(x: torch.Tensor, device: str = "cuda") -> torch.Tensor:
    """A copy with the same strides, and the same NaN between rows."""
    if x.numel() == 0 or x.is_contiguous():
        return x.to(device)
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    memory = x.as_strided((span,), (1,)).to(device)
    return memory.as_strided(x.shape, x.stride())


def reasons(call: Call, backend: str) -> list[str]:
    """Why the backend refuses the call with all its gradients; empty if it takes it."""
    problem, _ = call.core()
    if not call.case.cached:
        kinds: set[str] = set()
        for name in call.inputs():
            kind, _, index = name.partition(".")
            if kind == "score":
                kind = "bias" if type(problem.scores[int(index[0])]).__name__ == "Bias" else "score_tensors"
            kinds.add(kind)
        problem = dataclasses.replace(problem, needs_grad=True, grad_of=frozenset(kinds), memo={})
    found = registry.get(backend)
    return [found] if isinstance(found, str) else found.unsupported(problem)
