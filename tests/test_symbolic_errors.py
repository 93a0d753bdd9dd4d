"""What cannot be traced, built or read, and what the messages say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kilat.math as km
from kilat.symbolic import Call, Const, Expr, Load, Var, from_text, trace

NAMES = ("s", "b", "h", "q_pos", "j")
FLOATS = np.zeros((3, 5))


def traced(fn: Callable[..., Any], *tensors: Any) -> Expr:
    return trace(fn, NAMES, tensors)


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, *_: s if s > 0 else 0.0,
        lambda s, *_: s > 0 and s < 1,
        lambda s, *_: not s,
        lambda s, *_: float(s),
        lambda s, b, *_: int(b),
        lambda s, b, *_: list(range(b)),
        lambda s, b, *_: [1, 2][b],
        lambda s, *_: min(s, 0.0),
        lambda s, *_: list(s),
        lambda s, *_: s in (1.0, 2.0),
        lambda s, *_: s**2,
        lambda s, *_: s @ s,
        lambda s, *_: s.tanh(),
        lambda s, *_: torch.sin(s),
        lambda s, *_: np.sin(s),
        lambda s, *_: np.add.reduce(s),
        lambda s, *_: torch.sum(s, dim=0),
        lambda s, *_: s + torch.ones(3),
        lambda s, *_: torch.ones(3)[s > 0],
        lambda s, *_: s + np.ones(3),
        lambda s, *_: s + "1",
        lambda s, *_: s & 1,
        lambda s, *_: ~s,
        lambda s, *_: km.where(s, 1.0, 2.0),
        lambda s, *_: None,
        lambda s, *_: (s, s),
        lambda s: s,
        lambda s, b, h, q_pos, j, more: s,
        "s",
    ],
)
def test_what_cannot_be_traced_is_a_type_error(fn: Any) -> None:
    with pytest.raises(TypeError):
        trace(fn, NAMES)


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, b, h, q, j, t: t,
        lambda s, b, h, q, j, t: t[h],
        lambda s, b, h, q, j, t: t[h] + 1,
        lambda s, b, h, q, j, t: t[h, j, q],
        lambda s, b, h, q, j, t: t[h, 0:1],
        lambda s, b, h, q, j, t: t[..., j],
        lambda s, b, h, q, j, t: t[s, j],
        lambda s, b, h, q, j, t: t[h > 0, j],
        lambda s, b, h, q, j, t: [*t],
        lambda s, b, h, q, j, t: t.sum(),
    ],
)
def test_tensors_can_be_read_by_whole_integer_indices_only(fn: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        trace(fn, NAMES, (FLOATS,))


def test_messages_say_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"kilat\.math\.where\(condition, a, b\) instead of if"):
        traced(lambda s, *_: 1.0 if s > 0 else 0.0)
    with pytest.raises(TypeError, match=r"fn must take \(s, b, h, q_pos, j\)"):
        traced(lambda s: s)
    with pytest.raises(TypeError, match="may not call sin; it may call"):
        traced(lambda s, *_: torch.sin(s))
    with pytest.raises(TypeError, match=r"tensors\[0\]=\[1\]"):
        traced(lambda s, *_: s, [1])
    with pytest.raises(TypeError, match="complex"):
        traced(lambda s, *_: s, np.zeros(2, np.complex64))
    with pytest.raises(ValueError, match="divide by zero"):
        traced(lambda s, b, *_: b // 0)
    with pytest.raises(ValueError, match="32 bits"):
        traced(lambda s, b, *_: b + 2**31)


def test_nodes_are_typed_immutable_and_interned() -> None:
    assert Const(1) is not Const(1.0)
    assert Const(1) is not Const(True)
    assert Const(0.0) is not Const(-0.0)
    assert Var("s") is Var("s")
    assert Var("s") != Var("j")
    with pytest.raises(AttributeError):
        Var("s").name = "j"
    with pytest.raises(ValueError, match="name must be one of"):
        Var("i")
    with pytest.raises(TypeError, match="add does not take operands of kinds int, float"):
        Call("add", (Var("j"), Var("s")))
    with pytest.raises(TypeError, match="op must be one of"):
        Call("sin", (Var("s"),))
    with pytest.raises(TypeError, match="indices must be ints"):
        Load(0, (Var("s"),), "float")


@pytest.mark.parametrize("text", ["", "x", "s add:0,1", "s sin:0", "=", "=zero", "[q0:", "s  s"])
def test_other_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="text must be an expression written by to_text"):
        from_text(text)
