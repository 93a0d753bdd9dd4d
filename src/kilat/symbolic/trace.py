"""Tracing: a user function is called once on `Traced` values, whose operators record what it does.

Operators, `kilat.math`, and the torch and NumPy functions of the same names are recorded. Anything that needs the
value itself (`if`, `float()`, `and`, the built-in min) raises TypeError at once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, signature
from typing import Any, NoReturn

import numpy as np

from kilat.symbolic.nodes import COMPARISONS, Call, Const, Expr, Kind, Load, Var
from kilat.symbolic.text import from_text, to_text

_RANK: dict[Kind, int] = {"bool": 0, "int": 1, "float": 2}

_NO_VALUE = (
    "a traced value has no Python value: use kilat.math.where(condition, a, b) instead of if, & | ~ instead of "
    "and, or, not, and kilat.math.minimum, exp, ... instead of min, math.exp, ..."
)


def _widest(args: Sequence[Expr]) -> Kind:
    return max(args, key=lambda a: _RANK[a.kind]).kind


def _convert(expr: Expr, kind: Kind) -> Expr:
    if expr.kind == kind:
        return expr
    if isinstance(expr, Const):
        return Const(float(expr.value) if kind == "float" else int(expr.value))
    return Call(kind, (expr,))


def lift(value: object) -> Expr:
    """The expression of a traced value or a number; raises TypeError for anything else."""
    if isinstance(value, Traced):
        return value.expr
    if isinstance(value, (bool, int, float)):
        return Const(value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return lift(value.item())
    if hasattr(value, "shape"):
        raise TypeError(f"a user function may only read arrays handed in tensors=; got {type(value).__name__}")
    if isinstance(value, SymbolicTensor):
        raise TypeError(f"tensor {value.number} of tensors= needs {value.ndim} more indices before it is a number")
    raise TypeError(f"a user function may only combine traced values, numbers and tensors=; got {value!r}")


def apply(op: str, *operands: object) -> Traced:
    """A traced operation on traced values and numbers, with the conversions that mixed kinds need."""
    args = [lift(x) for x in operands]
    if op == "where":
        if args[0].kind != "bool":
            raise TypeError(f"condition must be a boolean; got kind {args[0].kind} for {args[0]!r}")
        kind = _widest(args[1:])
        return Traced(Call(op, (args[0], *(_convert(a, kind) for a in args[1:]))))
    kind = _widest(args)
    if op in ("div", "exp", "log", "tanh", "sqrt"):
        kind = "float"
    elif kind == "bool" and op not in ("and", "or", "not"):
        kind = "int"
    elif kind == "float" and op in ("and", "or", "not"):
        raise TypeError(f"& | ~ need booleans or integers; got {', '.join(a.kind for a in args)}")
    args = [_convert(a, kind) for a in args]
    if op in ("floordiv", "mod", "div") and isinstance(args[1], Const) and args[1].value == 0:
        raise ValueError(f"a user function must not divide by zero; got {op} of {args[0]!r} by 0")
    return Traced(Call(op, tuple(args)))


class Traced:
    """A value during tracing; its operators build `expr`."""

    __slots__ = ("expr",)
    __array_priority__ = 1000.0

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __repr__(self) -> str:
        return f"Traced({self.expr!r})"

    __hash__ = None  # type: ignore[assignment]

    # fmt: off
    def __add__(self, x: object) -> Traced: return apply("add", self, x)
    def __radd__(self, x: object) -> Traced: return apply("add", x, self)
    def __sub__(self, x: object) -> Traced: return apply("sub", self, x)
    def __rsub__(self, x: object) -> Traced: return apply("sub", x, self)
    def __mul__(self, x: object) -> Traced: return apply("mul", self, x)
    def __rmul__(self, x: object) -> Traced: return apply("mul", x, self)
    def __truediv__(self, x: object) -> Traced: return apply("div", self, x)
    def __rtruediv__(self, x: object) -> Traced: return apply("div", x, self)
    def __floordiv__(self, x: object) -> Traced: return apply("floordiv", self, x)
    def __rfloordiv__(self, x: object) -> Traced: return apply("floordiv", x, self)
    def __mod__(self, x: object) -> Traced: return apply("mod", self, x)
    def __rmod__(self, x: object) -> Traced: return apply("mod", x, self)
    def __neg__(self) -> Traced: return apply("neg", self)
    def __pos__(self) -> Traced: return self
    def __abs__(self) -> Traced: return apply("abs", self)
    def __lt__(self, x: object) -> Traced: return apply("lt", self, x)
    def __le__(self, x: object) -> Traced: return apply("le", self, x)
    def __gt__(self, x: object) -> Traced: return apply("gt", self, x)
    def __ge__(self, x: object) -> Traced: return apply("ge", self, x)
    def __eq__(self, x: object) -> Traced: return apply("eq", self, x)  # type: ignore[override]
    def __ne__(self, x: object) -> Traced: return apply("ne", self, x)  # type: ignore[override]
    def __and__(self, x: object) -> Traced: return apply("and", self, x)
    def __rand__(self, x: object) -> Traced: return apply("and", x, self)
    def __or__(self, x: object) -> Traced: return apply("or", self, x)
    def __ror__(self, x: object) -> Traced: return apply("or", x, self)
    def __invert__(self) -> Traced: return apply("not", self)
    # fmt: on

    def _no_value(self, *_: object) -> NoReturn:
        raise TypeError(_NO_VALUE)

    __bool__ = __float__ = __int__ = __index__ = __iter__ = __len__ = __complex__ = _no_value

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TypeError(f"a traced value has no method {name}; kilat.math has the functions that can be traced")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Traced:
        return cls._foreign(getattr(func, "__name__", repr(func)), args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: object, **kwargs: object) -> Traced:
        if method != "__call__":
            raise TypeError(f"a user function may not call numpy.{ufunc.__name__}.{method}")
        return self._foreign(ufunc.__name__, args, kwargs)

    def __array_function__(
        self, func: Any, types: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Traced:
        return self._foreign(func.__name__, args, kwargs)

    @staticmethod
    def _foreign(name: str, args: tuple[object, ...], kwargs: dict[str, object] | None) -> Traced:
        """A torch or NumPy function, by its name, recorded as ours."""
        op = _FOREIGN.get(name)
        if op is None or kwargs:
            keywords = f" with {', '.join(kwargs)}" if kwargs else ""
            raise TypeError(f"a user function may not call {name}{keywords}; it may call {', '.join(_FOREIGN)}")
        return apply(op, *args)


_FOREIGN = {
    **{f: f for f in ("add", "sub", "mul", "div", "neg", "abs", "where", "exp", "log", "tanh", "sqrt", *COMPARISONS)},
    "minimum": "min",
    "maximum": "max",
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "negative": "neg",
    "true_divide": "div",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "absolute": "abs",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_not": "not",
    "invert": "not",
}
"""torch and NumPy names of the operations."""


class SymbolicTensor:
    """A tensor of `tensors=` during tracing; `t[i, j]` and `t[i][j]` read an element."""

    __slots__ = ("indices", "kind", "ndim", "number")

    def __init__(self, number: int, ndim: int, kind: Kind, indices: tuple[Expr, ...] = ()) -> None:
        self.number, self.ndim, self.indices = number, ndim, indices
        self.kind: Kind = kind

    def __getitem__(self, index: object) -> Traced | SymbolicTensor:
        new = tuple(self._index(x) for x in (index if isinstance(index, tuple) else (index,)))
        if len(new) > self.ndim:
            raise TypeError(f"tensor {self.number} of tensors= has {self.ndim} axes left; got {len(new)} indices")
        if len(new) < self.ndim:
            return SymbolicTensor(self.number, self.ndim - len(new), self.kind, self.indices + new)
        return Traced(Load(self.number, self.indices + new, self.kind))

    def _index(self, x: object) -> Expr:
        if isinstance(x, slice) or x is None or x is Ellipsis:
            raise TypeError(f"tensors= can be indexed by integers only; got {x!r}")
        expr = lift(x)
        if expr.kind != "int":
            raise TypeError(f"tensors= can be indexed by integers only; got kind {expr.kind} for {expr!r}")
        return expr

    def __iter__(self) -> NoReturn:
        raise TypeError(f"tensor {self.number} of tensors= cannot be iterated over while tracing")


def tensor_kind(tensor: Any) -> Kind:
    """The kind of a tensor's elements, by the name of its dtype; raises TypeError for complex and unsigned ones."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bool":
        return "bool"
    if name in ("int8", "int16", "int32", "int64", "uint8"):
        return "int"
    if name in ("float16", "bfloat16", "float32", "float64"):
        return "float"
    raise TypeError(f"tensors= must hold bools, ints or floats; got dtype {tensor.dtype}")


