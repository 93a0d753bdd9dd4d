"""Calls whose plan is found by a guard: the ordinary way is not gone, and never wrongly so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import kilat
from kilat import autograd, functorch, gather, planning, shortcut

SHAPE = (2, 63, 4, 16)
MASK = kilat.Causal()


@pytest.fixture(autouse=True)
def lookups() -> Iterator[mock.Mock]:
    """How often a plan was looked up the ordinary way; nothing is known at first."""
    planning.clear()
    shortcut.clear()
    with mock.patch.object(autograd, "lookup", side_effect=autograd.lookup) as found:
        yield found
    shortcut.clear()


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Random tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def dense(q: Any, k: Any, v: Any, **more: Any) -> Any:
    """A plain call."""
    return kilat.attention(q, k, v, **({"mask": MASK} | more))


def known(call: Callable[[], Any], lookups: mock.Mock) -> None:
    """Calls until the ordinary way is not gone any more."""
    for _ in range(3):
        call()
    lookups.reset_mock()
    call()
    assert lookups.call_count == 0, "this call is not known after three"


needs_guards = pytest.mark.skipif(shortcut._guards() is None, reason="this torch has no guards that are known")


@needs_guards
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_same_results(grad: bool, return_lse: bool, ragged: bool, lookups: mock.Mock) -> None:
    """Bit by bit what the ordinary way gives, with new values, and with gradients of some operands only."""
    offsets = torch.tensor([0, 1, 63], dtype=torch.int32)
    shape = SHAPE[1:] if ragged else SHAPE

    def call(seed: int) -> list[Tensor]:
        q, k, v, dout = drawn(shape, shape, shape, shape, seed=seed)
        q.requires_grad_(grad)
        v.requires_grad_(grad)
        if ragged:
            found = kilat.ragged_attention(q, k, v, offsets, offsets, max_seqlen_q=62, return_lse=return_lse)
        else:
            found = dense(q, k, v, return_lse=return_lse)
        assert isinstance(found, tuple) is return_lse
        results = list(found) if return_lse else [found]
        if grad:
            loss = (results[0] * dout).sum() + (results[1].sum() if return_lse else 0.0)
            results += torch.autograd.grad(loss, (q, v))
        return [x.detach() for x in results]

    with mock.patch.object(planning.Plan, "check"), mock.patch.object(planning, "has_values", return_value=False):
        wanted = call(1)
        known(lambda: call(0), lookups)
        found = call(1)
    assert lookups.call_count == 0
    assert all(map(torch.equal, found, wanted))


def _noncontiguous(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "length": lambda x: x[:, :31],
    "strides": _noncontiguous,
    "dtype": lambda x: x.double(),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "parameter": torch.nn.Parameter,
    "negation": lambda x: torch.complex(-x, -x).conj().imag,
    "array": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
    "none": lambda x: None,
}


@needs_guards
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_other_tensors_go_the_ordinary_way(change: str, where: int, lookups: mock.Mock) -> None:
    """One tensor differs in one way: the result, or the error, is what it is where nothing is known."""
    tensors: list[Any] = drawn(SHAPE, SHAPE, SHAPE)
    known(lambda: dense(*tensors), lookups)
    tensors[where] = CHANGES[change](tensors[where])
    first = outcome(lambda: dense(*tensors))
    assert lookups.call_count == 1 or isinstance(first, str)
    shortcut.clear()
    planning.clear()
    again = outcome(lambda: dense(*tensors))
    assert first == again if isinstance(first, str) else torch.equal(first, again)


def outcome(call: Callable[[], Tensor]) -> Tensor | str:
    """The result, or the error's kind and text."""
    try:
        return call().detach()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@needs_guards
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("deterministic", 0), ("return_lse", 0), ("backend", ["auto"]), ("scale", True), ("mask", kilat.Causal)],
)
def test_wrong_arguments_are_still_refused(name: str, wrong: Any, lookups: mock.Mock) -> None:
    """Those too that equal a right one."""
    q, k, v = drawn(SHAPE, SHAPE, SHAPE)
    known(lambda: dense(q, k, v, scale=1.0), lookups)
    with pytest.raises(TypeError, match=name):
        dense(q, k, v, **({"scale": 1.0} | {name: wrong}))


