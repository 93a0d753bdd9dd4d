"""THE list of cases: every shape, mask, score and layout that tests, `kilat check` and docs run, by name.

A `Case` is a recipe; `helpers.build(case)` turns it into tensors. Sizes are small and odd first: bugs live at 0, 1, one
less and one more than a block, and not at 1024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kilat import math
from kilat.masks import Causal, Chunked, Dense, Documents, KeyRange, Mask, Predicate, Prefix, Window
from kilat.scores import Alibi, Bias, Score, ScoreModifier, Softcap

INT32_MAX = 2**31 - 1
QUANTISED = ("int8-head", "int8-token", "float8_e4m3fn-head", "float8_e4m3fn-token")


@dataclass(frozen=True)
class Sizes:
    """What masks and scores are built from: the largest lengths, and a generator of random tensors."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_kv: int
    generator: torch.Generator
    dtype: torch.dtype = torch.float32

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers of the case's dtype (or another)."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int32 from low to high - 1."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator, dtype=torch.int32)

    def coins(self, *shape: int, p: float = 0.5) -> Tensor:
        """True with probability p."""
        return torch.rand(shape, generator=self.generator) < p


MaskBuilder = Callable[[Sizes], Mask | None]
ScoresBuilder = Callable[[Sizes], tuple[ScoreModifier, ...]]


@dataclass(frozen=True)
class Case:
    """One call of the public API: `layout` names the function, the rest its arguments."""

    name: str
    layout: str = "dense"  # dense, padded, ragged, cached, paged
    batch: int = 2
    heads: tuple[int, int] = (2, 2)
    seqlen: tuple[int, int] = (63, 63)  # dense; padded: allocated; cached and paged: (new tokens, capacity)
    lengths_q: tuple[int, ...] | None = None  # padded, ragged, cached with cu_seqlens_q
    lengths_kv: tuple[int, ...] | None = None  # padded, ragged, cached, paged
    tail: int = 0  # ragged: tokens past the last offset
    head_dim: int = 16
    head_dim_v: int | None = None
    dtype: str = "float32"
    out_dtype: str | None = None
    mask: str = "none"  # a name of MASKS
    scores: str = "none"  # a name of SCORES
    sink: bool = False
    dropout: str = ""  # "", philox, keep
    dropout_p: float = 0.25
    scale: float | None = None
    logits: float = 1.0  # q is multiplied by this
    strides: str = "contiguous"  # contiguous, heads_first, sliced, packed, expanded_heads, expanded_batch
    page_size: int = 16
    kv: str = ""  # cached, paged: quantised, "int8-head", "int8-token", "float8_e4m3fn-head", "float8_e4m3fn-token"

    def __str__(self) -> str:
        return self.name

    @property
    def cached(self) -> bool:
        """Whether the case reads a cache, forward only."""
        return self.layout in ("cached", "paged")

    def sizes(self, generator: torch.Generator) -> Sizes:
        """What the builders of masks and scores need."""
        longest_q = self.seqlen[0] if self.lengths_q is None else max(self.lengths_q, default=0)
        longest_kv = self.seqlen[1] if self.lengths_kv is None else max(self.lengths_kv, default=0)
        if self.layout == "padded":
            longest_q, longest_kv = self.seqlen
        return Sizes(self.batch, self.heads[0], longest_q, longest_kv, generator, getattr(torch, self.dtype))


def _lengths(z: Sizes) -> Tensor:
    return z.integers(0, z.seqlen_kv + 1, z.batch)


def _documents(z: Sizes, *lead: int) -> Tensor:
    """Ids in runs, the last run hidden (-1)."""
    rows = lead[0] if lead else 1
    cuts = torch.rand((rows, z.seqlen_kv), generator=z.generator) < 0.15
    ids = cuts.int().cumsum(1, dtype=torch.int32)
    ids[:, max(z.seqlen_kv - 3, 0) :] = -1
    return ids if lead else ids[0]


def _key_range(z: Sizes) -> Mask:
    start = _lengths(z)
    return KeyRange(start, torch.maximum(start, _lengths(z)))


def _dilated(step: Tensor) -> Mask:
    return Predicate(lambda b, h, q_pos, j, steps: (q_pos - j) % steps[h] == 0, tensors=(step,))


