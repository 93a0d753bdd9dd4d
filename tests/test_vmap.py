"""vmap equals a loop: whatever is batched, in every nesting with grad, in the operators too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BACKENDS

import kilat
from kilat import compiled
from kilat.backends import registry
from kilat.planning import PLAIN
from kilat.problem import Options

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

N = 3


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def compare(f: Any, args: tuple[torch.Tensor, ...], dims: tuple[int | None, ...]) -> None:
    """vmap of f, and of its gradients, against a loop."""

    def loss(*xs: Any) -> Any:
        return f(*xs).square().sum()

    floats = tuple(n for n, x in enumerate(args) if x.is_floating_point())
    for g in (f, torch.func.grad(loss, argnums=floats)):
        got = torch.func.vmap(g, in_dims=dims)(*args)
        each = [[x if d is None else x.select(d, n) for x, d in zip(args, dims, strict=True)] for n in range(N)]
        results = [g(*xs) for xs in each]
        if isinstance(got, tuple):
            wanted = tuple(torch.stack(group) for group in zip(*results, strict=True))
        else:
            wanted = torch.stack(results)
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (1, 2, 0), (-1, None, 3), (None, None, 0)])
def test_q_k_v(backend: str, dims: tuple[int | None, ...]) -> None:
    shapes = ((2, 3, 4, 5), (2, 4, 2, 5), (2, 4, 2, 3))
    args = [draw(*s) if d is None else draw(N, *s).movedim(0, d) for s, d in zip(shapes, dims, strict=True)]

    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q, k, v, mask=kilat.Causal(), scores=(kilat.Softcap(3.0),), backend=backend)

    compare(f, tuple(args), dims)


def qkv(batched: bool = True) -> tuple[torch.Tensor, ...]:
    shapes = ((2, 3, 4, 5), (2, 4, 2, 5), (2, 4, 2, 3))
    return tuple(draw(*((N,) if batched else ()), *s) for s in shapes)


@pytest.mark.parametrize("shape", [(3, 4), (1, 1, 3, 4), (2, 4, 3, 4), (4, 1, 1)])
@pytest.mark.parametrize("dim", [None, 0])
def test_bias(backend: str, shape: tuple[int, ...], dim: int | None) -> None:
    def f(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return kilat.attention(q, k, v, scores=(kilat.Bias(bias),), backend=backend)

    compare(f, (*qkv(), draw(*shape) if dim is None else draw(N, *shape)), (0, 0, 0, dim))


@pytest.mark.parametrize("dim", [None, 0])
def test_sink(backend: str, dim: int | None) -> None:
    def f(q: Any, k: Any, v: Any, sink: Any) -> Any:
        return kilat.attention(q, k, v, sink=sink, backend=backend)

    compare(f, (*qkv(), draw(4) if dim is None else draw(N, 4)), (0, 0, 0, dim))


def test_lengths_and_mask_tensors(backend: str) -> None:
    lengths = torch.tensor([[4, 2], [0, 3], [1, 4]], dtype=torch.int32)
    dense = draw(N, 3, 4) > 0

    def padded(q: Any, k: Any, v: Any, n: Any) -> Any:
        return kilat.attention(q, k, v, seqlens_kv=n, backend=backend)

    def ranges(q: Any, k: Any, v: Any, n: Any) -> Any:
        mask = kilat.KeyRange(torch.zeros(2, dtype=torch.int32), n)
        return kilat.attention(q, k, v, mask=mask, backend=backend)

    def pairs(q: Any, k: Any, v: Any, shown: Any) -> Any:
        return kilat.attention(q, k, v, mask=kilat.Dense(shown), backend=backend)

    for f, extra in ((padded, lengths), (ranges, lengths), (pairs, dense)):
        compare(f, (*qkv(), extra), (0, 0, 0, 0))
        compare(f, (*qkv(), extra[0]), (0, 0, 0, None))


def test_shared_tensors_of_the_batch(backend: str) -> None:
    slopes = torch.rand(2, 4, dtype=torch.float64)

    def f(q: Any, k: Any, v: Any) -> Any:
        score = kilat.Score(lambda s, b, h, q_pos, j: s + b * 0.5)
        return kilat.attention(q, k, v, scores=(kilat.Alibi(slopes), score), backend=backend)

    compare(f, qkv(), (0, 0, 0))


def test_ragged(backend: str) -> None:
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)

    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.ragged_attention(q, k, v, cu, cu, mask=kilat.Causal(), backend=backend)

    compare(f, (draw(N, 5, 4, 3), draw(N, 5, 2, 3), draw(N, 5, 2, 3)), (0, 0, 0))


def test_one_call_where_that_says_the_same(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    target = registry.get(backend)
    original = target.forward
    monkeypatch.setattr(target, "forward", lambda p, o: (calls.append(p.batch), original(p, o))[1])

    def f(q: Any, k: Any, v: Any, sink: Any, bias: Any) -> Any:
        more: dict[str, Any] = {"sink": sink, "scores": (kilat.Bias(bias),), "mask": kilat.Window(2, 2)}
        return kilat.attention(q, k, v, **more, backend=backend)

    sink, bias = draw(4), draw(3, 4)
    torch.func.vmap(f, in_dims=(0, 0, 0, None, None))(*qkv(), sink, bias)
    assert calls == [2 * N]
    torch.func.vmap(f, in_dims=(0, 0, 0, 0, None))(*qkv(), draw(N, 4), bias)
    assert calls == [2 * N] + [2] * N


def test_nested(backend: str) -> None:
    q, k, v = draw(2, N, 1, 3, 2, 4), draw(2, 1, 3, 2, 4), draw(N, 1, 3, 2, 4)

    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q, k, v, backend=backend)

    got = torch.func.vmap(torch.func.vmap(f, in_dims=(0, None, 0)), in_dims=(0, 0, None))(q, k, v)
    wanted = torch.stack([torch.stack([f(q[a, n], k[a], v[n]) for n in range(N)]) for a in range(2)])
    torch.testing.assert_close(got, wanted)


def test_dropout_needs_a_choice_of_randomness(backend: str) -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q, k, v, dropout=kilat.Dropout(0.5), backend=backend)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(f)(*qkv())
    args = [x[:1].expand_as(x) for x in qkv()]
    same = torch.func.vmap(f, randomness="same")(*args)
    assert torch.equal(same[0], same[1])
    different = torch.func.vmap(f, randomness="different")(*args)
    assert not torch.equal(different[0], different[1])


def test_no_entries(backend: str) -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q, k, v, backend=backend)

    assert torch.func.vmap(f)(*(x[:0] for x in qkv())).shape == (0, 2, 3, 4, 3)


def test_the_operators(backend: str) -> None:
    options = Options("dense", kilat.Causal(), backend=backend)
    rest = (compiled.spec_of(options, PLAIN, True), 0.0, 0.0, compiled.NO_HINT, compiled.NO_HINT)

    q, k, v = (x.requires_grad_() for x in qkv())
    got = torch.func.vmap(lambda *x: compiled.forward_op(list(x), *rest)[0])(q, k, v)
    wanted = torch.stack([compiled.forward_op([q[n], k[n], v[n]], *rest)[0] for n in range(N)])
    torch.testing.assert_close(got, wanted)
    dout = torch.randn_like(got)
    found = torch.autograd.grad(got, (q, k, v), dout)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, (q, k, v), dout))


def test_per_sample_gradients(backend: str) -> None:
    torch.manual_seed(0)
    weight, x = draw(4, 12), draw(N, 6, 4)

    def loss(weight: Any, sample: Any) -> Any:
        q, k, v = (sample @ weight).unflatten(-1, (3, 2, 2)).unbind(-3)
        return kilat.attention(q[None], k[None], v[None], mask=kilat.Causal(), backend=backend).square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    torch.testing.assert_close(got, torch.stack([torch.func.grad(loss)(weight, sample) for sample in x]))
