"""What masks and scores have in common: a frozen description whose tensors can be taken out and put back.

The structure is the description with every tensor replaced by `SLOT`. It can be hashed and written as text, so it
stands in compile keys and travels in the spec string of a custom operator; the tensors travel beside it.
"""

from __future__ import annotations

import ast
import importlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

S = TypeVar("S", bound="Structured")

_classes: dict[str, type[Structured]] = {}
"""Every subclass by "module:qualified name", so that text can name classes which cannot be imported by name."""


@dataclass(frozen=True)
class Slot:
    """Stands where a tensor was; `SLOT` is the only one."""

    def __reduce__(self) -> str:
        return "SLOT"


SLOT = Slot()


@dataclass(frozen=True, eq=False)
class Structured:
    """Base of masks and scores. Subclasses are frozen dataclasses.

    `tensor_fields` names the fields that hold a tensor or a tuple of tensors; all other fields hold ints, floats,
    strings, bools, None, or values of this kind. Two objects are equal if their constants are and their tensors are
    the same objects; subclasses with tensors say eq=False to keep that.
    """

    tensor_fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _classes[_class_name(cls)] = cls

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        other = cast("Structured", other)
        ours, theirs = self.tensors(), other.tensors()
        same = len(ours) == len(theirs) and all(x is y for x, y in zip(ours, theirs, strict=True))
        return same and _static(self) == _static(other)

    def __hash__(self) -> int:
        return hash(_static(self))

    def tensors(self) -> tuple[Any, ...]:
        """The tensors of the description, in the order in which `with_tensors` takes them."""
        found: list[Any] = []
        for name in self.tensor_fields:
            value = getattr(self, name)
            found.extend(cast("tuple[Any, ...]", value) if isinstance(value, tuple) else [value])
        return tuple(found)

    def with_tensors(self: S, tensors: Sequence[Any]) -> S:
        """The same description with other tensors; raises ValueError if their number differs."""
        left = list(tensors)
        if len(left) != len(self.tensors()):
            raise ValueError(f"tensors must be {len(self.tensors())} tensors for {self.name}; got {len(left)}")
        if not left:
            return self
        changed: dict[str, Any] = {}
        for name in self.tensor_fields:
            value = getattr(self, name)
            count = len(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else 1
            changed[name] = tuple(left[:count]) if isinstance(value, tuple) else left[0]
            del left[:count]
        return self._changed(changed)

    def structure(self: S) -> S:
        """The description with `SLOT` for every tensor."""
        tensors = self.tensors()
        return self.with_tensors((SLOT,) * len(tensors)) if tensors else self

    def check(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool = True) -> None:
        """Raises ValueError if a tensor does not fit the call.

        The lengths are those that tensors are indexed by; with exact=False (ragged, cached) tensors may be longer.
        """

    @property
    def name(self) -> str:
        """A short name with the values that matter, for tests, tables and benchmark rows."""
        values = [getattr(self, f.name) for f in fields(self) if f.name not in self.tensor_fields]
        return "_".join([type(self).__name__.lower(), *(str(v) for v in values if isinstance(v, (int, float, str)))])

    def to_text(self) -> str:
        """The structure as text."""
        return _encode(self.structure())

    @classmethod
    def from_text(cls: type[S], text: str) -> S:
        """The structure that `to_text` wrote; raises TypeError if it is of another class."""
        value = _decode(ast.literal_eval(text))
        if not isinstance(value, cls):
            raise TypeError(f"text must describe a {cls.__name__}; got {text!r}")
        return value

    def _changed(self: S, values: dict[str, Any]) -> S:
        """A copy with other values of some fields; nothing is checked again."""
        return _build(type(self), {f.name: values.get(f.name, getattr(self, f.name)) for f in fields(self)})


def _static(x: Structured) -> tuple[Any, ...]:
    _check_fields(x)
    return (type(x), *(getattr(x, f.name) for f in fields(x) if f.name not in x.tensor_fields))


def _check_fields(x: Structured) -> None:
    """Raises TypeError if the object has attributes that are no fields: compile keys would not see them."""
    if len(vars(x)) != len(fields(x)) and (names := sorted(set(vars(x)) - {f.name for f in fields(x)})):
        raise TypeError(f"{type(x).__name__} must be a frozen dataclass with fields for what it holds; got {names}")


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _build(cls: type[S], values: dict[str, Any]) -> S:
    """An object with these field values, which a constructor has checked before."""
    new = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def _encode(value: Any, where: str = "") -> str:
    """A value as a Python literal, in plain string operations that torch.compile can follow."""
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, int):
        return repr(operator.index(value))  # a tracer's symbolic int becomes a number here, with a guard
    if isinstance(value, float):
        return f"('float',{value.hex()!r})"
    if isinstance(value, tuple):
        return "('tuple'," + "".join([_encode(v, where) + "," for v in cast("tuple[Any, ...]", value)]) + ")"
    if isinstance(value, Slot):
        return "('slot',)"
    if isinstance(value, Structured):
        _check_fields(value)
        items: list[str] = []
        for f in fields(value):
            field_value = getattr(value, f.name)
            items.append(f",{f.name!r}," + _encode(field_value, f"{type(value).__name__}.{f.name}"))
        return f"('class',{_class_name(type(value))!r}" + "".join(items) + ")"
    raise TypeError(f"{where} must hold numbers, strings, masks, or tensors named in tensor_fields; got {value!r}")