MASKS: dict[str, MaskBuilder] = {
    "none": lambda z: None,
    "causal": lambda z: Causal(),
    "causal_top_left": lambda z: Causal(align="top_left"),
    "window": lambda z: Window(9, 4),
    "window_self": lambda z: Window(0, 0),
    "window_left": lambda z: Window(17, None),
    "window_right": lambda z: Window(None, 5),
    "window_open": lambda z: Window(None, None),
    "window_wide": lambda z: Window(1000, 1000),
    "window_int32_max": lambda z: Window(INT32_MAX, INT32_MAX),
    "window_first": lambda z: Window(8, 0, first=3),
    "window_first_beyond": lambda z: Window(4, 4, first=500),
    "prefix": lambda z: Prefix(_lengths(z)),
    "chunked": lambda z: Chunked(16),
    "chunked_one": lambda z: Chunked(1),
    "key_range": _key_range,
    "key_range_empty": lambda z: KeyRange(*(torch.full((z.batch,), 5, dtype=torch.int32) for _ in range(2))),
    "documents": lambda z: Documents(_documents(z)),
    "documents_batch": lambda z: Documents(_documents(z, z.batch)),
    "dense": lambda z: Dense(z.coins(z.batch, z.heads, z.seqlen_q, z.seqlen_kv)),
    "dense_keys": lambda z: Dense(z.coins(z.batch, 1, 1, z.seqlen_kv)),
    "dense_rows": lambda z: Dense(z.coins(1, z.heads, z.seqlen_q, 1)),
    "dense_shared": lambda z: Dense(z.coins(z.seqlen_q, z.seqlen_kv)),
    "predicate": lambda z: Predicate(lambda b, h, q_pos, j: (q_pos + j) % 3 != h % 3),
    "predicate_tensor": lambda z: _dilated(1 + torch.arange(z.heads, dtype=torch.int32)),
    "causal_window": lambda z: Causal() & Window(7, 7),
    "both_causals": lambda z: Causal() & Causal(align="top_left"),
    "causal_documents": lambda z: Causal() & Documents(_documents(z, z.batch)),
    "window_first_causal": lambda z: Window(5, 5, first=4) & Causal(),
    "window_first_range": lambda z: Window(5, 0, first=4) & _key_range(z),
    "prefix_chunked": lambda z: Prefix(_lengths(z)) & Chunked(8),
    "causal_dense": lambda z: Causal() & Dense(z.coins(1, 1, z.seqlen_q, z.seqlen_kv, p=0.8)),
    "two_dense": lambda z: Dense(z.coins(z.batch, 1, 1, z.seqlen_kv)) & Dense(z.coins(1, z.heads, z.seqlen_q, 1)),
    "everything": lambda z: (
        Causal()
        & _key_range(z)
        & Dense(z.coins(z.batch, 1, 1, z.seqlen_kv, p=0.9))
        & _dilated(torch.ones(z.heads).int())
    ),
}


def _slopes(z: Sizes, *lead: int) -> Tensor:
    return z.normal(*lead, z.heads, dtype=torch.float32).abs() * 0.3


def _holes(z: Sizes) -> Tensor:
    """A bias that hides a third of the keys with -inf, and whole rows."""
    bias = z.normal(z.batch, 1, z.seqlen_q, z.seqlen_kv).masked_fill(z.coins(z.seqlen_kv, p=0.33), -torch.inf)
    bias[:, :, ::7] = -torch.inf
    return bias


def _relative(z: Sizes) -> ScoreModifier:
    """A learned table of clipped relative positions, per head, with a nonlinearity around it."""
    table = z.normal(z.heads, 9)

    def score(s, b, h, q_pos, j, tables):
        return s + tables[h, math.minimum(math.maximum(q_pos - j, -4), 4) + 4] * 0.5

    return Score(score, tensors=(table,))


def _tanh_score() -> ScoreModifier:
    return Score(lambda s, b, h, q_pos, j: 3.0 * math.tanh(s / 3.0) + 0.01 * (q_pos - j))


def _own_derivative() -> ScoreModifier:
    return Score(lambda s, b, h, q_pos, j: s * 0.5, derivative=lambda s, b, h, q_pos, j: 0.5)


