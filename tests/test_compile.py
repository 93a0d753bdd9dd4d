"""torch.compile: one graph, no break, no recompile for another length, the bits of eager; the operators' contracts."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import kilat
from kilat import compiled
from kilat.planning import PLAIN
from kilat.problem import Operands, Options

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch uses what it deprecates


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def make(batch: int, seqlen_q: int, seqlen_kv: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(batch)
    shapes = ((batch, seqlen_q, 4, 8), (batch, seqlen_kv, 2, 8), (batch, seqlen_kv, 2, 6))
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]


def test_one_graph_serves_every_length() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q, k, v, mask=kilat.Causal(), backend="reference") * 2.0

    g = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((3, 5, 7), (5, 6, 9), (4, 8, 8), (7, 9, 11)):
        mine, theirs = make(*lengths), make(*lengths)
        got, want = g(*mine), f(*theirs)
        assert torch.equal(got, want)
        got.sum().backward()
        want.sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))
    assert counters["stats"]["unique_graphs"] == 1


def test_default_dynamism_compiles_twice_at_most() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q, k, v, mask=kilat.Causal(), backend="reference")

    g = torch.compile(f, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for n in (7, 9, 12, 17, 33):
            args = make(3, n, n)
            assert torch.equal(g(*args), f(*args))
    assert counters["stats"]["unique_graphs"] <= 2


MASKS = {
    "none": lambda: None,
    "top_left": lambda: kilat.Causal(align="top_left"),
    "window": lambda: kilat.Window(2, 1) & kilat.Causal(),
    "chunked": lambda: kilat.Chunked(3),
    "prefix": lambda: kilat.Prefix(torch.tensor([1, 2, 0], dtype=torch.int32)),
    "key_range": lambda: kilat.KeyRange(
        torch.tensor([1, 0, 0], dtype=torch.int32), torch.tensor([7, 3, 0], dtype=torch.int32)
    ),
    "documents": lambda: kilat.Documents(torch.tensor([0, 0, 0, 1, 1, 1, 2], dtype=torch.int32)),
    "dense": lambda: kilat.Dense(torch.arange(35).reshape(5, 7) % 3 != 0),
    "predicate": lambda: kilat.Predicate(lambda b, h, q_pos, j: (q_pos + j) % 2 == 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    def f(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return kilat.attention(q, k, v, mask=mask, scale=0.3, return_lse=True, backend="reference")

    mask, args = MASKS[name](), make(3, 5, 7)
    got, want = torch.compile(f, fullgraph=True, backend="aot_eager")(*args, mask), f(*args, mask)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def _even(b: Any, h: Any, q_pos: Any, j: Any) -> Any:
    return (q_pos - j) % 2 == 0


INSIDE: dict[str, Any] = {
    "documents": lambda ids: {"mask": kilat.Documents(ids) & kilat.Causal()},
    "prefix": lambda ids: {"mask": kilat.Prefix(ids[:3])},
    "predicate": lambda ids: {"mask": kilat.Predicate(_even)},
    "score": lambda ids: {"scores": [kilat.Score(lambda s, b, h, q_pos, j: s - 0.1 * abs(q_pos - j))]},
    "alibi": lambda ids: {"mask": kilat.Window(3, 0), "scores": (kilat.Alibi(torch.full((2,), 0.5)),)},
    "keep": lambda ids: {"dropout": kilat.Dropout(0.2, keep=torch.ones(ids.shape, dtype=torch.bool))},
}


@pytest.mark.parametrize("name", INSIDE)
def test_objects_made_inside(name: str) -> None:
    def f(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return kilat.attention(q, k, v, **INSIDE[name](ids), backend="reference")

    g = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (7, 9, 12):
        args = [torch.randn(3, n, 2, 4) for _ in "qkv"] + [torch.zeros(n, dtype=torch.int32)]
        assert torch.equal(g(*args), f(*args))
    assert counters["stats"]["unique_graphs"] == 1


def test_another_mask_is_another_result() -> None:
    def f(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return kilat.attention(q, k, v, mask=mask, backend="reference")

    g, args = torch.compile(f, fullgraph=True, backend="aot_eager"), make(3, 5, 7)
    for mask in (kilat.Window(1, 0), kilat.Window(2, 0), kilat.Window(3, 1), None, kilat.Causal()):
        assert torch.equal(g(*args, mask), f(*args, mask))


def test_scores_sink_and_their_gradients() -> None:
    def f(q: Any, k: Any, v: Any, bias: Any, sink: Any, slopes: Any) -> Any:
        scores = (kilat.Bias(bias), kilat.Softcap(3.0), kilat.Alibi(slopes))
        return kilat.attention(q, k, v, scores=scores, sink=sink, return_lse=True, backend="reference")

    def leaves() -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(9)
        return [torch.randn(s, generator=g).requires_grad_() for s in ((4, 5, 7), (4,))]

    slopes = torch.rand(4)
    mine, theirs = make(3, 5, 7) + leaves(), make(3, 5, 7) + leaves()
    got = torch.compile(f, fullgraph=True, backend="aot_eager")(*mine, slopes)
    want = f(*theirs, slopes)
    for pair in (got, want):
        (pair[0].square().sum() + pair[1].sum()).backward()
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))


def test_user_score_with_a_table() -> None:
    table = torch.randn(16).requires_grad_()
    score = kilat.Score(lambda s, b, h, q_pos, j, t: s + t[q_pos - j + 8], tensors=(table,))

    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q, k, v, scores=(score,), backend="reference")

    got = torch.compile(f, fullgraph=True, backend="aot_eager")(*make(3, 5, 7))
    want = f(*make(3, 5, 7))
    assert torch.equal(got, want)
    (a,) = torch.autograd.grad(got.square().sum(), table)
    (b,) = torch.autograd.grad(want.square().sum(), table)
    assert torch.equal(a, b)


def test_dropout_draws_from_torch() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q, k, v, dropout=kilat.Dropout(0.5), backend="reference")

    g, args = torch.compile(f, fullgraph=True, backend="aot_eager"), make(3, 5, 7)
    torch.manual_seed(3)
    first = g(*args)
    assert not torch.equal(first, g(*args))
    torch.manual_seed(3)
    assert torch.equal(first, g(*args))


def test_dropout_with_a_seed_is_the_same_as_eager() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q, k, v, dropout=kilat.Dropout(0.5, seed=2**63 + 5), backend="reference")

    args = make(3, 5, 7)
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(*args), f(*args))


def test_ragged_without_reading_offsets() -> None:
    def f(q: Any, k: Any, v: Any, cu_q: Any, cu_kv: Any) -> Any:
        return kilat.ragged_attention(q, k, v, cu_q, cu_kv, mask=kilat.Causal(), backend="reference")

    g = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for cu in ([0, 4, 9], [0, 11, 11], [0, 5, 23]):
        offsets = torch.tensor(cu, dtype=torch.int32)
        q, k, v = (torch.randn(cu[-1], n, 8) for n in (4, 2, 2))
        assert torch.equal(g(q, k, v, offsets, offsets), f(q, k, v, offsets, offsets))
    assert counters["stats"]["unique_graphs"] == 1


def test_append_and_decode() -> None:
    rotary = kilat.Rotary(torch.rand(32, 4), torch.rand(32, 4))

    def step(q: Any, k_new: Any, v_new: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        cache = kilat.PagedCache(k, v, table, lengths)
        cache.append(k_new, v_new, rotary=rotary)
        return kilat.cached_attention(q, cache, backend="reference")

    g = torch.compile(step, fullgraph=True, backend="aot_eager")
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    states = [
        [torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8), table, torch.tensor([1, 3], dtype=torch.int32)] for _ in "ab"
    ]
    for n in range(3):
        gen = torch.Generator().manual_seed(n)
        new = [torch.randn(2, 1, h, 8, generator=gen) for h in (4, 2, 2)]
        assert torch.equal(g(*new, *states[0]), step(*new, *states[1]))
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_vmap_inside() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return torch.func.vmap(lambda *x: kilat.attention(*x, backend="reference"))(q, k, v)

    args = [torch.randn(3, 2, 5, h, 4) for h in (4, 2, 2)]
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(*args), f(*args))


def test_autocast_inside() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return kilat.attention(q, k, v, backend="reference")

    args = make(3, 5, 7)
    got = torch.compile(f, fullgraph=True, backend="aot_eager")(*args)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, f(*args))


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor's CPU code needs a C++ compiler")
def test_inductor() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return kilat.attention(q * 2.0, k, v, mask=kilat.Causal(), backend="reference") + 1.0

    mine, theirs = make(3, 5, 7), make(3, 5, 7)
    got, want = torch.compile(f, fullgraph=True)(*mine), f(*theirs)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_export_keeps_the_operator() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return kilat.attention(q, k, v, mask=kilat.Causal(), backend="reference")

    args = tuple(x.detach() for x in make(3, 5, 7))
    program = torch.export.export(Layer(), args, strict=False)
    assert any("kilat.forward" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*args), Layer()(*args))


def test_fake_tensors_run_without_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(3, 5, h, 8) for h in (4, 2, 2))
        out, lse = kilat.attention(q, k, v, return_lse=True, backend="reference")
    assert out.shape == (3, 5, 4, 8)
    assert lse.shape == (3, 4, 5)


def _call(**changes: Any) -> tuple[Any, ...]:
    options = Options("dense", kilat.Causal(), (), 0.4, backend="reference")._replace(**changes)
    return compiled.spec_of(options, PLAIN, True), 0.4, 0.0, compiled.NO_HINT, compiled.NO_HINT


def test_operators_keep_their_contracts() -> None:
    tensors = make(2, 3, 5, torch.float64)
    torch.library.opcheck(compiled.forward_op, (tensors, *_call()))
    plain = [x.detach() for x in tensors]
    out, lse = compiled.forward_op(plain, *_call())
    results = [out, lse, torch.ones_like(out), torch.ones_like(lse)]
    torch.library.opcheck(compiled.backward_op, (plain, results, [0, 2], *_call()))


def test_a_spec_is_read_back_as_written() -> None:
    bias = kilat.Bias(torch.zeros(5, 7))
    options = Options(
        "dense",
        kilat.Causal() & kilat.Window(3, 0),
        (kilat.Softcap(2.0), bias.structure()),
        None,
        "philox",
        0.0,
        torch.float32,
    )
    operands = Operands(*make(2, 5, 7), score_tensors=((), (bias.bias,)))
    text = compiled.spec_of(options, operands.present(), True)
    call = compiled.call_from(text, 0.0, 0.0, compiled.NO_HINT, 5)
    assert call.options == options
    assert call.names == operands.present()
    assert (call.max_seqlen_q, call.max_seqlen_kv) == (None, 5)


def test_gradcheck_through_the_operator() -> None:
    spec = _call()
    args = make(1, 2, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda *t: compiled.forward_op(list(t), *spec), args)