def _decode(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, *rest = cast("tuple[Any, ...]", value)
    if kind == "float":
        return float.fromhex(rest[0])
    if kind == "tuple":
        return tuple(_decode(v) for v in rest)
    if kind == "slot":
        return SLOT
    return _build(_find(rest[0]), {n: _decode(v) for n, v in zip(rest[1::2], rest[2::2], strict=True)})


def _find(name: str) -> type[Structured]:
    module, _, path = name.partition(":")
    found: Any
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):  # a class made inside a function, or in a module that is gone
        found = _classes.get(name)
    if not (isinstance(found, type) and issubclass(found, Structured)):
        raise TypeError(f"text must name a mask or a score; got {name}")
    return found


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of a tensor or array as ints."""
    return tuple(x.shape)


def check_dtype(x: Any, name: str, *allowed: str, remedy: str = "") -> None:
    """Raises TypeError, which says the remedy, unless x is a tensor or array of one of these dtypes."""
    if isinstance(x, Slot):
        return
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be a tensor or an array; got {type(x).__name__}")
    if str(x.dtype).removeprefix("torch.") not in allowed:
        hint = f" ({remedy})" if remedy else ""
        raise TypeError(f"{name} must be {' or '.join(allowed)}{hint}; got {name}.dtype={x.dtype}")


def check_broadcast(
    x: Any, name: str, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool
) -> None:
    """Raises ValueError unless x [batch or 1, heads or 1, seqlen_q or 1, seqlen_kv or 1] fits."""
    shape = shape_of(x)
    full = (1,) * (4 - len(shape)) + shape
    wanted = (batch, num_heads_q, seqlen_q, seqlen_kv)
    fits = [have in (1, want) for have, want in zip(full[:2], wanted[:2], strict=True)]
    fits += [
        have == 1 or (have == want if exact else have >= want) for have, want in zip(full[2:], wanted[2:], strict=True)
    ]
    if len(shape) > 4 or not all(fits):
        raise ValueError(
            f"{name} must be broadcastable to [batch={batch}, num_heads_q={num_heads_q}, seqlen_q={seqlen_q}, "
            f"seqlen_kv={seqlen_kv}]; got {name}.shape={shape}"
        )


def four_axes(x: Any, name: str) -> Any:
    """A view of a tensor or array with leading axes of size 1 up to four; raises ValueError for more than four."""
    if isinstance(x, Slot) or len(x.shape) == 4:
        return x
    if len(x.shape) > 4:
        raise ValueError(f"{name} must have at most 4 axes; got {name}.shape={shape_of(x)}")
    return x[(None,) * (4 - len(x.shape))]


def as_numpy(x: Any) -> Any:
    """A tensor or array as a NumPy array, without a copy where that is possible."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return x.float().numpy() if str(x.dtype) == "torch.bfloat16" else x.numpy()
    return np.asarray(x)


def int32_tensor(x: Any, name: str, *axes: int) -> Any:
    """x, an int32 tensor or array with one of these numbers of axes; lists of ints become arrays."""
    if isinstance(x, (list, tuple)):
        x = np.asarray(x)
        if x.dtype.kind != "i" and x.size:
            raise TypeError(f"{name} must hold ints; got {name}={x.tolist()}")
        x = x.astype(np.int32)
    remedy = "use .to(torch.int32)" if hasattr(x, "detach") else "use .astype(np.int32)"
    check_dtype(x, name, "int32", remedy=remedy)
    if not isinstance(x, Slot) and len(x.shape) not in axes:
        raise ValueError(f"{name} must have {' or '.join(map(str, axes))} axes; got {name}.shape={shape_of(x)}")
    return x


def check_batch(x: Any, name: str, batch: int) -> None:
    """Raises ValueError unless x is [batch] or [1]."""
    if shape_of(x) not in ((1,), (batch,)):
        raise ValueError(f"{name} must be [batch={batch}]; got {name}.shape={shape_of(x)}")


def check_int(value: Any, name: str, least: int) -> int:
    """value as an int; raises TypeError unless it is an integer, ValueError if it is below `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int; got {name}={value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {name}={value}")
    return operator.index(value)


def check_number(value: Any, name: str) -> float:
    """value as a float; raises TypeError unless it is a number."""
    if isinstance(value, bool) or not hasattr(value, "__float__") or hasattr(value, "detach"):
        raise TypeError(f"{name} must be a number; got {name}={value!r}")
    return float(value)


def float_tensor(x: Any, name: str) -> Any:
    """x; lists of numbers become float32 arrays."""
    if isinstance(x, (list, tuple)):
        try:
            return np.asarray(x, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must hold numbers; got {name}={x!r}") from error
    return x