SCORES: dict[str, ScoresBuilder] = {
    "none": lambda z: (),
    "softcap": lambda z: (Softcap(2.0),),
    "alibi": lambda z: (Alibi(_slopes(z)),),
    "alibi_batch": lambda z: (Alibi(_slopes(z, z.batch)),),
    "bias": lambda z: (Bias(z.normal(z.batch, z.heads, z.seqlen_q, z.seqlen_kv)),),
    "bias_heads": lambda z: (Bias(z.normal(1, z.heads, z.seqlen_q, z.seqlen_kv)),),
    "bias_keys": lambda z: (Bias(z.normal(z.batch, 1, 1, z.seqlen_kv)),),
    "bias_rows": lambda z: (Bias(z.normal(1, z.heads, z.seqlen_q, 1)),),
    "bias_float32": lambda z: (Bias(z.normal(1, 1, z.seqlen_q, z.seqlen_kv, dtype=torch.float32)),),
    "bias_expanded": lambda z: (Bias(z.normal(1, 1, 1, z.seqlen_kv).expand(z.batch, z.heads, z.seqlen_q, -1)),),
    "bias_holes": lambda z: (Bias(_holes(z)),),
    "score": lambda z: (_tanh_score(),),
    "score_tensor": lambda z: (_relative(z),),
    "score_derivative": lambda z: (_own_derivative(),),
    "all": lambda z: (  # listed out of order on purpose
        _relative(z),
        Bias(z.normal(1, z.heads, z.seqlen_q, z.seqlen_kv)),
        _tanh_score(),
        Alibi(_slopes(z)),
        Softcap(5.0),
    ),
}


def _shapes() -> list[Case]:
    """Odd, zero and rectangular sizes; grouped heads; head dims."""
    cases = [
        Case(f"q{q}-kv{kv}-{mask}", seqlen=(q, kv), mask=mask, batch=1 + (q + kv) % 2)
        for q, kv in [(1, 1), (1, 63), (63, 1), (63, 129), (129, 63), (129, 129), (65, 257), (257, 31)]
        for mask in ("none", "causal")
    ]
    cases += [
        Case(f"zero-b{b}-q{q}-kv{kv}-{mask}" + "-sink" * sink, batch=b, seqlen=(q, kv), mask=mask, sink=sink)
        for b, q, kv, sink in [(0, 5, 5, False), (2, 0, 5, False), (2, 5, 0, False), (2, 5, 0, True), (2, 0, 0, True)]
        for mask in ("none", "causal")
    ]
    cases += [
        Case(f"heads{q}-{kv}", heads=(q, kv), seqlen=(65, 33), mask="causal", sink=q == 6, batch=1)
        for q, kv in [(1, 1), (4, 1), (6, 2), (3, 3), (8, 2)]
    ]
    dims = [(1, 1), (3, 5), (17, 17), (40, 40), (64, 64), (80, 80), (96, 31), (128, 128), (192, 128), (256, 256)]
    dims += [(512, 512), (5, 512), (512, 3), (251, 127)]
    cases += [
        Case(f"d{d}-{dv}-{dtype}", head_dim=d, head_dim_v=dv, dtype=dtype, seqlen=(33, 65), heads=(2, 1), mask="causal")
        for d, dv in dims
        for dtype in (("float32", "bfloat16") if d in (17, 64, 251) else ("float32",))
    ]
    return cases


def _types() -> list[Case]:
    """Every dtype with something of everything; extreme logits; scales; out_dtype."""
    cases = [
        Case(f"{dtype}-{extra}", dtype=dtype, seqlen=(65, 129), heads=(4, 2), head_dim=40, **options)
        for dtype in ("float16", "bfloat16", "float32", "float64")
        for extra, options in {
            "full": {},
            "causal-sink": {"mask": "causal", "sink": True},
            "rich": {"mask": "window_first", "scores": "all", "sink": True, "dropout": "philox"},
            "huge": {"logits": 1e4, "mask": "causal"} if dtype != "float16" else {"logits": 1e3, "mask": "causal"},
            "tiny": {"logits": 1e-4},
            "scale0": {"scale": 0.0, "mask": "causal"},
            "negative": {"scale": -0.7, "scores": "softcap"},
            "bias": {"scores": "bias_heads"},
        }.items()
    ]
    cases += [
        Case(f"{dtype}-out-float32", dtype=dtype, out_dtype="float32", mask="causal", head_dim=24)
        for dtype in ("float16", "bfloat16")
    ]
    return cases


