"""Tile functions of the Triton backend against their meaning: dropout's words, user expressions, tanh, head pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers import OFFSET, SEED

import kilat
from kilat import math
from kilat.backends.triton.adapt import opaque
from kilat.backends.triton.arguments import Mask
from kilat.backends.triton.tiles import row_bounds
from kilat.reference_parts import philox
from kilat.scores.user import Score
from kilat.symbolic import evaluate

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floor division": lambda s, b, h, q_pos, j: s + (q_pos - j) // 5 + (j - q_pos) // (b - 2),
    "by zero": lambda s, b, h, q_pos, j: s + (q_pos - j) // (j % 3) + j % (b * 0),
    "remainder": lambda s, b, h, q_pos, j: s + (q_pos - j) % 7 - (q_pos - j) % -7,
    "float remainder": lambda s, b, h, q_pos, j: s % 0.7 + (s * 3.0) // 0.5,
    "bits": lambda s, b, h, q_pos, j: s + ((q_pos & 5) | (j & ~3)),
    "logic": lambda s, b, h, q_pos, j: math.where(~((q_pos > j) & (j != 3)) | (h == 1), s, -s),
    "bool as number": lambda s, b, h, q_pos, j: s * (q_pos >= j) + ((j < 4) + 1),
    "functions": lambda s, b, h, q_pos, j: math.exp(-math.abs(s)) + math.log(math.sqrt(s * s + 1.0)) + math.tanh(s),
    "constant": lambda s, b, h, q_pos, j: 0.25,
    "of rows": lambda s, b, h, q_pos, j: q_pos * 0.5,
    "infinite": lambda s, b, h, q_pos, j: math.where(j == 2, float("-inf"), math.minimum(s, 1.0)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_expressions(name: str) -> None:
    """A traced function compiled into the kernel says what `evaluate` says, as a score of one key a time."""
    score = Score(FUNCTIONS[name], derivative=lambda s, b, h, q_pos, j: 1.0)
    q_pos, j = np.arange(9)[:, None], np.arange(9)[None]
    s = np.linspace(-2.0, 2.0, 81).reshape(9, 9)
    wanted = evaluate(score.expr, {"s": s, "b": 0, "h": 1, "q_pos": q_pos, "j": j})
    wanted = np.broadcast_to(wanted, (9, 9))
    # lse of a single visible key is its score: a bias makes that key's score s, a mask shows it alone
    q, k = torch.zeros(1, 9, 2, 16), torch.zeros(1, 9, 2, 16)
    bias = torch.from_numpy(s)[None, None].float()
    for key in range(9):
        only = kilat.Predicate(lambda b, h, q_pos, j, key=key: j == key)
        _, lse = kilat.attention(
            q, k, k, scores=(kilat.Bias(bias), score), mask=only, return_lse=True, backend="triton"
        )
        np.testing.assert_allclose(lse[0, 1], wanted[:, key], rtol=2e-6, atol=2e-6)


def test_tables_are_clamped() -> None:
    """Indices beyond a table read its ends; bools, int8, float16 and empty tensors are tables, too."""
    flags, small = torch.tensor([True, False, True]), torch.tensor([[1, -2], [3, 4]], dtype=torch.int8)
    half, empty = torch.randn(4).half(), torch.zeros(0)

    def score(s, b, h, q_pos, j, flags, small, half, empty):
        return math.where(flags[j - 1], s + half[q_pos - 2], s) + small[j - 9, q_pos] + empty[j]

    tables = (flags, small, half, empty)
    q = torch.randn(1, 6, 1, 16)
    out, lse = (
        kilat.attention(q, q, q, scores=(kilat.Score(score, tensors=tables),), return_lse=True, backend=name)
        for name in ("triton", "cpu")
    )
    for got, wanted in zip(out, lse, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("given", ["ints", "tensors"])
@pytest.mark.parametrize(("seed", "offset"), [(SEED, OFFSET), (1, 0), (2**63 - 1, 2**32), (-1, 5)])
def test_dropout_bits(seed: int, offset: int, given: str) -> None:
    """Uniform probabilities and v = identity: what is left of each key says whether its word was kept."""
    n, p = 64, 0.3
    q, v = torch.zeros(2, n, 2, n), torch.eye(n)[None, :, None].expand(2, n, 2, n).contiguous()
    words = (seed, offset) if given == "ints" else (torch.tensor(seed), torch.tensor(offset))
    dropout = kilat.Dropout(p, seed=words[0], offset=words[1])
    out = kilat.attention(q, q, v, dropout=dropout, backend="triton")
    for b in range(2):
        for h in range(2):
            wanted = philox(seed, offset, 2 * b + h, np.arange(n), n) >= p * 2.0**32
            np.testing.assert_array_equal(out[b, :, h].numpy() > 0.0, wanted)


def test_tanh() -> None:
    """Relative error 3e-7 from the smallest to the largest argument: softcap of a single key's score is its lse."""
    x = torch.cat([torch.logspace(-6, 2, 60), -torch.logspace(-6, 2, 60), torch.tensor([0.59, 0.6, 0.61, 0.0])])
    n = len(x)
    q = torch.zeros(1, n, 1, 16)
    q[0, :, 0, 0] = x
    k = torch.zeros(1, 1, 1, 16)
    k[..., 0] = 1.0
    _, lse = kilat.attention(q, k, k, scale=1.0, scores=(kilat.Softcap(1.0),), return_lse=True, backend="triton")
    torch.testing.assert_close(lse[0, 0].double(), x.double().tanh(), rtol=3e-7, atol=0)


def test_pieces() -> None:
    """One power of two, or two where that saves a fifth."""
    from kilat.backends.triton.adapt import pieces

    found = {dim: pieces(dim) for dim in range(1, 577)}
    for dim, parts in found.items():
        assert sum(parts) >= dim
        assert all(part >= 16 and part & (part - 1) == 0 for part in parts)
    wanted = {1: (16,), 16: (16,), 40: (32, 16), 64: (64,), 72: (64, 16), 96: (64, 32), 100: (128,), 128: (128,)}
    wanted |= {192: (128, 64), 200: (256,), 256: (256,), 320: (256, 64), 512: (512,), 576: (512, 64)}
    assert {dim: found[dim] for dim in wanted} == wanted


def test_lengths_change_no_spec() -> None:
    """Kernels are compiled for structure: another length, scale or window width is the same Spec."""
    from cases import Case
    from helpers import build

    from kilat.backends.triton.adapt import adapt

    base = Case("one", seqlen=(63, 63), mask="window", scores="all")
    specs = set()
    for case in (base, Case("two", seqlen=(17, 200), mask="window_left", scores="all"), base):
        specs.add(repr(adapt(*build(case).core()).spec))
    assert len(specs) == 2  # window_left has no right bound


@triton.jit
def bounds_before_the_first(mask, to, spec: tl.constexpr):
    zero = tl.program_id(0) * 0
    start, stop = row_bounds(mask, None, zero - 1, (zero, zero, zero, zero, zero + 9), spec, 0)
    tl.store(to, start)
    tl.store(to + 1, stop)


class OneInterval:
    """All that `row_bounds` reads of a Spec."""

    intervals = 1


def test_the_last_query_of_an_empty_sequence_reads_no_bounds() -> None:
    """Its number is -1, and what lies before the table is nobody's: a range of keys made of it could lead anywhere."""
    before, to = torch.full((8,), 999, dtype=torch.int32), torch.full((2,), -5, dtype=torch.int32)
    bounds_before_the_first[(1,)](Mask(before[4:], opaque(0), opaque(2), (), ()), to, OneInterval())
    assert to.tolist() == [0, 0]
