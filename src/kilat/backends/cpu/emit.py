"""A small typed language over LLVM IR: what an attention kernel needs and nothing else.

Types are `Type(elem, lanes)`, values are immutable SSA `Value`s, and a `Function` writes structured code (ranges,
conditions, mutable `Var`s that LLVM turns back into registers). Pointers are byte addressed: `p.at(offset)`.
Arithmetic on values follows the element type, and a Python number takes the type of its partner.
`//` and `%` truncate as the hardware does; `fdiv` floors. Nothing here is contracted or reordered behind the caller's
back: a fused multiply-add is written `f.fma(a, b, c)`. A worked example stands in docs/emitter.md.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from kilat.backends.cpu.emit_types import BF16, F16, F32, F64, I1, I8, I16, I32, I64, PTR, VOID, Type, literal
from kilat.backends.cpu.emit_value import Operand, Value, Var

__all__ = [
    "BF16",
    "F16",
    "F32",
    "F64",
    "I1",
    "I8",
    "I16",
    "I32",
    "I64",
    "PTR",
    "VOID",
    "Function",
    "Module",
    "Operand",
    "Type",
    "Value",
    "Var",
    "literal",
]


class Function:
    """Builds one function; see the module docstring for the language."""

    def __init__(self, module: Module, name: str, args: Sequence[Type], ret: Type, exported: bool) -> None:
        self.module, self.name, self.ret, self.exported = module, name, ret, exported
        self.types = tuple(args)
        self.args = tuple(Value(self, f"%arg{i}", t) for i, t in enumerate(args))
        self.allocas: list[str] = []
        self.lines: list[str] = []
        self._count = 0

    # ---- writing -------------------------------------------------------------------------------------------------
    def fresh(self, prefix: str) -> str:
        self._count += 1
        return f"%{prefix}{self._count}"

    def emit(self, line: str) -> None:
        self.lines.append("  " + line)

    def emit_value(self, expr: str, t: Type) -> Value:
        name = self.fresh("v")
        self.emit(f"{name} = {expr}")
        return Value(self, name, t)

    def place(self, label: str) -> None:
        self.lines.append(f"{label[1:]}:")

    def jump(self, label: str) -> None:
        self.emit(f"br label {label}")

    def text(self) -> str:
        args = ", ".join(f"{a.type} {a.name}" for a in self.args)
        linkage, attr = ("", "") if self.exported else ("internal ", " noinline")
        body = "\n".join(["entry:", *self.allocas, *self.lines])
        return f"define {linkage}{self.ret} @{self.name}({args}){attr} {{\n{body}\n}}\n"

    # ---- values --------------------------------------------------------------------------------------------------
    def coerce(self, x: Operand, t: Type) -> Value:
        """x as a value of type t: a number becomes a constant, a scalar value is broadcast to lanes."""
        if isinstance(x, Value):
            if x.type == t:
                return x
            if t.lanes and x.type == t.scalar:
                return self.splat(x, t.lanes)
            raise TypeError(f"expected a value of type {t}; got {x.type}")
        return self.const(x, t)

    def const(self, x: int | float, t: Type) -> Value:
        lit = literal(x, t.scalar)
        if t.lanes:
            lit = "<" + ", ".join([f"{t.elem} {lit}"] * t.lanes) + ">"
        return Value(self, lit, t)

    def const_vector(self, xs: Sequence[int | float], elem: Type) -> Value:
        return Value(self, "<" + ", ".join(f"{elem} {literal(x, elem)}" for x in xs) + ">", elem.vec(len(xs)))

    def iota(self, t: Type) -> Value:
        return self.const_vector(range(t.lanes), t.scalar)

    def var(self, t: Type, init: Operand | None = None) -> Var:
        return Var(self, t, init)

    def binary(self, op: str, a: Value, b: Value) -> Value:
        return self.emit_value(f"{op} {a.type} {a.name}, {b.name}", a.type)

    def compare(self, op: str, a: Value, b: Value) -> Value:
        return self.emit_value(f"{op} {a.type} {a.name}, {b.name}", a.type.like(I1))

    def negate(self, a: Value) -> Value:
        if a.type.is_float:
            return self.emit_value(f"fneg {a.type} {a.name}", a.type)
        return self.const(0, a.type) - a

    def select(self, c: Value, a: Operand, b: Operand) -> Value:
        """a where c holds, else b; a scalar c chooses one of them as a whole."""
        types = [x.type for x in (a, b) if isinstance(x, Value)]
        if not types:
            raise TypeError(f"select between two numbers does not say its type; got {a} and {b}")
        t = max(types, key=lambda t: t.lanes)
        t = t.vec(t.lanes or c.type.lanes)
        a, b = self.coerce(a, t), self.coerce(b, t)
        return self.emit_value(f"select {c.type} {c.name}, {t} {a.name}, {t} {b.name}", t)

    def maximum(self, a: Value, b: Operand) -> Value:
        """a if a > b else b: a NaN in `a` is dropped, one in `b` is kept."""
        b = self.coerce(b, a.type)
        return self.select(a > b, a, b)

    def minimum(self, a: Value, b: Operand) -> Value:
        b = self.coerce(b, a.type)
        return self.select(a < b, a, b)

    def fdiv(self, a: Value, b: Operand) -> Value:
        """Floor division of integers, for negative values too."""
        b = self.coerce(b, a.type)
        q, r = a // b, a % b
        wrong = r.ne(0) & ((r ^ b) < 0)
        return self.select(wrong, q - 1, q)

    def fma(self, a: Value, b: Operand, c: Operand) -> Value:
        """a * b + c: one instruction and one rounding where the machine has it (`Isa.has_fma`), else two of each."""
        return self.intrinsic(
            f"llvm.fmuladd.{a.type.suffix}", a.type, a, self.coerce(b, a.type), self.coerce(c, a.type)
        )

    def cast(self, op: str, a: Value, t: Type) -> Value:
        """LLVM's conversions by name: trunc zext sext sitofp uitofp fptosi fpext fptrunc bitcast ptrtoint inttoptr."""
        return a if a.type == t else self.emit_value(f"{op} {a.type} {a.name} to {t}", t)

    def bitcast(self, a: Value, t: Type) -> Value:
        return self.cast("bitcast", a, t)

    def splat(self, x: Value, lanes: int) -> Value:
        t = x.type.vec(lanes)
        one = self.emit_value(f"insertelement {t} poison, {x.type} {x.name}, i32 0", t)
        return self.emit_value(f"shufflevector {t} {one.name}, {t} poison, <{lanes} x i32> zeroinitializer", t)

    def shuffle(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        mask = ", ".join(f"i32 {i}" for i in lanes)
        other = b.name if b is not None else "poison"
        t = a.type.scalar.vec(len(lanes))
        return self.emit_value(f"shufflevector {a.type} {a.name}, {a.type} {other}, <{len(lanes)} x i32> <{mask}>", t)

    def extract(self, a: Value, lane: Operand) -> Value:
        i = self.coerce(lane, I64)
        return self.emit_value(f"extractelement {a.type} {a.name}, i64 {i.name}", a.type.scalar)

    def insert(self, a: Value, x: Operand, lane: Operand) -> Value:
        i, x = self.coerce(lane, I64), self.coerce(x, a.type.scalar)
        return self.emit_value(f"insertelement {a.type} {a.name}, {x.type} {x.name}, i64 {i.name}", a.type)

    def reduce(self, a: Value, combine: str) -> Value:
        """Fold the lanes in a fixed tree; combine is "add", "max", "min" or "or"."""
        while a.type.lanes > 1:
            h = a.type.lanes // 2
            lo, hi = self.shuffle(a, None, range(h)), self.shuffle(a, None, range(h, 2 * h))
            if combine == "add":
                a = lo + hi
            elif combine == "or":
                a = lo | hi
            else:
                a = self.maximum(lo, hi) if combine == "max" else self.minimum(lo, hi)
        return self.extract(a, 0)

    def any(self, mask: Value) -> Value:
        """Whether a lane of an I1 vector is set."""
        return self.bitcast(mask, Type(f"i{mask.type.lanes}")).ne(0)

    def all(self, mask: Value) -> Value:
        """Whether every lane of an I1 vector is set."""
        return self.bitcast(mask, Type(f"i{mask.type.lanes}")).eq(-1)

    # ---- calls ---------------------------------------------------------------------------------------------------
    def intrinsic(self, name: str, ret: Type, *args: Value) -> Value:
        """Call a function declared outside the module, or an LLVM intrinsic."""
        self.module.declare(ret, name, [a.type for a in args])
        return self._call(f"@{name}", ret, args)

    def call(self, callee: Function, *args: Operand) -> Value:
        if len(args) != len(callee.types):
            raise TypeError(f"{callee.name} takes {len(callee.types)} arguments; got {len(args)}")
        return self._call(
            f"@{callee.name}", callee.ret, [self.coerce(a, t) for a, t in zip(args, callee.types, strict=True)]
        )

    def call_pointer(self, pointer: Value, ret: Type, *args: Value) -> Value:
        """Call through a function pointer, as compiled user functions are."""
        return self._call(pointer.name, ret, args)

    def _call(self, target: str, ret: Type, args: Sequence[Value]) -> Value:
        text = f"call {ret} {target}({', '.join(f'{a.type} {a.name}' for a in args)})"
        if ret == VOID:
            self.emit(text)
            return Value(self, "void", VOID)
        return self.emit_value(text, ret)

    def ret_value(self, x: Operand | None = None) -> None:
        self.emit("ret void" if x is None else f"ret {self.ret} {self.coerce(x, self.ret).name}")

    # ---- memory --------------------------------------------------------------------------------------------------
    def load(self, t: Type, p: Value, offset: Operand = 0, align: int = 0) -> Value:
        """Load t from `offset` bytes behind p; unaligned beyond the element unless `align` says more."""
        p = p.at(offset)
        return self.emit_value(f"load {t}, ptr {p.name}, align {align or t.scalar.bytes}", t)

    def store(self, x: Value, p: Value, offset: Operand = 0, align: int = 0) -> None:
        p = p.at(offset)
        self.emit(f"store {x.type} {x.name}, ptr {p.name}, align {align or x.type.scalar.bytes}")

    def masked_load(self, t: Type, p: Value, mask: Value, other: Operand = 0) -> Value:
        """Lanes whose mask bit is clear are not read and become `other`."""
        name, align = f"llvm.masked.load.{t.suffix}.p0", self.const(t.scalar.bytes, I32)
        return self.intrinsic(name, t, p, align, mask, self.coerce(other, t))

    def masked_store(self, x: Value, p: Value, mask: Value) -> None:
        align = self.const(x.type.scalar.bytes, I32)
        self.intrinsic(f"llvm.masked.store.{x.type.suffix}.p0", VOID, x, p, align, mask)

    def prefetch(self, p: Value, locality: int = 2) -> None:
        one = self.const(1, I32)
        self.intrinsic("llvm.prefetch.p0", VOID, p, self.const(0, I32), self.const(locality, I32), one)

    def atomic_add(self, p: Value, x: Operand, order: str = "monotonic") -> Value:
        """Fetch and add on an int64; returns the value before."""
        return self.emit_value(f"atomicrmw add ptr {p.name}, i64 {self.coerce(x, I64).name} {order}", I64)

    # ---- control -------------------------------------------------------------------------------------------------
    @contextmanager
    def range(self, start: Operand, stop: Operand, step: Operand = 1) -> Generator[Value, None, None]:
        """`for i in range(start, stop, step)` on int64, step > 0."""
        stop, step = self.coerce(stop, I64), self.coerce(step, I64)
        i = self.var(I64, start)
        head, body, end = self.fresh("head"), self.fresh("body"), self.fresh("end")
        self.jump(head)
        self.place(head)
        now = i.get()
        self.emit(f"br i1 {(now < stop).name}, label {body}, label {end}")
        self.place(body)
        yield now
        i.set(now + step)
        self.jump(head)
        self.place(end)

    @contextmanager
    def forever(self) -> Generator[str, None, None]:
        """A loop that ends by `f.leave(label, cond)` with the label that this binds."""
        head, end = self.fresh("head"), self.fresh("end")
        self.jump(head)
        self.place(head)
        yield end
        self.jump(head)
        self.place(end)

    def leave(self, label: str, cond: Value) -> None:
        """Jump to a loop's end if cond holds."""
        go_on = self.fresh("go")
        self.emit(f"br i1 {cond.name}, label {label}, label {go_on}")
        self.place(go_on)

    @contextmanager
    def when(self, cond: Value) -> Generator[None, None, None]:
        """Run the block if cond holds; results leave it through a `Var`."""
        then, end = self.fresh("then"), self.fresh("end")
        self.emit(f"br i1 {cond.name}, label {then}, label {end}")
        self.place(then)
        yield
        self.jump(end)
        self.place(end)

    @contextmanager
    def unless(self, cond: Value) -> Generator[None, None, None]:
        """Run the block if cond does not hold."""
        with self.when(~cond):
            yield


class Module:
    """A set of functions that are compiled together."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self._declared: dict[str, str] = {}

    def declare(self, ret: Type, name: str, args: Sequence[Type]) -> None:
        self._declared[name] = f"declare {ret} @{name}({', '.join(map(str, args))})"

    @contextmanager
    def function(
        self, name: str, args: Sequence[Type], ret: Type = VOID, exported: bool = False
    ) -> Generator[Function, None, None]:
        """Define a function; a void one returns by itself at the end."""
        f = Function(self, name, args, ret, exported)
        yield f
        if ret == VOID:
            f.ret_value()
        self.functions.append(f)

    def text(self) -> str:
        return "\n".join([*self._declared.values(), *(f.text() for f in self.functions)])
