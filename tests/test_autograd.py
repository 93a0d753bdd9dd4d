"""Gradients through every door: gradcheck, only what is asked, second and forward derivatives raise, checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BACKENDS
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import kilat
from kilat import functorch
from kilat.backends import registry
from kilat.planning import PLAIN
from kilat.problem import Operands, Options

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def make(dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    shapes = ((2, 3, 4, 5), (2, 4, 2, 5), (2, 4, 2, 3))
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_(requires_grad) for s in shapes]


def grads(loss: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def test_gradcheck_with_everything(backend: str) -> None:
    g = torch.Generator().manual_seed(3)
    bias, sink, table = (
        torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in ((4, 3, 4), (4,), (9,))
    )

    def f(q: Any, k: Any, v: Any, bias: Any, sink: Any, table: Any) -> Any:
        scores = (
            kilat.Softcap(2.0),
            kilat.Alibi(torch.tensor([0.5, 0.25, 0.125, 0.1])),
            kilat.Bias(bias),
            kilat.Score(lambda s, b, h, q_pos, j, t: s + t[q_pos - j + 4] * 0.5, tensors=(table,)),
        )
        drop = kilat.Dropout(0.3, seed=4)
        more: dict[str, Any] = {"mask": kilat.Causal(), "scores": scores, "sink": sink, "dropout": drop}
        return kilat.attention(q, k, v, return_lse=True, backend=backend, **more)

    assert torch.autograd.gradcheck(f, (*make(), bias, sink, table), fast_mode=True)


def test_gradcheck_ragged(backend: str) -> None:
    cu_q, cu_kv = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    g = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(n, h, 4, generator=g, dtype=torch.float64).requires_grad_() for n, h in ((6, 4), (6, 2), (6, 2))
    )

    def f(*qkv: Any) -> Any:
        out, lse = kilat.ragged_attention(*qkv, cu_q, cu_kv, mask=kilat.Window(2, 0), return_lse=True, backend=backend)
        return out, lse.clamp(min=-50.0)  # rows that see nothing have lse = -inf, whose differences are no numbers

    assert torch.autograd.gradcheck(f, (q, k, v), fast_mode=True)


def test_gradcheck_through_the_functorch_door(backend: str) -> None:
    options = Options("dense", kilat.Causal(), (), 0.4, backend=backend)

    def f(*qkv: Any) -> Any:
        return functorch.run(options, Operands(*qkv), PLAIN, True)

    assert torch.autograd.gradcheck(f, make(), fast_mode=True)


def test_only_what_is_asked_is_computed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[str]] = []
    target = registry.get(backend)
    original = target.backward
    monkeypatch.setattr(target, "backward", lambda p, *rest: (asked.append(p.grad_of), original(p, *rest))[1])
    q, k, v = make()
    out = kilat.attention(q, k.detach(), v.detach(), backend=backend)
    grads(out.sum(), q)
    assert asked[-1] == {"q"}
    grads(kilat.attention(q, k.detach(), v, backend=backend).sum(), q, v)
    assert asked[-1] == {"q", "v"}
    bias = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    grads(kilat.attention(q.detach(), k.detach(), v.detach(), scores=(kilat.Bias(bias),), backend=backend).sum(), bias)
    assert asked[-1] == {"bias"}


def test_lse_alone_and_lse_not_returned(backend: str) -> None:
    q, k, v = make()
    _, lse = kilat.attention(q, k, v, return_lse=True, backend=backend)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert dq.abs().sum() > 0
    assert dk.abs().sum() > 0
    assert (dv == 0).all()
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 5**-0.5
    wanted = grads(torch.logsumexp(s, -1).sum(), q, k)
    torch.testing.assert_close((dq, dk), wanted)


def test_incoming_gradients_of_any_strides(backend: str) -> None:
    q, k, v = make()
    out, lse = kilat.attention(q, k, v, return_lse=True, backend=backend)
    do, dl = torch.randn(out.shape, dtype=out.dtype), torch.randn(lse.shape, dtype=lse.dtype)
    wanted = torch.autograd.grad((out, lse), (q, k, v), (do, dl), retain_graph=True)
    far = do.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    got = torch.autograd.grad((out, lse), (q, k, v), (far, dl.mT.contiguous().mT))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_gradients_keep_their_inputs_dtypes(backend: str) -> None:
    q, k, v = make(torch.bfloat16)
    sink, bias = torch.zeros(4, requires_grad=True), torch.zeros(1, 3, 4, requires_grad=True)
    out = kilat.attention(q, k, v, sink=sink, scores=(kilat.Bias(bias),), backend=backend)
    out.float().sum().backward()
    for x in (q, k, v, sink, bias):
        assert x.grad is not None
        assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)


def test_bias_of_fewer_axes_and_expanded_bias(backend: str) -> None:
    q, k, v = make()
    do = torch.randn(2, 3, 4, 3, dtype=torch.float64)
    full = torch.randn(2, 4, 3, 4, dtype=torch.float64, requires_grad=True)
    for shape in ((4,), (3, 1), (4, 1, 4), (2, 1, 3, 4)):
        small = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        direct = kilat.attention(q, k, v, scores=(kilat.Bias(small),), backend=backend)
        (got,) = torch.autograd.grad(direct, small, do)
        expanded = kilat.attention(q, k, v, scores=(kilat.Bias(small.expand_as(full)),), backend=backend)
        (also,) = torch.autograd.grad(expanded, small, do)
        copied = kilat.attention(q, k, v, scores=(kilat.Bias(small + torch.zeros_like(full)),), backend=backend)
        (wanted,) = torch.autograd.grad(copied, small, do)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(also, wanted)


def test_no_second_derivative(backend: str) -> None:
    q, k, v = make()
    (dq,) = torch.autograd.grad(kilat.attention(q, k, v, backend=backend).square().sum(), q, create_graph=True)
    (plain,) = torch.autograd.grad(kilat.attention(q, k, v, backend=backend).square().sum(), q)
    assert torch.equal(dq, plain)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own forward mode
def test_forward_mode_raises_and_never_gives_zero(backend: str) -> None:
    q, k, v = make(requires_grad=False)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: kilat.attention(x, k, v, backend=backend), (q,), (torch.ones_like(q),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            kilat.attention(dual, k, v, backend=backend)
        kilat.attention(q, k, v, backend=backend)
    with pytest.raises(NotImplementedError, match=r"no second derivative|forward-mode"):
        torch.func.hessian(lambda x: kilat.attention(x, k, v, backend=backend).sum())(q)


def test_checkpoint_repeats_dropout(backend: str) -> None:
    q, k, v = make()

    def f(*qkv: Any) -> Any:
        return kilat.attention(*qkv, dropout=kilat.Dropout(0.5), backend=backend)

    torch.manual_seed(5)
    wanted = grads(f(q, k, v).square().sum(), q, k, v)
    torch.manual_seed(5)
    got = grads(checkpoint(f, q, k, v, use_reentrant=False).square().sum(), q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_func_grad_and_vjp(backend: str) -> None:
    q, k, v = make(requires_grad=False)

    def loss(*qkv: Any) -> Any:
        out, lse = kilat.attention(*qkv, mask=kilat.Causal(), return_lse=True, backend=backend)
        return out.square().sum() + lse.clamp(min=-9.0).sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = grads(loss(*leaves), *leaves)
    got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    torch.testing.assert_close(got, wanted)
    out, pull = torch.func.vjp(lambda x: kilat.attention(x, k, v, backend=backend), q)
    torch.testing.assert_close(
        pull(torch.ones_like(out))[0], grads(kilat.attention(leaves[0], k, v, backend=backend).sum(), leaves[0])[0]
    )
    jacobian = torch.func.jacrev(lambda x: kilat.attention(x, k, v, backend=backend)[0, 0, 0])(q)
    rows = [grads(kilat.attention(leaves[0], k, v, backend=backend)[0, 0, 0, n], leaves[0])[0] for n in range(3)]
    torch.testing.assert_close(jacobian, torch.stack(rows))


def test_hooks_may_move_saved_tensors(backend: str) -> None:
    q, k, v = make()
    wanted = grads(kilat.attention(q, k, v, backend=backend).sum(), q, k, v)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True).copy(), torch.from_numpy):
        out = kilat.attention(q, k, v, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(grads(out.sum(), q, k, v), wanted, strict=True))


def test_changed_inputs_are_noticed(backend: str) -> None:
    q, k, v = make()
    kept = k.detach().clone()
    out = kilat.attention(q, kept, v, backend=backend)
    kept.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_modules_learn(backend: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 24)
    x, target = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses: list[float] = []
    for _ in range(8):
        q, k, v = layer(x).unflatten(-1, (3, 2, 4)).unbind(2)
        loss = (kilat.attention(q, k, v, mask=kilat.Causal(), backend=backend).flatten(2) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
