"""Every wrong argument raises before anything runs, and the message names it, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kilat
from kilat.planning import clear


def make(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    given = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 6)} | shapes
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in given.items()}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(**changes: Any) -> Any:
    return kilat.attention(**({"backend": "reference"} | make() | changes))


DENSE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": None}, TypeError, "q must be a torch tensor; got type=NoneType"),
    ({"k": [1.0]}, TypeError, r"k must be a torch tensor \(torch.tensor makes one\); got type=list"),
    (
        {"q": torch.zeros(2, 5, 4)},
        ValueError,
        r"q must be \[batch, seqlen_q, num_heads_q, head_dim\]; got shape=\[2, 5, 4\]",
    ),
    ({"v": torch.zeros(7, 2, 6)}, ValueError, r"v must be \[batch, seqlen_kv, num_heads_kv, head_dim_v\]"),
    (
        {"k": torch.zeros(2, 7, 2, 8, dtype=torch.float16)},
        TypeError,
        "q=torch.float32, k=torch.float16, v=torch.float32",
    ),
    (make(torch.int64), TypeError, "q must be float16, bfloat16, float32, float64; got dtype=torch.int64"),
    (make(torch.complex64), TypeError, "got dtype=torch.complex64"),
    ({"k": torch.zeros(3, 7, 2, 8), "v": torch.zeros(3, 7, 2, 6)}, ValueError, "q and k must have the same batch"),
    ({"v": torch.zeros(2, 6, 2, 6)}, ValueError, "k and v must have the same seqlen_kv"),
    ({"v": torch.zeros(2, 7, 1, 6)}, ValueError, "k and v must have the same num_heads_kv"),
    ({"k": torch.zeros(2, 7, 2, 7)}, ValueError, "q and k must have the same head_dim"),
    (
        make(q=(1, 1, 32, 4), k=(1, 1, 6, 4), v=(1, 1, 6, 4)),
        ValueError,
        "num_heads_kv must divide num_heads_q; got num_heads_q=32, num_heads_kv=6",
    ),
    (
        make(q=(1, 8, 50, 4), k=(1, 8, 60, 4), v=(1, 8, 60, 4)),
        ValueError,
        r"num_heads_q \(axes are .* x.transpose\(1, 2\) .*\); got num_heads_q=50, num_heads_kv=60",
    ),
    (make(q=(2, 5, 0, 8)), ValueError, "num_heads_q and num_heads_kv must be at least 1"),
    (make(q=(2, 5, 4, 513), k=(2, 7, 2, 513)), ValueError, "head_dim must be from 1 to 512; got head_dim=513"),
    (make(v=(2, 7, 2, 513)), ValueError, "head_dim_v must be from 1 to 512; got head_dim_v=513"),
    (make(q=(2, 5, 4, 0), k=(2, 7, 2, 0)), ValueError, "head_dim must be from 1 to 512; got head_dim=0"),
    ({"k": torch.zeros(2, 7, 2, 8, device="meta")}, ValueError, "k must be on q's device cpu; got device=meta"),
    ({"q": torch.zeros(2, 5, 4, 8).to_sparse()}, TypeError, "q must be a strided tensor; got layout=torch.sparse_coo"),
    ({"mask": "causal"}, TypeError, "mask must be a kilat mask or None .*; got type=str"),
    ({"mask": torch.ones(5, 7, dtype=torch.bool)}, TypeError, "goes into Dense"),
    ({"mask": torch.zeros(5, 7)}, TypeError, r"goes into scores=\[kilat.Bias\(...\)\]\); got type=Tensor"),
    ({"mask": kilat.Causal}, TypeError, r"an object, Causal\(...\), and not the class"),
    ({"mask": lambda b, h, q_pos, j: j <= q_pos}, TypeError, "goes into Predicate"),
    (
        {"mask": kilat.Dense(torch.ones(4, 7, dtype=torch.bool))},
        ValueError,
        r"broadcastable .* got mask.shape=\(1, 1, 4, 7\)",
    ),
    ({"mask": kilat.Prefix(ints(1, 2, 3))}, ValueError, "lengths"),
    ({"mask": kilat.KeyRange(ints(1), ints(2))}, ValueError, "start"),
    ({"mask": kilat.Documents(ints(1, 2, 3))}, ValueError, "ids"),
    ({"scores": kilat.Dropout(0.5)}, TypeError, "scores must be a sequence"),
    ({"scores": ("softcap",)}, TypeError, "scores must be Softcap, Alibi, Bias or Score"),
    ({"scores": (kilat.Softcap(1.0), kilat.Softcap(2.0))}, ValueError, "at most one Softcap; got 2"),
    ({"scores": (kilat.Bias(torch.zeros(6, 7)),)}, ValueError, r"bias must broadcast .* got shape=\[1, 1, 6, 7\]"),
    ({"scores": (kilat.Bias(torch.zeros(5, 7, dtype=torch.float64)),)}, TypeError, "bias must be float32 or q's dtype"),
    ({"scores": (kilat.Alibi(torch.zeros(3)),)}, ValueError, "slopes must be .*num_heads_q=4"),
    ({"scores": (kilat.Alibi(torch.zeros(3, 4)),)}, ValueError, "slopes must be"),
    ({"scores": (kilat.Alibi(torch.zeros(4, requires_grad=True)),)}, ValueError, "slopes are constants"),
    ({"sink": torch.zeros(3)}, ValueError, r"sink must be \[num_heads_q\]; got num_heads_q=4, shape=\[3\]"),
    ({"sink": torch.zeros(4, dtype=torch.float64)}, TypeError, "sink must be float32 or q's dtype torch.float32"),
    ({"sink": 1.0}, TypeError, "sink must be a torch tensor"),
    ({"sink": np.zeros(4)}, TypeError, r"sink must be a torch tensor \(torch.from_numpy makes one\)"),
    ({"scale": float("nan")}, ValueError, "scale must be finite; got scale=nan"),
    ({"scale": "1"}, TypeError, "scale must be a number or None; got type=str"),
    ({"scale": True}, TypeError, "scale must be a number or None; got type=bool"),
    ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a number or None; got type=Tensor"),
    ({"dropout": 0.5}, TypeError, "dropout must be a Dropout or None; got type=float"),
    ({"dropout": kilat.Dropout(0.5, keep=torch.ones(6, 7, dtype=torch.bool))}, ValueError, "keep must broadcast"),
    ({"seqlens_q": torch.tensor([1, 2])}, TypeError, r"seqlens_q must be int32 .*; got dtype=torch.int64"),
    ({"seqlens_q": ints(1)}, ValueError, r"seqlens_q must be \[batch\] = \[2\]; got shape=\[1\]"),
    ({"seqlens_q": ints(1, 6)}, ValueError, r"seqlens_q must be from 0 to seqlen_q; got seqlens_q\[1\]=6, seqlen_q=5"),
    ({"seqlens_kv": ints(-1, 6)}, ValueError, r"got seqlens_kv\[0\]=-1, seqlen_kv=7"),
    ({"return_lse": 1}, TypeError, "return_lse must be True or False; got type=int"),
    ({"deterministic": None}, TypeError, "deterministic must be True or False"),
    ({"out_dtype": torch.bfloat16}, ValueError, "out_dtype must be None, torch.float32"),
    ({"out_dtype": "float32"}, ValueError, "out_dtype must be"),
    ({"backend": 3}, TypeError, "backend must be a name or 'auto'"),
    ({"backend": "fast"}, ValueError, "got backend='fast'"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), DENSE, ids=[message[:40] for _, _, message in DENSE])
def test_dense(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    for _ in "ab":  # the second time nothing has been remembered that lets it pass
        with pytest.raises(kind, match=message):
            call(**changes)


def ragged(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "q": torch.zeros(6, 4, 8),
        "k": torch.zeros(9, 2, 8),
        "v": torch.zeros(9, 2, 8),
        "cu_seqlens_q": ints(0, 2, 6),
        "cu_seqlens_kv": ints(0, 4, 9),
        "backend": "reference",
    }
    return kilat.ragged_attention(**(given | changes))


RAGGED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(1, 6, 4, 8)}, ValueError, r"q must be \[total_q, num_heads_q, head_dim\]"),
    ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be a torch tensor"),
    ({"cu_seqlens_kv": None}, TypeError, "cu_seqlens_kv must be a torch tensor"),
    ({"cu_seqlens_q": ints()}, ValueError, r"cu_seqlens_q must be int32 \[batch \+ 1\]"),
    ({"cu_seqlens_q": torch.tensor([0, 2, 6])}, TypeError, "cu_seqlens_q must be int32"),
    ({"cu_seqlens_kv": ints(0, 9)}, ValueError, r"cu_seqlens_kv must be \[batch \+ 1\] = \[3\]; got shape=\[2\]"),
    ({"cu_seqlens_q": ints(1, 2, 6)}, ValueError, r"cu_seqlens_q must start at 0; got cu_seqlens_q\[0\]=1"),
    ({"cu_seqlens_q": ints(0, 4, 2)}, ValueError, r"must never decrease; got cu_seqlens_q\[1\]=4, cu_seqlens_q\[2\]=2"),
    (
        {"cu_seqlens_kv": ints(0, 4, 10)},
        ValueError,
        r"must end at total_kv or before; got cu_seqlens_kv\[-1\]=10, total_kv=9",
    ),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0; got max_seqlen_q=-1"),
    ({"max_seqlen_kv": 2.0}, TypeError, "max_seqlen_kv must be an integer or None; got type=float"),
    ({"batch_invariant": 0}, TypeError, "batch_invariant must be True or False"),
    ({"scores": (kilat.Bias(torch.zeros(3, 9)),)}, ValueError, "bias"),
    ({"mask": kilat.Dense(torch.ones(4, 4, dtype=torch.bool))}, ValueError, "mask"),
    (
        {"dropout": kilat.Dropout(0.1, keep=torch.ones(2, 5, dtype=torch.bool))},
        ValueError,
        r"keep must reach .*\[4, 5\]",
    ),
    ({"scores": (kilat.Bias(torch.zeros(3, 1, 4, 5)),)}, ValueError, "bias must broadcast"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), RAGGED, ids=[message[:40] for _, _, message in RAGGED])
def test_ragged(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    for _ in "ab":
        with pytest.raises(kind, match=message):
            ragged(**changes)


def test_good_calls_pass() -> None:
    call()
    ragged()
    ragged(scores=(kilat.Bias(torch.zeros(1, 9)),), mask=kilat.Dense(torch.ones(4, 5, dtype=torch.bool)))
    ragged(cu_seqlens_q=ints(0, 0, 0), cu_seqlens_kv=ints(0, 9, 9))
    call(seqlens_q=ints(0, 5), seqlens_kv=ints(7, 0))
    call(scale=0)
    call(scale=-1.5)
    call(scores=[kilat.Softcap(1.0)])


def test_values_are_checked_on_every_call() -> None:
    clear()
    offsets = ints(0, 2, 6)
    ragged(cu_seqlens_q=offsets)
    offsets[1] = 7
    with pytest.raises(ValueError, match="never decrease"):
        ragged(cu_seqlens_q=offsets)
    lengths = ints(3, 3)
    call(seqlens_kv=lengths)
    lengths[0] = 8
    with pytest.raises(ValueError, match=r"seqlens_kv\[0\]=8"):
        call(seqlens_kv=lengths)


def paged(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "k_pages": torch.zeros(4, 4, 2, 8),
        "v_pages": torch.zeros(4, 4, 2, 8),
        "page_table": ints(3, 0, 1, 2).reshape(2, 2),
        "lengths": ints(5, 2),
    }
    return kilat.PagedCache(**(given | changes))


CACHED: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    (lambda: paged(page_table=ints(3, 9, 1, 99).reshape(2, 2)), {}, ValueError, r"page_table\[0, 1\]=9, num_pages=4"),
    (lambda: paged(page_table=ints(3, 0, -1, 99).reshape(2, 2)), {}, ValueError, r"page_table\[1, 0\]=-1"),
    (lambda: paged(lengths=ints(9, 0)), {}, ValueError, r"cache.lengths\[0\]=9, capacity=8"),
    (paged, {"q": torch.zeros(2, 4, 8)}, ValueError, r"q must be \[batch, seqlen_q, num_heads_q, head_dim\]"),
    (
        paged,
        {"q": torch.zeros(3, 4, 8), "cu_seqlens_q": ints(0, 3)},
        ValueError,
        r"cu_seqlens_q must be \[batch \+ 1\]",
    ),
    (
        paged,
        {"q": torch.zeros(2, 1, 4, 8, dtype=torch.float16)},
        TypeError,
        "q=torch.float16, cache.k_pages=torch.float32",
    ),
    (paged, {"num_splits": 0}, ValueError, "num_splits must be at least 1; got num_splits=0"),
    (paged, {"num_splits": True}, TypeError, "num_splits must be an integer"),
    (paged, {"q": torch.zeros(2, 1, 3, 8)}, ValueError, "num_heads_kv must divide num_heads_q; got num_heads_q=3"),
]


@pytest.mark.parametrize(("make_cache", "changes", "kind", "message"), CACHED, ids=[m[:40] for *_, m in CACHED])
def test_cached(make_cache: Any, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"q": torch.zeros(2, 1, 4, 8), "backend": "reference"} | changes
    for _ in "ab":
        with pytest.raises(kind, match=message):
            kilat.cached_attention(cache=make_cache(), **given)


def test_unused_page_entries_may_hold_anything() -> None:
    cache = paged(page_table=ints(3, 0, 1, 2**31 - 1).reshape(2, 2))
    kilat.cached_attention(torch.zeros(2, 1, 4, 8), cache, backend="reference")


def test_slopes_may_be_parameters_where_nothing_is_recorded() -> None:
    with torch.no_grad():
        call(scores=(kilat.Alibi(torch.zeros(4, requires_grad=True)),))


def test_merge() -> None:
    out, lse = torch.zeros(2, 5, 4, 6), torch.zeros(2, 4, 5)
    for outs, lses, kind, message in (
        (out, lse, TypeError, "outs and lses must be lists"),
        ([], [], ValueError, "at least 1; got outs=0, lses=0"),
        ([out], [lse, lse], ValueError, "same length"),
        ([out, out[:1]], [lse, lse[:1]], ValueError, "one shape"),
        ([out], [lse.mT], ValueError, r"lses must be \[2, 4, 5\]"),
        ([out, out.half()], [lse, lse], TypeError, "outs must share a dtype"),
        ([out[0, 0]], [lse[0, 0]], ValueError, "one shape"),
    ):
        with pytest.raises(kind, match=message):
            kilat.merge(outs, lses)


def test_merge_of_empty_parts_and_its_gradient() -> None:
    out = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    lse = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    garbage, none = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    merged = kilat.merge([garbage, out], [none, lse])
    torch.testing.assert_close(merged, (out, lse))
    grads = torch.autograd.grad(merged[0].sum() + merged[1].sum(), (out, lse))
    torch.testing.assert_close(grads, (torch.ones_like(out), torch.ones_like(lse)))
    zero, empty = kilat.merge([garbage, garbage], [none, none])
    assert (zero == 0).all()
    assert (empty == -torch.inf).all()

    def f(*parts: torch.Tensor) -> Any:
        return kilat.merge(parts[:3], parts[3:])

    parts = [torch.randn(2, 1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weights = [torch.randn(2, 2, 1, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(f, (*parts, *weights))
    flat = kilat.merge([p[0] for p in parts], [w[0] for w in weights])
    torch.testing.assert_close(flat, tuple(x[0] for x in f(*parts, *weights)))
