"""Every pair of options meets in some call, and every such call works on the CPU: there are no other refusals.

The complete list of refusals: gradients through caches, head_dim above 512. Each has a test below.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from cases import MASKS, QUANTISED, SCORES, Case
from helpers import BACKENDS, build, expectation

# Left out of the product, not out of the cases: their relatives are in it.
SIMILAR = {"window_self", "window_left", "window_right", "window_open", "window_wide", "window_first_beyond"}
SIMILAR |= {"chunked_one", "documents", "dense_rows", "dense_shared", "predicate", "both_causals", "prefix_chunked"}
SIMILAR |= {"alibi_batch", "bias_heads", "bias_rows", "bias_float32", "score_derivative"}

OPTIONS: dict[str, list[Any]] = {
    "layout": ["dense", "padded", "ragged", "cached", "paged"],
    "kv": ["", *QUANTISED],
    "dtype": ["float32", "float16", "bfloat16", "float64"],
    "mask": [name for name in MASKS if name not in SIMILAR],
    "scores": [name for name in SCORES if name not in SIMILAR],
    "sink": [False, True],
    "dropout": ["", "philox", "keep"],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "head_dim": [1, 16, 65],
    "head_dim_v": [None, 8, 33],
    "strides": ["contiguous", "heads_first", "sliced"],
    "out_dtype": [None, "float32"],
    "scale": [None, 0.0, -0.4],
    "deterministic": [False, True],
    "invariant": [False, True],  # batch_invariant, of ragged and cached calls
    "grad": [False, True],
}
NAMES = list(OPTIONS)


def meaningful(row: dict[str, Any]) -> bool:
    """Whether the API has such a call: caches take no dropout and no gradient, dense ones no batch_invariant."""
    layout = row.get("layout")
    if row.get("dtype") == "float64" and row.get("out_dtype") == "float32":
        return False
    forward_only = not (row.get("dropout") or row.get("grad") or row.get("deterministic"))
    if layout in ("cached", "paged") or row.get("kv"):
        return forward_only and layout in ("cached", "paged", None)
    return not (layout in ("dense", "padded") and row.get("invariant"))


def pairwise() -> list[dict[str, Any]]:
    """Rows in which every meaningful pair of option values occurs at least once (greedy, the same on every run)."""
    values = {name: range(len(OPTIONS[name])) for name in NAMES}

    def decoded(indices: dict[str, int]) -> dict[str, Any]:
        return {name: OPTIONS[name][n] for name, n in indices.items()}

    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(NAMES, 2)
        for x in values[a]
        for y in values[b]
        if meaningful(decoded({a: x, b: y}))
    }
    rng, rows = random.Random(0), []
    while missing:
        row = dict(min(missing))
        for name in rng.sample([n for n in NAMES if n not in row], len(NAMES) - 2):
            choices = [n for n in values[name] if meaningful(decoded(row | {name: n}))]
            rng.shuffle(choices)
            row[name] = max(choices, key=lambda n, name=name: _new_pairs(row, name, n, missing))
        found = {pair for pair in itertools.combinations([(name, row[name]) for name in NAMES], 2) if pair in missing}
        missing -= found
        rows.append(decoded(row))
    return rows


def _new_pairs(row: dict[str, int], name: str, value: int, missing: set[Any]) -> int:
    """How many missing pairs a value adds to a row."""
    order = NAMES.index
    return sum(
        (((other, x), (name, value)) if order(other) < order(name) else ((name, value), (other, x))) in missing
        for other, x in row.items()
    )


ROWS = pairwise()


def case_of(row: dict[str, Any], number: int) -> Case:
    options = {name: row[name] for name in NAMES if name not in ("deterministic", "invariant", "grad")}
    lengths: dict[str, Any] = {"lengths_q": (5, 0, 20), "lengths_kv": (9, 3, 33)}
    if row["layout"] == "dense":
        lengths = {}
    elif row["layout"] in ("cached", "paged"):
        lengths = {"lengths_kv": (20, 35, 0)}
    return Case(f"product-{number}", batch=3, seqlen=(20, 35), **lengths, **options)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_pair_works_on_the_cpu(number: int) -> None:
    row = ROWS[number]
    case = case_of(row, number)
    call = build(case)
    more = {} if case.cached else {"deterministic": row["deterministic"]}
    if case.cached or case.layout == "ragged":
        more["batch_invariant"] = row["invariant"]
    wanted = expectation(call, backward=row["grad"])
    if row["grad"]:
        out, lse, grads = call.gradients("cpu", **more)
        wanted.check({"out": out, "lse": lse} | grads)
    else:
        out, lse = call.run("auto", **more)
        wanted.check({"out": out, "lse": lse})


def test_every_pair_is_there() -> None:
    """The rows cover what they promise."""
    met = {pair for row in ROWS for pair in itertools.combinations([(n, str(row[n])) for n in NAMES], 2)}
    for a, b in itertools.combinations(NAMES, 2):
        for x, y in itertools.product(OPTIONS[a], OPTIONS[b]):
            if meaningful({a: x, b: y}):
                assert ((a, str(x)), (b, str(y))) in met


@pytest.mark.parametrize("backend", BACKENDS)
def test_refusal_of_gradients_through_caches(backend: str) -> None:
    call = build(Case("refused", "cached", lengths_kv=(3, 5), seqlen=(1, 32)))
    call.k.requires_grad_()
    with pytest.raises(ValueError, match="forward only"):
        call.run(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dims", [(513, 8), (8, 513)])
def test_refusal_of_large_head_dims(backend: str, dims: tuple[int, int]) -> None:
    call = build(Case("refused", seqlen=(2, 2), head_dim=dims[0], head_dim_v=dims[1]))
    with pytest.raises(ValueError, match=r"from 1 to 512; got .*513"):
        call.run(backend)