class Noting(TorchDispatchMode):
    """A mode that looks at every operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@needs_guards
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of make_dual
def test_modes(lookups: mock.Mock) -> None:
    """What autograd, autocast, modes and transforms ask for is not passed by."""
    q, k, v = drawn(SHAPE, SHAPE, SHAPE)
    known(lambda: dense(q, k, v), lookups)
    plain = dense(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dense(q, k, v).dtype == torch.bfloat16
    with mock.patch.object(autograd, "_compiled_run", side_effect=autograd._compiled_run) as through, Noting():
        dense(q, k, v)
    assert through.call_count == 1
    grads = torch.func.grad(lambda x: dense(x, k, v).sum())(q)
    with mock.patch("kilat.functorch.run", side_effect=functorch.run) as through:
        torch.func.grad(lambda x: (x * dense(q, k, v)).sum())(
            q
        )  # none of the tensors is wrapped, but a transform is on
    assert through.call_count == 1
    mapped = torch.func.vmap(lambda x: dense(x, k, v))(torch.stack([q, 2 * q]))
    assert grads.shape == q.shape
    assert torch.allclose(mapped[0], plain, atol=1e-5)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            dense(dual, k, v)
    lookups.reset_mock()
    assert torch.equal(dense(q, k, v), plain)
    assert lookups.call_count == 0


@needs_guards
def test_grad_mode(lookups: mock.Mock) -> None:
    q, k, v = (x.requires_grad_() for x in drawn(SHAPE, SHAPE, SHAPE))
    with torch.no_grad():
        known(lambda: dense(q, k, v), lookups)
    assert dense(q, k, v).requires_grad
    known(lambda: dense(q, k, v), lookups)
    assert dense(q, k, v).requires_grad
    with torch.no_grad():
        assert not dense(q, k, v).requires_grad
    with torch.inference_mode():
        assert dense(q, k, v).is_inference()
    (first,) = torch.autograd.grad(dense(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        first.sum().backward()


@needs_guards
def test_wrapped_tensors_that_outlive_a_transform(lookups: mock.Mock) -> None:
    left: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        left.append(x * 1.0)
        return x.sum()

    q, k, v = drawn(SHAPE, SHAPE, SHAPE)
    torch.func.grad(function)(q)
    assert shortcut._twice_or_wrapped((left[0], k, v))
    assert not shortcut._twice_or_wrapped((q, k, v))
    known(lambda: dense(q, k, v), lookups)
    rest, same = ("dense", None, False, "auto"), gather._structures[MASK]  # an equal mask may have come before this one
    assert shortcut.find(same, rest, q, k, v) is not None
    assert shortcut.find(same, rest, left[0], k, v) is None


@needs_guards
def test_masks(lookups: mock.Mock) -> None:
    """An equal mask is known too, another is not, and one with tensors never."""
    q, k, v = drawn(SHAPE, SHAPE, SHAPE)
    known(lambda: dense(q, k, v, mask=kilat.Causal()), lookups)
    window, dense_mask = kilat.Window(3, 0), kilat.Dense(torch.ones(63, 63, dtype=torch.bool).tril())
    for _ in range(4):
        assert torch.allclose(dense(q, k, v, mask=dense_mask), dense(q, k, v), atol=1e-5)
        assert not torch.allclose(dense(q, k, v, mask=window), dense(q, k, v), atol=1e-5)
        assert not torch.allclose(dense(q, k, v, mask=None), dense(q, k, v), atol=1e-5)
    assert {type(entry.mask) for found in shortcut._known.values() for entry in found} <= {
        kilat.Causal, kilat.Window, type(None)
    }  # fmt: skip
    with pytest.raises(TypeError, match="mask must be"):
        dense(q, k, v, mask=kilat.Causal)


@needs_guards
def test_what_is_checked_or_copied_in_each_call(lookups: mock.Mock) -> None:
    """Values of offsets, and tensors that backends do not take as they are."""
    q, k, v = drawn(SHAPE, SHAPE, SHAPE)
    wide, wanted = torch.stack([q, q + 1], -1)[..., 0], dense(q, k, v)
    for _ in range(5):
        assert torch.equal(dense(wide, k, v), wanted)
    assert lookups.call_count == 6
    assert not shortcut._known
    offsets, wrong = torch.tensor([0, 1, 63], dtype=torch.int32), torch.tensor([0, 70, 63], dtype=torch.int32)
    for _ in range(5):
        kilat.ragged_attention(q[0], k[0], v[0], offsets, offsets)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        kilat.ragged_attention(q[0], k[0], v[0], wrong, wrong)


@needs_guards
def test_one_tensor_in_two_places(lookups: mock.Mock) -> None:
    q, k, _ = drawn(SHAPE, SHAPE, SHAPE)
    known(lambda: dense(q, k, k.clone()), lookups)
    assert torch.equal(dense(q, k, k), dense(q, k, k.clone()))


@needs_guards
def test_bounded(lookups: mock.Mock) -> None:
    """Shapes and kinds of calls are forgotten; guards of lengths that always change are seldom made."""
    q, k, v = drawn(SHAPE, SHAPE, SHAPE)
    with mock.patch.object(shortcut, "_guards", side_effect=shortcut._guards) as made:
        for n in [*range(1, 9)] * 16:
            dense(q[:, :n], k, v)
    assert made.call_count <= 8 * 5
    assert all(len(found) <= shortcut.MAX_SHAPES for found in shortcut._known.values())
    with mock.patch.object(shortcut, "MAX_SITES", 3):
        for n in range(9):
            known(lambda n=n: dense(q, k, v, scale=0.1 * n), lookups)
            assert len(shortcut._known) <= 3


def test_without_guards(lookups: mock.Mock) -> None:
    """The ordinary way, as ever, in a torch whose guards are unknown or do not tell apart."""
    q, k, v = drawn(SHAPE, SHAPE, SHAPE)
    with mock.patch.object(shortcut, "_guards", return_value=None):
        for _ in range(5):
            dense(q, k, v)
    assert lookups.call_count == 5
    shortcut._guards.cache_clear()
    with mock.patch.object(torch, "__version__", "9.9.0"):
        assert shortcut._guards() is None
    shortcut._guards.cache_clear()
    assert not shortcut._tells_apart(lambda *tensors: mock.Mock(check=lambda *tensors: True))
    assert not shortcut._tells_apart(lambda *tensors: mock.Mock(check=lambda *tensors: False))


def test_arrays(lookups: mock.Mock) -> None:
    q, k, v = (x.numpy() for x in drawn(SHAPE, SHAPE, SHAPE))
    for _ in range(4):
        assert isinstance(dense(q, k, v), np.ndarray)
    assert not shortcut._known