def trace(fn: Callable[..., object], names: Sequence[str], tensors: Sequence[Any] = ()) -> Expr:
    """What `fn(*names, *tensors)` computes, as an expression.

    `fn` takes the variables in the order of `names`, then the tensors; a function that takes the variables alone may
    instead read the same tensor objects from the scope around it. Raises TypeError for anything that cannot be traced.
    """
    return from_text(trace_to_text(fn, names, tensors))


def trace_to_text(
    fn: Callable[..., object], names: Sequence[str], tensors: Sequence[Any] = (), kind: Kind | None = None
) -> str:
    """The text of `trace(fn, names, tensors)`; may be called while torch.compile traces the caller.

    With a `kind` the result must have it, else TypeError; an int result becomes a float where that is wanted.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable; got {fn!r}")
    kinds: list[tuple[int, Kind]] = []
    for number, tensor in enumerate(tensors):
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            raise TypeError(f"tensors must be tensors or arrays; got tensors[{number}]={tensor!r}")
        kinds.append((len(tensor.shape), tensor_kind(tensor)))
    text = _text(fn, tuple(names), tuple(kinds), kind)
    if not text:
        symbols = _symbols(tuple(kinds))
        text = _text(_rebound(fn, tensors, symbols), tuple(names), (), kind)
    return text


def _symbols(kinds: tuple[tuple[int, Kind], ...]) -> list[Any]:
    """A symbol for each tensor of so many axes and that kind."""
    return [SymbolicTensor(n, d, kind) if d else Traced(Load(n, (), kind)) for n, (d, kind) in enumerate(kinds)]


def _text(
    fn: Callable[..., object], names: tuple[str, ...], kinds: tuple[tuple[int, Kind], ...], kind: Kind | None
) -> str:
    """The traced function as text, or "" if it takes the variables alone though there are tensors."""
    if not _accepts(fn, len(names) + len(kinds)):
        if kinds and _accepts(fn, len(names)):
            return ""
        expected = ", ".join([*names, *(f"tensors[{n}]" for n in range(len(kinds)))])
        raise TypeError(f"fn must take ({expected}); got {_name(fn)}{signature(fn)}")
    expr = lift(fn(*(Traced(Var(n)) for n in names), *_symbols(kinds)))
    if kind == "float" and expr.kind == "int":
        expr = _convert(expr, kind)
    if kind is not None and expr.kind != kind:
        raise TypeError(f"{_name(fn)} must return a {kind}; got a {expr.kind}: {expr!r}")
    return to_text(expr)


# torch.compile then calls the function instead of tracing it: what `torch.compiler.assume_constant_result` sets,
# spelled out because this layer does not import torch
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _accepts(fn: Callable[..., object], count: int) -> bool:
    try:
        parameters: Iterable[Parameter] = signature(fn).parameters.values()
    except ValueError:  # some built-in functions have no signature; calling them will tell
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in positional)
    variadic = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    return needed <= count and (variadic or count <= len(positional))


def _rebound(fn: Any, tensors: Sequence[Any], symbols: Sequence[Any]) -> Any:
    """A copy of a plain function in which names of the given tensors mean their symbols."""
    if not isinstance(fn, types.FunctionType):
        return fn
    symbol_of = {id(t): s for t, s in zip(tensors, symbols, strict=True)}

    def cell(old: types.CellType) -> types.CellType:
        try:
            content = old.cell_contents
        except ValueError:  # a name not yet bound
            return old
        return types.CellType(symbol_of[id(content)]) if id(content) in symbol_of else old

    closure = tuple(cell(c) for c in fn.__closure__) if fn.__closure__ else None
    scope = {n: symbol_of.get(id(v), v) for n, v in fn.__globals__.items()}
    copy = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, closure)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
