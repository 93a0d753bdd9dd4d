"""`gl.inline_asm_elementwise` on the simulated machine: the PTX that kernels hold, executed a warp at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

WARPS, LANES = 4, 32
Registers = dict[str, Any]

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a,
    "sub": np.subtract,
    "mul": np.multiply,
    "ex2": np.exp2,
    "or": np.logical_or,
    "selp": lambda a, b, p: np.where(p, a, b),
    "vote": lambda p, mask: np.broadcast_to(p.any(), p.shape),
    "setp.gt": np.greater,
    "setp.eq": np.equal,
    "cvt.rn.bf16x2": lambda high, low: np.stack([low, high], -1),  # rounding of bfloat16 is not simulated
    "cvt.rn.f16x2": lambda high, low: np.stack([low, high], -1).astype(np.float16),
}


def _operation(name: str) -> Callable[..., Any]:
    known = [key for key in _OPERATIONS if name == key or name.startswith(key + ".")]
    if not known:
        raise ValueError(f"an instruction must be one of {', '.join(_OPERATIONS)}; got {name}")
    return _OPERATIONS[max(known, key=len)]


def _value(text: str, registers: Registers) -> Any:
    """That of an operand: a register (that must have been written), or a number."""
    if text.startswith("0f"):
        return np.full(LANES, np.array(int(text[2:], 16), np.uint32).view(np.float32))
    if text.startswith("0x") or text.isdigit():
        return np.full(LANES, int(text, 0), np.int64)
    return registers[text]


def execute(asm: str, registers: Registers) -> None:
    """Run the instructions of a warp; registers are arrays of its lanes. All lanes must take a branch, or none."""
    lines = [line.strip() for line in re.sub(r"[{}]", "\n", asm).replace(";", "\n").splitlines()]
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        if not line or line.startswith(".reg") or line.endswith(":"):
            continue
        guard, line = line.split(None, 1) if line.startswith("@") else ("", line)
        active = np.ones(LANES, bool)
        if guard:
            active = registers[guard.lstrip("@!")] ^ guard.startswith("@!")
        name, rest = line.split(None, 1)
        if name == "bra.uni":
            if active.any() != active.all():
                raise ValueError("lanes must agree on bra.uni")
            if active.any():
                at = lines.index(rest + ":")
            continue
        to, *operands = [part.strip() for part in rest.split(",")]
        result = _operation(name)(*(_value(one, registers) for one in operands))
        registers[to] = result if active.all() else np.where(active, result, registers[to])


def _by_lane(x: Any) -> Any:
    """[warp, lane, register] of [64] or [64, N], as wgmma's accumulators lie; a quad shares the rows of [64]."""
    if x.ndim == 1:
        return np.repeat(x.reshape(WARPS, 2, 8).transpose(0, 2, 1), 4, axis=1)
    return x.reshape(WARPS, 2, 8, -1, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(WARPS, LANES, -1)


def _by_row(x: Any, shape: tuple[int, ...]) -> Any:
    """The inverse of `_by_lane`."""
    if len(shape) == 1:
        return x[:, ::4].transpose(0, 2, 1).reshape(shape)
    return x.reshape(WARPS, 8, 4, -1, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(shape)


def elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtypes: Sequence[Any], is_pure: bool, pack: int
) -> list[Any]:
    """`asm` on `pack` elements of each argument at a time, broadcast to one shape; an array for each of `dtypes`."""
    if is_pure:
        raise ValueError("is_pure must be False: lanes may vote; got True")
    arrays = np.broadcast_arrays(*(np.asarray(x) for x in args))
    shape, of_lanes = arrays[0].shape, [_by_lane(x) for x in arrays]
    kinds = constraints.split(",")
    outputs = [kind for kind in kinds if kind.startswith("=")]
    if asm.count(";") > 1 and not all("&" in kind for kind in outputs):
        raise ValueError(f"outputs that are written before the last input is read must be =&; got {constraints}")
    per = [pack * np.dtype(each).itemsize // 4 if "cvt" in asm else pack for each in dtypes]
    if len(outputs) != sum(per) or len(kinds) != sum(per) + pack * len(args):
        raise ValueError(
            f"constraints must be those of {sum(per)} outputs and {pack * len(args)} inputs; got {len(kinds)}"
        )
    made = [np.zeros((WARPS, LANES, of_lanes[0].shape[2]), each) for each in dtypes]
    for warp in range(WARPS):
        for first in range(0, of_lanes[0].shape[2], pack):
            given = [x[warp, :, first + i] for x in of_lanes for i in range(pack)]
            registers: Registers = {f"${len(outputs) + i}": x for i, x in enumerate(given)}
            with np.errstate(all="ignore"):
                execute(asm, registers)
            at = 0
            for tensor, count in zip(made, per, strict=True):
                found = [registers[f"${at + i}"].reshape(LANES, -1) for i in range(count)]
                tensor[warp, :, first : first + pack] = np.concatenate(found, 1)
                at += count
    return [_by_row(x, shape) for x in made]
