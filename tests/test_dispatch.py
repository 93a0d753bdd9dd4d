"""Which backend is chosen, that none is silently replaced, and that every refusal comes with all its reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilat
from kilat.backends import registry
from kilat.backends.cpu import BACKEND as CPU
from kilat.dispatch import choose
from kilat.planning import clear


class Other:
    """A backend that does one thing and refuses the rest."""

    name = "other"

    def unsupported(self, problem: Any) -> list[str]:
        reasons: list[str] = []
        if problem.head_dim > 8:
            reasons.append(f"head_dim at most 8; got {problem.head_dim}")
        if problem.mask is not None:
            reasons.append("no masks")
        return reasons

    def forward(self, problem: Any, operands: Any) -> Any:
        from kilat import reference

        return reference.forward(problem, operands)

    def backward(self, *args: Any) -> Any:
        from kilat import reference

        return reference.backward(*args)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Other:
    backend = Other()
    monkeypatch.setattr(registry, "PREFERENCE", ("other", *registry.PREFERENCE))
    monkeypatch.setitem(registry._found, "other", backend)
    clear()
    return backend


def make(head_dim: int = 8) -> list[torch.Tensor]:
    return [torch.randn(1, 3, 2, head_dim) for _ in "qkv"]


def test_the_first_that_can_is_chosen(other: Other) -> None:
    assert kilat.explain(*make()).chosen == "other"
    report = kilat.explain(*make(16), mask=kilat.Causal())
    assert report.reasons["other"] == ("head_dim at most 8; got 16", "no masks")
    assert report.chosen != "other"
    assert choose(kilat.explain(*make()).problem) is other


def test_asked_for_by_name_it_raises_with_every_reason(other: Other) -> None:
    with pytest.raises(kilat.UnsupportedError, match=r"head_dim at most 8; got 16, no masks"):
        kilat.attention(*make(16), mask=kilat.Causal(), backend="other")
    assert isinstance(kilat.UnsupportedError(""), NotImplementedError)


def test_unknown_and_missing_backends() -> None:
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*; got backend='flash'"):
        kilat.attention(*make(), backend="flash")
    with pytest.raises(ValueError, match="got backend='flash'"):
        kilat.explain(*make(), backend="flash")
    report = kilat.explain(*make())
    assert set(report.reasons) == set(registry.names())
    for name in registry.PREFERENCE:
        if isinstance(registry.get(name), str):
            assert report.reasons[name]
            with pytest.raises(kilat.UnsupportedError, match=name):
                kilat.attention(*make(), backend=name)


def test_reference_is_never_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    clear()
    monkeypatch.setattr(CPU, "unsupported", lambda problem: ["not today"])
    assert kilat.explain(*make()).chosen is None
    with pytest.raises(kilat.UnsupportedError, match="cpu: not today"):
        kilat.attention(*make())
    assert kilat.explain(*make(), backend="reference").chosen == "reference"


def test_explain_reads_like_a_table() -> None:
    text = str(kilat.explain(*make(), mask=kilat.Causal(), backend="reference"))
    assert "dense-float32-b1-q3-kv3-h2-2-d8-8-causal" in text
    assert "backend='reference' chooses reference" in text
    assert "gluon" in text


def test_explain_knows_ragged_calls_and_gradients() -> None:
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    q, k, v = (x[0].requires_grad_() for x in make())
    problem = kilat.explain(q, k.detach(), v, cu, cu, backend="reference").problem
    assert (problem.layout, problem.batch, problem.grad_of) == ("ragged", 2, {"q", "v"})


def test_the_cpu_backend_refuses_other_devices() -> None:
    problem = kilat.explain(*(x.to("meta") for x in make()), backend="reference").problem
    assert CPU.unsupported(problem) == ["the cpu backend works on CPU tensors; got device='meta'"]


def test_registering_a_backend() -> None:
    backend = Other()
    backend.name = "mine"
    registry.register("mine", backend)
    try:
        out = kilat.attention(*make(), backend="mine")
        assert out.shape == (1, 3, 2, 8)
        assert kilat.explain(*make()).chosen != "mine"
        with pytest.raises(ValueError, match="must differ from"):
            registry.register("mine", backend)
    finally:
        del registry.BY_NAME_ONLY["mine"], registry._found["mine"]
        clear()
