"""The values of the simulated machine: ints of 32 bits, tensors, shared memory, pointers, descriptors."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from simulated.gluon_ptx import elementwise

_MARKS = {2: (np.uint16, 0x7E55), 4: (np.uint32, 0x7FC5_5555)}
"""Bits of a NaN that no computation makes, by bytes of the element: memory that must not be read."""


def poison(data: np.ndarray) -> None:
    """Fill a buffer with the mark."""
    if np.issubdtype(data.dtype, np.floating):
        kind, mark = _MARKS[data.itemsize]
        data[...] = np.array(mark, kind).view(data.dtype)


def is_poisoned(data: np.ndarray) -> bool:
    """Whether any element holds the mark."""
    if not np.issubdtype(data.dtype, np.floating):
        return False
    kind, mark = _MARKS[data.itemsize]
    return bool((np.ascontiguousarray(data).view(kind) == mark).any())


class I32(int):
    """An int32 of a kernel: division truncates, overflow raises."""

    bits = 32

    def __new__(cls, value: Any) -> I32:
        value = int(value)
        if not -(2 ** (cls.bits - 1)) <= value < 2 ** (cls.bits - 1):
            raise OverflowError(f"{value} does not fit {cls.bits} bits")
        return super().__new__(cls, value)

    def to(self, dtype: Any) -> Any:
        """The same number as another type."""
        return I64(self) if dtype is np.int64 else dtype(self)


class I64(I32):
    """An int64 of a kernel."""

    bits = 64


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _operation(function: Callable[[int, int], int], swapped: bool) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return NotImplemented
        kind = I64 if I64 in (type(self), type(other)) else I32
        a, b = (int(other), int(self)) if swapped else (int(self), int(other))
        return kind(function(a, b))

    return apply


for _name, _function in {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": _truncated,
    "mod": lambda a, b: a - _truncated(a, b) * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}.items():
    setattr(I32, f"__{_name}__", _operation(_function, swapped=False))
    setattr(I32, f"__r{_name}__", _operation(_function, swapped=True))
I32.__neg__ = lambda self: type(self)(-int(self))  # type: ignore[method-assign]


def as_int(value: Any) -> Any:
    """A Python int as an int32 of the kernel; anything else as it is."""
    return I32(value) if isinstance(value, int) and not isinstance(value, bool) else value


class F32(np.float32):
    """A float of a kernel, with a tensor's cast."""

    def to(self, dtype: Any) -> Any:
        return self if dtype is np.float32 else dtype(self)


class T(np.ndarray):
    """An array with the methods of a tensor that kernels use."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> T:
        return self.astype(dtype).view(T)

    def permute(self, order: Sequence[int]) -> T:
        return self.transpose(order)


def tensor(x: Any, dtype: Any = None) -> T:
    """x as a tensor."""
    return np.asarray(x, dtype).view(T)


class State:
    """What is known of a shared buffer: the threads that stored to it and have not fenced since."""

    def __init__(self) -> None:
        self.unfenced: set[int] = set()


class Smem:
    """A view of shared memory; views made by `index` know which buffer they are of."""

    everything: list[State] = []  # noqa: RUF012 (states of all buffers of the process, for `fence`)

    def __init__(self, data: np.ndarray, states: list[State] | None = None) -> None:
        self.data = data
        if states is None:
            states = [State() for _ in range(data.shape[0])]
            Smem.everything.extend(states)
        self.states = states

    @staticmethod
    def stored_by(thread: int) -> list[State]:
        """States with stores of this thread that no fence has followed."""
        return [state for state in Smem.everything if thread in state.unfenced]

    @property
    def state(self) -> State:
        if len(self.states) != 1:
            raise TypeError("index the buffer first")
        return self.states[0]

    @property
    def dtype(self) -> Any:
        return self.data.dtype.type

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, i: Any) -> Smem:
        return Smem(self.data[int(i)], [self.states[int(i)]] if len(self.states) > 1 else self.states)

    def slice(self, start: Any, length: int, dim: int = 0) -> Smem:
        at = [slice(None)] * self.data.ndim
        at[dim] = slice(int(start), int(start) + int(length))
        return Smem(self.data[tuple(at)], self.states)

    def permute(self, order: Sequence[int]) -> Smem:
        return Smem(self.data.transpose(order), self.states)

    def reshape(self, shape: Sequence[int]) -> Smem:
        view = self.data.view()
        view.shape = tuple(int(n) for n in shape)  # raises where a copy would be needed
        return Smem(view, self.states)

    def load(self, layout: Any = None) -> T:
        return tensor(self.data.copy())

    def store(self, value: Any) -> None:
        self.data[...] = value
        for state in self.states:
            state.unfenced.add(threading.get_ident())


class Desc:
    """A host tensor descriptor over a strided array; what a box has outside reads as zero and is not written."""

    def __init__(self, array: np.ndarray, block_shape: Sequence[int]) -> None:
        self.array, self.dtype, self.layout, self.block_shape = array, array.dtype.type, None, list(block_shape)
        nbytes = int(np.prod(block_shape)) * array.itemsize
        self.block_type = types.SimpleNamespace(shape=self.block_shape, nbytes=nbytes)

    def box(self, coord: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(where in the tensor, where in the box) for a box at `coord`."""
        if len(coord) != self.array.ndim:
            raise IndexError(f"a descriptor of {self.array.ndim} axes got coordinates {coord}")
        inside, part = [], []
        for c, n, size in zip(map(int, coord), self.block_shape, self.array.shape, strict=True):
            low, high = min(max(c, 0), size), min(max(c + n, 0), size)
            inside.append(slice(low, high))
            part.append(slice(low - c, max(high - c, low - c)))
        return tuple(inside), tuple(part)

    def read(self, box: tuple[tuple[slice, ...], tuple[slice, ...]]) -> np.ndarray:
        full = np.zeros(self.block_shape, self.array.dtype)
        values = self.array[box[0]]
        if values.size:
            full[box[1]] = values
        return full

    def write(self, box: tuple[tuple[slice, ...], tuple[slice, ...]], data: np.ndarray, add: bool) -> None:
        view = self.array[box[0]]
        if view.size:
            part = data.reshape(self.block_shape)[box[1]]
            view[...] = view + part if add else part