def _masks_and_scores() -> list[Case]:
    """Every mask, square and with more queries than keys and the other way round; every score, under some masks."""
    cases = [
        Case(f"mask-{name}-{q}x{kv}", seqlen=(q, kv), mask=name, batch=2, heads=(2, 1))
        for name in MASKS
        for q, kv in [(65, 65), (70, 37), (37, 130)]
    ]
    cases += [
        Case(f"score-{name}-{mask}", seqlen=(65, 49), mask=mask, scores=name, heads=(2, 1))
        for name in SCORES
        for mask in ("none", "causal", "dense")
    ]
    cases += [
        Case(f"dropout-{kind}-{p}-{mask}", seqlen=(33, 67), mask=mask, dropout=kind, dropout_p=p)
        for kind, p in [("philox", 0.0), ("philox", 0.1), ("philox", 0.9), ("philox", 1.0), ("keep", 0.5)]
        for mask in ("none", "window")
    ]
    cases += [
        Case(f"sink-{mask}", seqlen=(40, 33), mask=mask, sink=True, heads=(4, 2))
        for mask in ("none", "causal", "key_range_empty", "dense")
    ]
    return cases


def _layouts() -> list[Case]:
    """Strides, padded batches, ragged batches with empty sequences in every position."""
    cases = [
        Case(f"strides-{strides}-{dtype}", strides=strides, dtype=dtype, seqlen=(65, 65), heads=(4, 4), mask="causal")
        for strides in ("heads_first", "sliced", "packed", "expanded_heads", "expanded_batch")
        for dtype in ("float32", "bfloat16")
    ]
    padded = Case("padded", "padded", batch=4, seqlen=(67, 131), lengths_q=(67, 0, 5, 33), lengths_kv=(3, 9, 0, 131))
    cases += [
        replace(padded, name=f"padded-{mask}-{scores}", mask=mask, scores=scores, sink=scores == "softcap")
        for mask, scores in [("none", "none"), ("causal", "softcap"), ("window_first", "alibi"), ("dense", "bias")]
    ]
    cases += [
        replace(padded, name="padded-q-only", lengths_kv=None),
        replace(padded, name="padded-kv-only", lengths_q=None, mask="causal"),
        replace(padded, name="padded-bfloat16", dtype="bfloat16", strides="heads_first", mask="causal", sink=True),
        replace(padded, name="padded-dropout", dropout="philox", mask="prefix"),
        replace(padded, name="padded-keep", dropout="keep", mask="documents_batch"),
    ]
    ragged = Case("ragged", "ragged", batch=3, lengths_q=(5, 63, 33), lengths_kv=(5, 70, 20), heads=(4, 2))
    cases += [replace(ragged, name=f"ragged-{mask}", mask=mask) for mask in MASKS]
    cases += [replace(ragged, name=f"ragged-{name}", scores=name, mask="causal") for name in SCORES if name != "none"]
    cases += [
        replace(ragged, name=f"ragged-empty-{side}{at}", **{f"lengths_{side}": _with_zero(at)}, sink=True)
        for side in ("q", "kv")
        for at in range(3)
    ]
    cases += [
        replace(ragged, name="ragged-all-empty", lengths_q=(0, 0, 0), lengths_kv=(0, 0, 0)),
        replace(ragged, name="ragged-no-sequences", batch=0, lengths_q=(), lengths_kv=(), tail=3, sink=True),
        *(
            replace(ragged, name=f"ragged-no-sequences-{mask}", batch=0, lengths_q=(), lengths_kv=(), tail=3, mask=mask)
            for mask in ("window_first", "causal_documents", "key_range")
        ),
        replace(ragged, name="ragged-tail", tail=7, sink=True, mask="causal"),
        replace(ragged, name="ragged-ones", batch=5, lengths_q=(1,) * 5, lengths_kv=(1, 2, 64, 65, 1)),
        replace(ragged, name="ragged-bfloat16", dtype="bfloat16", tail=2, strides="sliced", mask="causal", sink=True),
        replace(ragged, name="ragged-dropout", dropout="philox", sink=True),
        replace(ragged, name="ragged-keep", dropout="keep", scores="softcap"),
        replace(ragged, name="ragged-float64", dtype="float64", scores="all", sink=True, mask="window_first"),
    ]
    return cases


