"""Score modifiers and dropout as objects: constructors, order, errors, structure and text, derivatives."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import kilat.math as km
from kilat.dropout import Dropout
from kilat.scores import Alibi, Bias, Score, ScoreModifier, Softcap, in_order
from kilat.structure import SLOT
from kilat.symbolic import Const, Traced, Var, evaluate

SLOPES = torch.tensor([0.5, 0.25])
TABLE = torch.randn(2, 5)


def relative(s: Any, b: Any, h: Any, q_pos: Any, j: Any, t: Any) -> Any:
    return s + t[h, km.abs(q_pos - j)]


ALL: list[ScoreModifier] = [
    Softcap(30.0),
    Softcap(0.1),
    Alibi(SLOPES),
    Bias(torch.zeros(3, 3)),
    Score(lambda s, b, h, q_pos, j: s * 2.0),
    Score(lambda s, b, h, q_pos, j: s * 2.0, derivative=lambda s, b, h, q_pos, j: 3.0),
    Score(relative, (TABLE,)),
]


@pytest.mark.parametrize("score", ALL, ids=lambda s: s.name)
def test_structure_text_and_pickle(score: ScoreModifier) -> None:
    structure = score.structure()
    assert all(t is SLOT for t in structure.tensors())
    assert hash(structure) == hash(score.structure())
    assert ScoreModifier.from_text(score.to_text()) == structure
    assert pickle.loads(pickle.dumps(structure)) == structure
    assert structure.with_tensors(score.tensors()) == score
    with pytest.raises(ValueError, match="tensors must be"):
        score.with_tensors((*score.tensors(), SLOPES))


def test_different_scores_differ() -> None:
    assert len({s.structure() for s in ALL}) == len({s.to_text() for s in ALL}) == len(ALL)


def test_order_of_application() -> None:
    first, second = ALL[4], ALL[6]
    softcap, alibi, bias = Softcap(2.0), Alibi(SLOPES), Bias(torch.zeros(3, 3))
    assert in_order([first, bias, second, alibi, softcap]) == (softcap, alibi, bias, first, second)
    assert in_order([second, first]) == (second, first)
    assert in_order([first, first]) == (first, first)
    assert in_order(()) == ()
    assert in_order(softcap) == (softcap,)  # type: ignore[arg-type]
    for twice in ([softcap, Softcap(3.0)], [alibi, first, alibi], [bias, bias]):
        with pytest.raises(ValueError, match=r"scores must have at most one (Softcap|Alibi|Bias); got 2"):
            in_order(twice)
    with pytest.raises(TypeError, match=r"scores must be Softcap, Alibi, Bias or Score objects .*; got type=str"):
        in_order(["softcap"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"scores must be .* goes into Bias.*; got type=Tensor$"):
        in_order([torch.zeros(3, 3)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"scores must be .*; got Softcap"):
        in_order([Softcap])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Softcap(0), ValueError, r"cap must be finite and above 0; got cap=0"),
        (lambda: Softcap(-1.0), ValueError, r"cap must be"),
        (lambda: Softcap(float("inf")), ValueError, r"cap must be"),
        (lambda: Softcap(float("nan")), ValueError, r"cap must be"),
        (lambda: Softcap("1"), TypeError, r"cap must be a number; got cap='1'"),
        (lambda: Softcap(True), TypeError, r"cap must be a number"),
        (lambda: Softcap(torch.tensor(1.0)), TypeError, r"cap must be a number"),
        (
            lambda: Alibi(torch.zeros(1, 1, 1)),
            ValueError,
            r"slopes must be \[heads\] or \[batch, heads\]; got .*1, 1, 1",
        ),
        (lambda: Alibi(torch.zeros(2, dtype=torch.int32)), TypeError, r"slopes must be float16 or .* got .*int32"),
        (lambda: Alibi(["a"]), TypeError, r"slopes must hold numbers"),
        (lambda: Alibi(0.5), TypeError, r"slopes must be a tensor or an array; got float"),
        (lambda: Bias(torch.zeros(2, 2, dtype=torch.bool)), TypeError, r"bias must be float16 or .* got .*bool"),
        (lambda: Bias(None), TypeError, r"bias must be a tensor or an array; got NoneType"),
        (lambda: Bias(torch.zeros((1,) * 5)), ValueError, r"bias must have at most 4 axes"),
        (lambda: Score(lambda s, *_: s > 0), TypeError, r"must return a float; got a bool"),
        (lambda: Score(lambda s, *_: None), TypeError, r"may only combine traced values"),
        (lambda: Score(lambda s: s), TypeError, r"fn must take \(s, b, h, q_pos, j\)"),
        (lambda: Score(lambda s, *_: s if s > 0 else 0.0), TypeError, r"kilat.math.where"),
        (lambda: Score(lambda s, *_: s // 1), TypeError, r"no useful derivative; give derivative="),
        (lambda: Score(lambda s, *_: s, derivative=lambda s: 1.0), TypeError, r"fn must take"),
        (lambda: Score(lambda s, *_: s, derivative=lambda s, *_: s > 0), TypeError, r"must return a float"),
        (lambda: Score(3), TypeError, r"fn must be callable; got 3"),
    ],
)
def test_wrong_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_tensors_must_fit_the_call() -> None:
    for slopes in (SLOPES, SLOPES[None], SLOPES.expand(3, 2)):
        Alibi(slopes).check(3, 2, 5, 7)
    with pytest.raises(
        ValueError, match=r"slopes must be \[num_heads_q=4\] or \[batch=3, num_heads_q=4\]; got .*\(2,\)"
    ):
        Alibi(SLOPES).check(3, 4, 5, 7)
    for shape in ((5, 7), (1, 7), (2, 1, 7), (3, 2, 5, 7), (1,)):
        Bias(torch.zeros(shape)).check(3, 2, 5, 7)
    for shape in ((7, 5), (4, 5, 7), (2, 2, 5, 7), (5, 6)):
        with pytest.raises(ValueError, match=r"bias must be broadcastable to \[batch=3, num_heads_q=2, seqlen_q=5"):
            Bias(torch.zeros(shape)).check(3, 2, 5, 7)
    Bias(torch.zeros(6, 8)).check(3, 2, 5, 7, exact=False)
    with pytest.raises(ValueError, match="bias must be"):
        Bias(torch.zeros(6, 6)).check(3, 2, 5, 7, exact=False)


def test_a_bias_stays_a_view_with_its_gradient() -> None:
    bias = torch.zeros(3, 3, requires_grad=True)
    (view,) = Bias(bias).tensors()
    assert view.shape == (1, 1, 3, 3)
    assert view.data_ptr() == bias.data_ptr()
    (view * 2).sum().backward()
    assert torch.equal(bias.grad, torch.full((3, 3), 2.0))


def test_softcap_and_its_derivative() -> None:
    cap = Softcap(3.0)
    s = np.linspace(-20, 20, 41)
    np.testing.assert_allclose(cap.forward(s), 3.0 * np.tanh(s / 3.0))
    x = torch.tensor(s, requires_grad=True)
    cap.forward(x).sum().backward()
    np.testing.assert_allclose(cap.derivative(s), x.grad.numpy(), atol=1e-12)
    assert repr(cap.forward(Traced(Var("s"))).expr) == "mul(3.0, tanh(div(s, 3.0)))"


def test_alibi() -> None:
    assert Alibi.forward(1.0, 0.5, np.array([3, 3]), np.array([1, 5])).tolist() == [0.0, 0.0]
    assert Alibi([0.5, 0.25]).tensors()[0].dtype == np.float32


def test_a_score_has_its_function_derivative_and_partials() -> None:
    score = Score(lambda s, b, h, q, j, t: km.tanh(s) * t[h, j], (TABLE,))
    env = {"s": np.array([0.3, -1.0]), "h": np.array([0, 1]), "j": np.array([4, 2])}
    t = TABLE.numpy().astype(np.float64)
    np.testing.assert_allclose(evaluate(score.expr, env, [t]), np.tanh(env["s"]) * t[env["h"], env["j"]])
    np.testing.assert_allclose(evaluate(score.d_expr, env, [t]), (1 - np.tanh(env["s"]) ** 2) * t[env["h"], env["j"]])
    ((load, slope),) = score.partials()
    assert (load.tensor, load.indices) == (0, (Var("h"), Var("j")))
    np.testing.assert_allclose(evaluate(slope, env, [t]), np.tanh(env["s"]))
    assert score.unique is False


def test_a_derivative_of_a_user_is_taken() -> None:
    score = Score(lambda s, *_: s // 1, derivative=lambda s, *_: 1)
    assert score.d_expr is Const(1.0)
    assert Score(lambda s, b, h, q, j: j).expr.kind == "float"


def test_functions_may_read_tensors_from_the_scope_around() -> None:
    inside = Score(relative, (TABLE,))
    around = Score(lambda s, b, h, q_pos, j: s + TABLE[h, km.abs(q_pos - j)], (TABLE,))
    assert around == inside
    assert around.to_text() == inside.to_text()


def test_torch_compile_follows_scores() -> None:
    torch._dynamo.reset()

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        scores = in_order([Score(lambda s, b, h, q, j, t: s * t[h], (x,)), Bias(x[None]), Alibi(x), Softcap(5.0)])
        for score in scores:
            score.check(1, 4, 1, 4)
        return sum(t.sum() for s in scores for t in s.tensors()) * Dropout(0.5).p, "".join(
            [s.to_text() for s in scores]
        )

    x = torch.ones(4)
    total, text = torch.compile(fn, backend="eager", fullgraph=True)(x)
    assert (total, text) == fn(x)


def test_dropout_arguments() -> None:
    assert (Dropout(0).p, Dropout(1).p, Dropout(np.float32(0.5)).p) == (0.0, 1.0, 0.5)
    plain = Dropout(0.25)
    assert (plain.generator, plain.seed, plain.offset, plain.keep) == (None, None, None, None)
    assert Dropout(0.1, seed=2**64 - 1, offset=-1).seed == 2**64 - 1
    seed = torch.tensor(3)
    assert Dropout(0.1, seed=seed, offset=seed).offset is seed
    keep = torch.ones(3, 4, dtype=torch.bool)
    dropout = Dropout(0.1, keep=keep)
    assert dropout.keep.shape == (1, 1, 3, 4)
    dropout.check(2, 2, 3, 4)
    with pytest.raises(ValueError, match=r"keep must be broadcastable to \[batch=2, num_heads_q=2, seqlen_q=4"):
        dropout.check(2, 2, 4, 4)
    with pytest.raises(AttributeError):
        dropout.p = 0.3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Dropout(-0.1), ValueError, r"p must be between 0 and 1; got p=-0.1"),
        (lambda: Dropout(1.0001), ValueError, r"p must be between 0 and 1"),
        (lambda: Dropout(float("nan")), ValueError, r"p must be between 0 and 1"),
        (lambda: Dropout("0.5"), TypeError, r"p must be a number; got p='0.5'"),
        (lambda: Dropout(True), TypeError, r"p must be a number"),
        (lambda: Dropout(torch.tensor(0.5)), TypeError, r"p must be a number"),
        (lambda: Dropout(0.5, seed=1.0), TypeError, r"seed must be an int or a 0-d int64 tensor; got seed=1.0"),
        (lambda: Dropout(0.5, seed=2**64), ValueError, r"seed must fit 64 bits"),
        (
            lambda: Dropout(0.5, seed=torch.zeros(1, dtype=torch.int64)),
            ValueError,
            r"seed must be .* got seed.shape=\(1,\)",
        ),
        (lambda: Dropout(0.5, seed=1, offset=torch.tensor(1.0)), TypeError, r"offset must be int64"),
        (lambda: Dropout(0.5, offset=1), ValueError, r"offset needs a seed"),
        (lambda: Dropout(0.5, seed=1, generator=torch.Generator()), ValueError, r"must not both be given"),
        (lambda: Dropout(0.5, keep=torch.ones(2, 2)), TypeError, r"keep must be bool; got keep.dtype=torch.float32"),
        (lambda: Dropout(0.5, keep=np.ones((2, 2), bool), seed=1), ValueError, r"keep must not be combined"),
    ],
)
def test_wrong_dropout_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
