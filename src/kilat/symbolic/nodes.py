"""The nodes of an expression: `Var`, `Const`, `Load`, `Call`.

Nodes are immutable and interned: two equal nodes are the same object, so comparing and hashing cost nothing however
much an expression shares. Every node has a kind, "bool", "int" (int32) or "float" (the type that a kernel computes in),
and operands never mix kinds: conversions are nodes of their own ("int" of a bool, "float" of an int or a bool).

What compilers have to know about the operations:

- int arithmetic is int32; `floordiv` rounds down and `mod` has the divisor's sign; an int divided by 0 gives 0 in both.
- an index of a `Load` is clamped to [0, size - 1] along its axis: it never reaches outside the tensor, never wraps.
- `min`, `max`: a if a < b (a > b) else b is enough; a NaN operand may give either.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

Kind = Literal["bool", "int", "float"]

VARIABLES: Mapping[str, Kind] = {"s": "float", "b": "int", "h": "int", "q_pos": "int", "j": "int"}
"""Names of variables: the score, batch index, query head, query position, key index."""

_SAME: Mapping[str, tuple[int, tuple[Kind, ...]]] = {
    "add": (2, ("int", "float")),
    "sub": (2, ("int", "float")),
    "mul": (2, ("int", "float")),
    "floordiv": (2, ("int", "float")),
    "mod": (2, ("int", "float")),
    "min": (2, ("int", "float")),
    "max": (2, ("int", "float")),
    "neg": (1, ("int", "float")),
    "abs": (1, ("int", "float")),
    "div": (2, ("float",)),
    "exp": (1, ("float",)),
    "log": (1, ("float",)),
    "tanh": (1, ("float",)),
    "sqrt": (1, ("float",)),
    "and": (2, ("bool", "int")),
    "or": (2, ("bool", "int")),
    "not": (1, ("bool", "int")),
}
"""Operations whose result has the kind of the operands: number of operands, kinds allowed."""

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
OPERATIONS = (*_SAME, *COMPARISONS, "where", "int", "float")

_lock = threading.Lock()
_pool: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()


class Expr:
    """A node; its `kind` is "bool", "int" or "float"."""

    __slots__ = ("__weakref__", "kind")
    kind: Kind

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"expressions are immutable; got an assignment to {name}")

    def operands(self) -> tuple[Expr, ...]:
        """The nodes that this one reads."""
        return ()

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: object) -> Expr:
        return self


def _interned(cls: type[Expr], key: tuple[Any, ...], **values: Any) -> Any:
    """The one node of this class and key; `values` are its attributes if it has to be made."""
    with _lock:
        node = _pool.get((cls, *key))
        if node is None:
            node = object.__new__(cls)
            for name, value in values.items():
                object.__setattr__(node, name, value)
            _pool[(cls, *key)] = node
    return node


class Var(Expr):
    """One of `VARIABLES`."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, name: str) -> Var:
        if name not in VARIABLES:
            raise ValueError(f"name must be one of {', '.join(VARIABLES)}; got name={name!r}")
        return _interned(cls, (name,), name=name, kind=VARIABLES[name])

    def __reduce__(self) -> tuple[Any, ...]:
        return (Var, (self.name,))

    def __repr__(self) -> str:
        return self.name


class Const(Expr):
    """A Python bool, int (of 32 bits) or float."""

    __slots__ = ("value",)
    value: bool | int | float

    def __new__(cls, value: bool | int | float) -> Const:
        kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        if kind == "int" and not -(2**31) <= value < 2**31:
            raise ValueError(f"an integer constant must fit 32 bits; got {value}")
        # repr tells 1, 1.0 and True apart, and 0.0 from -0.0
        return _interned(cls, (repr(value),), value=value, kind=kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Const, (self.value,))

    def __repr__(self) -> str:
        return repr(self.value)


class Load(Expr):
    """An element of tensor number `tensor`, one int index an axis, each clamped to the axis."""

    __slots__ = ("indices", "tensor")
    tensor: int
    indices: tuple[Expr, ...]

    def __new__(cls, tensor: int, indices: tuple[Expr, ...], kind: Kind) -> Load:
        if any(i.kind != "int" for i in indices):
            raise TypeError(f"indices must be ints; got {', '.join(i.kind for i in indices)}")
        return _interned(cls, (tensor, indices, kind), tensor=tensor, indices=indices, kind=kind)

    def operands(self) -> tuple[Expr, ...]:
        return self.indices

    def __reduce__(self) -> tuple[Any, ...]:
        return (Load, (self.tensor, self.indices, self.kind))

    def __repr__(self) -> str:
        return f"tensor{self.tensor}{list(self.indices)}"


class Call(Expr):
    """An operation on nodes of one kind; raises TypeError if the operands do not fit it."""

    __slots__ = ("args", "op")
    op: str
    args: tuple[Expr, ...]

    def __new__(cls, op: str, args: tuple[Expr, ...]) -> Call:
        return _interned(cls, (op, args), op=op, args=args, kind=_result_kind(op, args))

    def operands(self) -> tuple[Expr, ...]:
        return self.args

    def __reduce__(self) -> tuple[Any, ...]:
        return (Call, (self.op, self.args))

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(map(repr, self.args))})"


def _result_kind(op: str, args: tuple[Expr, ...]) -> Kind:
    kinds: tuple[Kind, ...] = tuple(a.kind for a in args)
    if op in _SAME:
        arity, allowed = _SAME[op]
        if len(kinds) == arity and len(set(kinds)) == 1 and kinds[0] in allowed:
            return kinds[0]
    elif op in COMPARISONS:
        if kinds in (("int", "int"), ("float", "float")):
            return "bool"
    elif op == "where":
        if len(kinds) == 3 and kinds[0] == "bool" and kinds[1] == kinds[2]:
            return kinds[1]
    elif op == "float":
        if kinds in (("int",), ("bool",)):
            return "float"
    elif op == "int":
        if kinds == ("bool",):
            return "int"
    else:
        raise TypeError(f"op must be one of {', '.join(OPERATIONS)}; got op={op!r}")
    raise TypeError(f"{op} does not take operands of kinds {', '.join(kinds) or 'none'}")


def nodes(*roots: Expr) -> list[Expr]:
    """Every node below the roots once, operands before those who read them."""
    order: dict[Expr, None] = {}
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if node in order:
                continue
            if ready:
                order[node] = None
            else:
                stack.append((node, True))
                stack.extend((child, False) for child in reversed(node.operands()))
    return list(order)


def substitute(expr: Expr, replace: Callable[[Expr], Expr | None]) -> Expr:
    """The expression with every node for which `replace` returns another one replaced by that."""
    done: dict[Expr, Expr] = {}
    for node in nodes(expr):
        new = replace(node)
        if new is not None:
            done[node] = new
        elif isinstance(node, Call):
            done[node] = Call(node.op, tuple(done[a] for a in node.args))
        elif isinstance(node, Load):
            done[node] = Load(node.tensor, tuple(done[a] for a in node.indices), node.kind)
        else:
            done[node] = node
    return done[expr]