def _with_zero(at: int) -> tuple[int, ...]:
    lengths = [17, 40, 9]
    lengths[at] = 0
    return tuple(lengths)


def _caches() -> list[Case]:
    """Decode, speculative and prefill steps; garbage wherever a cache or its page table stores nothing."""
    cases: list[Case] = []
    for layout in ("cached", "paged"):
        one = Case(layout, layout, batch=3, seqlen=(1, 160), lengths_kv=(1, 130, 63), heads=(4, 2), mask="causal")
        cases += [
            replace(one, name=f"{layout}-decode"),
            replace(one, name=f"{layout}-decode-bfloat16", dtype="bfloat16", head_dim=64),
            replace(one, name=f"{layout}-decode-float16", dtype="float16", head_dim=128, heads=(8, 1)),
            replace(one, name=f"{layout}-decode-float64", dtype="float64", head_dim_v=7),
            replace(one, name=f"{layout}-decode-window", mask="window", sink=True),
            replace(one, name=f"{layout}-decode-first", mask="window_first", scores="softcap"),
            replace(one, name=f"{layout}-decode-alibi", scores="alibi_batch"),
            replace(one, name=f"{layout}-decode-score", scores="score_tensor", mask="none"),
            replace(one, name=f"{layout}-decode-all", scores="all", mask="everything", sink=True),
            replace(one, name=f"{layout}-empty", lengths_kv=(0, 0, 5), sink=True),
            replace(one, name=f"{layout}-batch0", batch=0, lengths_kv=()),
            replace(one, name=f"{layout}-four", seqlen=(4, 160), lengths_kv=(2, 130, 63)),
            replace(one, name=f"{layout}-tree", seqlen=(5, 160), lengths_kv=(9, 130, 63), mask="dense"),
            replace(one, name=f"{layout}-prefill", seqlen=(65, 160), lengths_kv=(65, 130, 70)),
            replace(one, name=f"{layout}-ragged", lengths_q=(1, 40, 0), lengths_kv=(1, 130, 63), tail=2),
            replace(one, name=f"{layout}-long", batch=2, seqlen=(1, 2100), lengths_kv=(2100, 1030)),
            replace(one, name=f"{layout}-strided", strides="heads_first", seqlen=(3, 160)),
            replace(one, name=f"{layout}-out-float32", out_dtype="float32", dtype="bfloat16"),
        ]
    cases += [
        Case(f"paged-page{n}", "paged", seqlen=(2, 70), lengths_kv=(70, 33), page_size=n, mask="causal", heads=(2, 1))
        for n in (1, 3, 64, 128)
    ]
    return cases + _quantised()


def _quantised() -> list[Case]:
    """Quantised caches, both types, both kinds of scales, with something of everything."""
    one = Case("", "paged", batch=3, seqlen=(1, 160), lengths_kv=(1, 130, 63), heads=(4, 2), mask="causal")
    cases: list[Case] = []
    for kv in QUANTISED:
        cases += [
            replace(one, name=f"{kv}-page{n}", kv=kv, page_size=n, seqlen=(2, 160), head_dim=dim, dtype=dtype)
            for n, dim, dtype in [(1, 17, "float32"), (3, 64, "bfloat16"), (16, 33, "float16"), (64, 128, "bfloat16")]
        ]
        cases += [
            replace(one, name=f"{kv}-cached", kv=kv, layout="cached", scores="alibi", mask="window_first", sink=True),
            replace(one, name=f"{kv}-all", kv=kv, scores="all", mask="everything", sink=True, strides="heads_first"),
            replace(one, name=f"{kv}-ragged", kv=kv, lengths_q=(1, 129, 0), tail=2, dtype="bfloat16", scores="softcap"),
            replace(one, name=f"{kv}-prefill", kv=kv, layout="cached", seqlen=(63, 160), lengths_kv=(63, 130, 0)),
            replace(one, name=f"{kv}-float64", kv=kv, dtype="float64", head_dim_v=7, strides="sliced"),
            replace(one, name=f"{kv}-empty", kv=kv, lengths_kv=(0, 0, 5), sink=True),
        ]
    return cases


CASES: list[Case] = _shapes() + _types() + _masks_and_scores() + _layouts() + _caches()
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "case names must be unique"
