"""The sample: one small case for every option, and a few where options meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kilat.masks import Causal, Chunked, Dense, Documents, KeyRange, Predicate, Prefix, Window
from kilat.scores import Alibi, Bias, Score, Softcap


@dataclass(frozen=True)
class Sizes:
    """What masks and scores with tensors are made from."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_kv: int
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal float32 numbers."""
        return torch.randn(shape, generator=self.generator)

    def coins(self, *shape: int) -> Tensor:
        """Draw bools, two thirds of them True."""
        return torch.rand(shape, generator=self.generator) < 2 / 3

    def per_batch(self, low: int, high: int) -> Tensor:
        """Draw one int32 a batch entry, low <= value < high."""
        return torch.randint(low, high, (self.batch,), generator=self.generator, dtype=torch.int32)


Make = Callable[[Sizes], Any]


@dataclass(frozen=True)
class Case:
    """One call: sizes, layout and options; lengths are those of each sequence (ragged, cached) or of all (dense)."""

    name: str
    layout: Literal["dense", "ragged", "cached", "paged"] = "dense"
    dtype: str = "float32"
    seqlens_q: tuple[int, ...] = (129, 129)
    seqlens_kv: tuple[int, ...] = (129, 129)
    heads: tuple[int, int] = (2, 2)
    head_dims: tuple[int, int] = (64, 64)
    mask: Make | None = None
    scores: tuple[Make, ...] = ()
    sink: bool = False
    dropout: Literal["", "philox", "keep"] = ""
    scale: float | None = None
    logits: float = 1.0
    used: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # seqlens_q, seqlens_kv of padded batches
    transposed: bool = False  # tensors are views of [batch, heads, seqlen, dim]

    @property
    def gradients(self) -> bool:
        """Caches are forward only."""
        return self.layout in ("dense", "ragged")


def _causal(_: Sizes) -> Causal:
    return Causal()


def _documents(z: Sizes) -> Documents:
    thirds = torch.arange(z.seqlen_kv, dtype=torch.int32) * 3 // max(1, z.seqlen_kv)
    return Documents(thirds)


def _dilated(_: Sizes) -> Predicate:
    return Predicate(lambda b, h, q_pos, j: (q_pos - j) % 3 == 0)


def _relative(z: Sizes) -> Score:
    table = z.normal(64)

    def fn(s: Any, b: Any, h: Any, q_pos: Any, j: Any, table: Any) -> Any:
        return s + table[(q_pos - j) % 64]

    return Score(fn, tensors=(table,))


def _slopes(z: Sizes) -> Alibi:
    return Alibi(2.0 ** -(1.0 + torch.arange(z.heads, dtype=torch.float32)))


def _bias(z: Sizes) -> Bias:
    return Bias(z.normal(1, z.heads, z.seqlen_q, z.seqlen_kv))


MASKS: tuple[tuple[str, Make], ...] = (
    ("causal", _causal),
    ("causal, top left", lambda z: Causal(align="top_left")),
    ("window", lambda z: Window(16, 3)),
    ("window with first tokens", lambda z: Window(16, 0, first=4)),
    ("prefix", lambda z: Prefix(z.per_batch(0, z.seqlen_kv))),
    ("chunked", lambda z: Chunked(32)),
    ("key range", lambda z: KeyRange(z.per_batch(0, 40), z.per_batch(60, z.seqlen_kv))),
    ("documents", _documents),
    ("dense", lambda z: Dense(z.coins(z.batch, 1, z.seqlen_q, z.seqlen_kv))),
    ("predicate", _dilated),
    ("causal & documents & window", lambda z: Causal() & _documents(z) & Window(40, None)),
)

SCORES: tuple[tuple[str, tuple[Make, ...]], ...] = (
    ("softcap", (lambda z: Softcap(2.0),)),
    ("alibi", (_slopes,)),
    ("bias", (_bias,)),
    ("user score with a table", (_relative,)),
    ("softcap, alibi, bias, user score", (lambda z: Softcap(5.0), _slopes, _bias, _relative)),
)

RAGGED = Case("", "ragged", seqlens_q=(65, 0, 130, 1), seqlens_kv=(65, 7, 100, 33))
CACHED = Case("", "cached", seqlens_q=(1, 1, 1), seqlens_kv=(1, 300, 129), heads=(8, 2), mask=_causal)


def _cases() -> tuple[Case, ...]:
    causal = Case("", mask=_causal)
    found = [Case("full"), *(Case(f"mask: {name}", mask=make) for name, make in MASKS)]
    found += [Case(f"score: {name}", mask=_causal, scores=makes) for name, makes in SCORES]
    found += [
        replace(causal, name="sink", sink=True),
        replace(causal, name="dropout, philox", dropout="philox"),
        replace(causal, name="dropout, keep given", dropout="keep"),
        replace(causal, name="grouped heads, 8 to 2", heads=(8, 2)),
        replace(causal, name="negative scale", scale=-0.3),
        replace(causal, name="zero scale", scale=0.0),
        replace(causal, name="huge logits", logits=60.0),
        replace(causal, name="transposed views", transposed=True),
        replace(causal, name="more queries than keys", seqlens_q=(130, 130), seqlens_kv=(67, 67)),
        replace(causal, name="one token", seqlens_q=(1, 1), seqlens_kv=(1, 1)),
        replace(causal, name="63 tokens", seqlens_q=(63, 63), seqlens_kv=(63, 63)),
        replace(causal, name="head_dim 1 and 5", head_dims=(1, 5)),
        replace(causal, name="head_dim 80 and 96", head_dims=(80, 96)),
        replace(causal, name="head_dim 192 and 128", head_dims=(192, 128)),
        replace(causal, name="padded batch", used=((129, 30), (77, 0))),
        replace(RAGGED, name="ragged, full"),
        replace(RAGGED, name="ragged, causal, grouped heads", mask=_causal, heads=(4, 2)),
        replace(RAGGED, name="ragged, bfloat16, window", dtype="bfloat16", mask=lambda z: Window(20, 0)),
        replace(CACHED, name="cache, decode"),
        replace(CACHED, name="cache, four queries", seqlens_q=(4, 4, 4), seqlens_kv=(4, 300, 129)),
        replace(CACHED, name="cache, pages, bfloat16", layout="paged", dtype="bfloat16"),
        replace(CACHED, name="cache, pages, window, sink", layout="paged", mask=lambda z: Window(50, 0), sink=True),
    ]
    for dtype in ("bfloat16", "float16", "float64"):
        found.append(Case(f"{dtype}, full", dtype=dtype))
        found.append(replace(causal, name=f"{dtype}, causal, grouped heads", dtype=dtype, heads=(4, 2)))
    return tuple(found)


CASES = _cases()
