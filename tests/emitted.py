"""Run a few emitted operations over NumPy arrays: what the tests of the CPU emitter share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from kilat.backends.cpu import jit, pool
from kilat.backends.cpu.emit import F32, F64, I8, I16, I32, I64, PTR, Function, Module, Type, Value
from kilat.backends.cpu.isa import Isa, supported_isas

ISAS = supported_isas()
# One set for each register width: what the rest adds (dot products, tiles, half types) few operations can see.
WIDTHS = list({isa.lanes32: isa for isa in reversed(ISAS)}.values())
NUMPY_TYPES = {F32: np.float32, F64: np.float64, I8: np.int8, I16: np.int16, I32: np.int32, I64: np.int64}
Body = Callable[[Function, list[Value]], Sequence[Value]]


def evaluate(
    name: str, isa: Isa, lanes: int, inputs: Sequence[tuple[Type, np.ndarray]], results: Sequence[Type], body: Body
) -> list[np.ndarray]:
    """Map body over arrays of one length, `lanes` elements at a time (0: scalars)."""
    step, count = max(lanes, 1), len(inputs[0][1])
    padded = -(-count // step) * step

    def build() -> str:
        module = Module()
        with module.function("worker", [PTR], exported=True) as f:
            pointers = [f.load(PTR, f.args[0], 8 * i) for i in range(1 + len(inputs) + len(results))]
            with f.range(0, f.load(I64, pointers[0]), step) as i:
                values = [
                    f.load(t.vec(lanes), p.at(i * t.bytes)) for (t, _), p in zip(inputs, pointers[1:], strict=False)
                ]
                outputs = body(f, values)
                for value, t, p in zip(outputs, results, pointers[1 + len(inputs) :], strict=True):
                    f.store(f.coerce(value, t.vec(lanes)), p.at(i * t.bytes))
        return module.text()

    address = compiled(name, isa, build())
    sources = [np.resize(a.astype(NUMPY_TYPES[t], copy=False), padded) for t, a in inputs]
    outputs = [np.zeros(padded, NUMPY_TYPES[t]) for t in results]
    arrays = [np.array([padded]), *sources, *outputs]
    parameters = np.array([a.ctypes.data for a in arrays])
    pool.run(address, parameters.ctypes.data, 1)
    return [a[:count] for a in outputs]


def compiled(name: str, isa: Isa, text: str) -> int:
    """The address of `worker`; unlike a kernel's name, that of a test does not tell its text, so its hash joins it."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return jit.compile_module(lambda: text, f"test {name} {digest}", ["worker"], isa)["worker"]


def run_module(name: str, isa: Isa, write: Callable[[Module, Function], None], *arrays: np.ndarray) -> None:
    """Compile a module whose `worker` is written by `write`, and call it with an array of the arrays' addresses."""

    def build() -> str:
        module = Module()
        with module.function("worker", [PTR], exported=True) as f:
            write(module, f)
        return module.text()

    address = compiled(name, isa, build())
    parameters = np.array([a.ctypes.data for a in arrays])
    pool.run(address, parameters.ctypes.data, 1)
