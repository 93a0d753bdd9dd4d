"""The knobs of the Triton kernels, and their values from a tuning table where there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from kilat import config
from kilat.backends.triton.adapt import adapt, pieces
from kilat.backends.triton.heuristics import INTERPRETED, Config, forward_config
from kilat.backends.triton.heuristics_backward import keys_config, queries_config
from kilat.masks.affine import affine
from kilat.masks.core import decompose
from kilat.tune.lookup import configure
from kilat.tune.space import Tunable
from kilat.tune.table import Bucket

if TYPE_CHECKING:
    from torch import Tensor

    from kilat.backends.triton.arguments import Arguments
    from kilat.problem import Operands, Problem

Rule = Callable[["Arguments", int, "tuple[int, int] | None"], Config]

LONGEST = 1 << 20
"""Sequence length of the bucket of calls whose bits may not depend on their companions."""

RULES: dict[str, Rule] = {"forward": forward_config, "keys": keys_config, "queries": queries_config}
"""The built-in rule of each kernel that tables know; keys gives dK and dV, queries dQ."""

ACCUMULATORS = {
    "forward": lambda c, d, dv: c.block_q * (dv + c.block_kv),
    "keys": lambda c, d, dv: c.block_kv * (d + dv + 2 * c.block_q),
    "queries": lambda c, d, dv: c.block_q * (d + 2 * c.block_kv),
}
"""float32 numbers that a program keeps in registers."""

STREAMED = {
    "forward": lambda c, d, dv: (c.block_kv * (d + dv), c.block_q * d),
    "keys": lambda c, d, dv: (c.block_q * (d + dv), c.block_kv * (d + dv + c.block_q)),
    "queries": lambda c, d, dv: (c.block_kv * (d + dv), c.block_q * (d + dv + c.block_kv)),
}
"""Numbers in shared memory: those of every stage, and those that stay."""

MOST_REGISTERS = 220
"""Of a thread, for accumulators; it has 255."""

MOST_SHARED = {9: 227 << 10, 10: 227 << 10, 8: 99 << 10}
"""Bytes of shared memory of a program by major capability, the least of its minors."""


def chosen(kernel: str, problem: Problem, args: Arguments, q: Tensor, capability: tuple[int, int] | None) -> Config:
    """A kernel's configuration; worked out once a Problem. capability is None on AMD."""
    if config.triton_interprets():
        return INTERPRETED
    key = f"triton {kernel} {q.get_device()} {capability}"
    found: Config | None = problem.memo.get(key)
    if found is None:
        built_in = RULES[kernel](args, q.element_size(), capability)
        found = problem.memo[key] = configure("triton", architecture(q.device), bucket(kernel, problem), built_in)
    return found


def bucket(kernel: str, problem: Problem) -> Bucket | None:
    """What a Problem is looked up by; None for what needs more registers or shared memory than tables were made for."""
    p, parts = problem, decompose(problem.mask)
    plain = not p.dropout and all(type(s).__name__ in ("Softcap", "Alibi") for s in p.scores)
    if p.layout == "cached" or not plain or parts.dense or parts.predicates:
        return None
    found = affine(parts.interval)
    left, right, top_left = (True, True, False) if found is None else found.kind
    mask = "window" if left else "causal" if right or top_left else "full"
    keys = p.seqlen_kv // max(p.batch, 1) if p.layout == "ragged" else p.seqlen_kv
    dims = (sum(pieces(p.head_dim)), sum(pieces(p.head_dim_v)))
    return Bucket(kernel, p.dtype, dims, mask, LONGEST if p.batch_invariant else keys)


@lru_cache(maxsize=16)
def architecture(device: torch.device) -> str | None:
    """`sm_90`, `gfx942`; None where there is no GPU and kernels are only compiled."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(device)
    return found.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{found.major}{found.minor}"


def _built_in(kernel: str, problem: Problem, operands: Operands) -> Config:
    return RULES[kernel](adapt(problem, operands), _itemsize(problem), _capability())


def _choices(problem: Problem) -> Mapping[str, Sequence[int]]:
    """Values of the fields of `Config`."""
    if problem.dtype == "float32":
        return {"block_q": (16, 32, 64), "block_kv": (16, 32, 64), "num_warps": (4, 8), "num_stages": (1, 2)}
    return {"block_q": (64, 128), "block_kv": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}


def _legal(kernel: str, problem: Problem, found: Config) -> bool:
    """Whether accumulators fit the registers and tiles the shared memory, roughly; what spills is slow, not wrong."""
    dims, itemsize = (sum(pieces(problem.head_dim)), sum(pieces(problem.head_dim_v))), _itemsize(problem)
    stage, rest = STREAMED[kernel](found, *dims)
    major = (_capability() or (8, 0))[0]
    shared = itemsize * (found.num_stages * stage + rest)
    registers = ACCUMULATORS[kernel](found, *dims) / (32 * found.num_warps)
    return shared <= MOST_SHARED.get(major, 99 << 10) and registers <= MOST_REGISTERS


def _capability() -> tuple[int, int] | None:
    """That of the current NVIDIA GPU."""
    return None if torch.version.hip or not torch.cuda.is_available() else torch.cuda.get_device_capability()


def _itemsize(problem: Problem) -> int:
    return 4 if problem.dtype == "float32" else 2


def _tunable(kernel: str, direction: Any) -> Tunable:
    return Tunable(
        kernel, direction, partial(bucket, kernel), partial(_built_in, kernel), _choices, partial(_legal, kernel)
    )


TUNABLES = (_tunable("forward", "forward"), _tunable("keys", "backward"), _tunable("queries", "backward"))
"""What `kilat tune` measures."""