class Ptr:
    """A pointer into a flat array."""

    def __init__(self, array: np.ndarray, offset: Any = 0) -> None:
        self.array, self.offset, self.dtype = array, offset, types.SimpleNamespace(element_ty=array.dtype.type)

    def __add__(self, offset: Any) -> Ptr:
        return Ptr(self.array, self.offset + offset)


def _at(ptr: Ptr, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, mask) of an access; one that is not masked must lie inside."""
    where = np.asarray(ptr.offset, np.int64)
    where, mask = np.broadcast_arrays(where, True if mask is None else np.asarray(mask, bool))
    used = where[mask]
    if used.size and (used.min() < 0 or used.max() >= ptr.array.size):
        raise IndexError(f"access from {used.min()} to {used.max()} of {ptr.array.size} elements")
    return where, mask


def load(ptr: Ptr, mask: Any = None, other: Any = 0, **_: Any) -> Any:
    """Elements at a pointer: a number for a scalar pointer."""
    where, seen = _at(ptr, mask)
    values = np.where(seen, ptr.array[np.where(seen, where, 0)], other).astype(ptr.array.dtype)
    if values.ndim:
        return tensor(values)
    return I32(values) if np.issubdtype(values.dtype, np.integer) else F32(values)


def store(ptr: Ptr, value: Any, mask: Any = None, **_: Any) -> None:
    """Write elements at a pointer."""
    where, seen = _at(ptr, mask)
    ptr.array[where[seen]] = np.broadcast_to(value, where.shape)[seen]


def atomic_add(ptr: Ptr, value: Any, mask: Any = None, **_: Any) -> None:
    """Add to elements at a pointer."""
    where, seen = _at(ptr, mask)
    np.add.at(ptr.array, where[seen], np.broadcast_to(value, where.shape)[seen])


class Nothing:
    """A layout: it has no meaning here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    get_default_for = staticmethod(lambda *_, **__: None)


LAYOUTS = (
    "NVMMADistributedLayout",
    "DotOperandLayout",
    "SliceLayout",
    "BlockedLayout",
    "NVMMASharedLayout",
    "DistributedLinearLayout",
    "SwizzledSharedLayout",
)


def _pick(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of two values: an int of the kernel if both are ints, else a tensor."""

    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return I64(function(int(a), int(b))) if I64 in (type(a), type(b)) else I32(function(int(a), int(b)))
        return tensor(function(a, b))

    return apply


def _where(condition: Any, a: Any, b: Any) -> Any:
    if np.ndim(condition) == 0 and np.ndim(a) == 0 and np.ndim(b) == 0:
        return a if condition else b
    return tensor(np.where(condition, a, b))


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any) -> Any:
        with np.errstate(all="ignore"):
            return tensor(function(np.asarray(x, np.float32)))

    return apply


def _inline_asm(asm: str, constraints: str, args: Sequence[Any], dtype: Any, *, is_pure: bool, pack: int) -> Any:
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    made = [tensor(x) for x in elementwise(asm, constraints, args, kinds, is_pure, pack)]
    return made if isinstance(dtype, tuple) else made[0]


FUNCTIONS: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": np.float32,  # rounding is not simulated
    "float32": np.float32,
    "int64": np.int64,
    "int32": np.int32,
    "constexpr": lambda x: x,
    "static_range": lambda *bounds: (I32(i) for i in range(*bounds)),
    "static_assert": lambda *_: None,
    "assume": lambda _: None,
    "full": lambda shape, value, dtype, layout=None: tensor(np.full(shape, value, dtype)),
    "zeros": lambda shape, dtype, layout=None: tensor(np.zeros(shape, dtype)),
    "num_warps": lambda: 4,
    "arange": lambda a, b, layout=None: tensor(np.arange(a, b)),
    "convert_layout": lambda x, layout, **_: x,
    "expand_dims": lambda x, axis: tensor(np.expand_dims(x, axis)),
    "reshape": lambda x, shape: tensor(np.reshape(x, shape)),
    "permute": lambda x, order: tensor(np.transpose(x, order)),
    "split": lambda x: (tensor(x[..., 0]), tensor(x[..., 1])),
    "maximum": _pick(lambda a, b: np.maximum(a, b) if np.ndim(a) or np.ndim(b) else max(a, b)),
    "minimum": _pick(lambda a, b: np.minimum(a, b) if np.ndim(a) or np.ndim(b) else min(a, b)),
    "cdiv": lambda a, b: (a + (b - 1)) // b,
    "max": lambda x, axis: tensor(np.max(x, axis)),
    "min": lambda x, axis: tensor(np.min(x, axis)),
    "sum": lambda x, axis: tensor(np.sum(x, axis)),
    "exp2": _quiet(np.exp2),
    "exp": _quiet(np.exp),
    "log": _quiet(np.log),
    "log2": _quiet(np.log2),
    "where": _where,
    "inline_asm_elementwise": _inline_asm,
    "fma": lambda a, b, c: tensor(a * b + c),
    "load": load,
    "store": store,
    "atomic_add": atomic_add,
    "thread_barrier": lambda: None,
    "barrier": lambda: None,
}
