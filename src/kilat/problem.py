"""`Problem`: everything about a call that is not tensor data, and `Operands`: the tensor data.

Problem is the input of dispatch, the compile key, the tuning key, the benchmark row and the test id. Its fields are
either static (part of what a kernel is compiled for) or dynamic (run-time arguments); the field metadata says which.
"""

# ruff: noqa: RUF009 (`static` and `dynamic` make dataclass fields)
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kilat.masks.core import Mask
    from kilat.scores.core import ScoreModifier

Layout = Literal["dense", "ragged", "cached"]
DTYPES = ("float16", "bfloat16", "float32", "float64")
QUANTISED = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""What keys and values of a cache may be stored in beside q's dtype, and the largest number that a token's scale is
made for: value = stored * scale."""


def static(default: Any = ...) -> Any:
    """A field that kernels may be specialised on."""
    meta = {"static": True}
    return field(metadata=meta) if default is ... else field(default=default, metadata=meta)


def dynamic(default: Any = ...) -> Any:
    """A field that reaches a kernel as a run-time value only."""
    meta = {"static": False}
    return field(metadata=meta) if default is ... else field(default=default, metadata=meta)


@dataclass(frozen=True)
class Problem:
    """One attention problem without its tensors.

    `layout` is how sequences lie in memory: dense [batch, seqlen, heads, dim] (with used lengths if `padded_*`),
    ragged [total, heads, dim] with offsets, or cached (queries against a KV cache, forward only).
    `mask` and `scores` hold structure only: their tensors are in `Operands`, in the order of `mask.tensors()`.
    """

    layout: Layout = static()
    dtype: str = static()
    out_dtype: str = static()
    device: str = static()
    head_dim: int = static()
    head_dim_v: int = static()
    num_heads_q: int = static()
    num_heads_kv: int = static()
    mask: Mask | None = static(None)
    scores: tuple[ScoreModifier, ...] = static(())
    has_sink: bool = static(False)
    dropout: Literal["", "philox", "keep"] = static("")
    padded_q: bool = static(False)
    padded_kv: bool = static(False)
    page_size: int = static(0)  # 0: not paged
    kv_dtype: str = static("")  # what k and v are stored in if it is not q's dtype: a key of QUANTISED
    ring_first: int | None = static(None)  # a cache that keeps this many tokens and, in a ring behind them, the last
    quantised: Literal["", "head", "token"] = static("")  # one k_scale and v_scale a head, or one a token and head
    needs_grad: bool = static(False)
    grad_of: frozenset[str] = static(frozenset())  # of q k v sink bias score_tensors: what backward must return
    deterministic: bool = static(False)
    batch_invariant: bool = static(False)
    batch: int = dynamic(0)
    seqlen_q: int = dynamic(0)  # dense: seqlen_q; ragged and cached: total_q
    seqlen_kv: int = dynamic(0)  # dense: seqlen_kv; ragged: total_kv; cached: the most tokens of one sequence
    scale: float = dynamic(1.0)
    dropout_p: float = dynamic(0.0)
    num_splits: int | None = dynamic(None)
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False, metadata={"static": False})
    """A backend's own notes about this Problem (a launch plan, say), under its name; no part of its value."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "memo": {}}

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads_q // self.num_heads_kv

    def compile_key(self) -> tuple[Any, ...]:
        """The values of all static fields."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.metadata["static"])

    def short_id(self) -> str:
        """A name for tests, tables and benchmark rows."""
        mask = "full" if self.mask is None else self.mask.name
        parts = [self.layout, self.dtype, f"b{self.batch}", f"q{self.seqlen_q}", f"kv{self.seqlen_kv}"]
        parts += [f"h{self.num_heads_q}-{self.num_heads_kv}", f"d{self.head_dim}-{self.head_dim_v}", mask]
        parts += [s.name for s in self.scores]
        parts += ["sink"] * self.has_sink + ([self.dropout] if self.dropout else [])
        parts += [f"page{self.page_size}"] * bool(self.page_size) + ["grad"] * self.needs_grad
        parts += ["ring"] * (self.ring_first is not None)
        parts += [f"{self.kv_dtype}-{self.quantised}"] * bool(self.quantised)
        return "-".join(parts)


class Options(NamedTuple):
    """What a caller said that is not tensor data, in one hashable tuple; with the tensors' shapes it gives a Problem.

    `mask` and `scores` are structures (no tensors inside), `scores` in order of application. `scale` None is
    head_dim**-0.5. `out_dtype` is a torch dtype or None for q's. `ring_first` is that of Problem.
    """

    layout: Layout
    mask: Mask | None = None
    scores: tuple[ScoreModifier, ...] = ()
    scale: float | None = None
    dropout: Literal["", "philox", "keep"] = ""
    dropout_p: float = 0.0
    out_dtype: Any = None
    deterministic: bool = False
    batch_invariant: bool = False
    num_splits: int | None = None
    backend: str = "auto"
    ring_first: int | None = None


@dataclass(slots=True)
class Operands:
    """The tensors of one call, validated, in the layout that `Problem.layout` names.

    dense: q [batch, seqlen_q, num_heads_q, head_dim], k and v alike. ragged: q [total_q, ...], offsets
    int32 [batch + 1].
    cached: q dense or (with cu_seqlens_q) ragged; k, v are the cache tensors [batch, capacity, heads, dim] or pages
    [num_pages, page_size, heads, dim] with page_table int32 [batch, pages]; seqlens_kv are the cache lengths. Quantised
    ones have k_scale and v_scale float32, [heads] or [the tokens' axes, heads].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    seqlens_q: Tensor | None = None
    seqlens_kv: Tensor | None = None
    page_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    sink: Tensor | None = None  # [num_heads_q]
    mask_tensors: tuple[Tensor, ...] = ()
    score_tensors: tuple[tuple[Tensor, ...], ...] = ()  # one tuple per entry of Problem.scores
    keep: Tensor | None = None  # bool, broadcastable to [batch, num_heads_q, S_q, S_kv]
    seed: Tensor | int = 0  # Philox key
    offset: Tensor | int = 0  # Philox counter
    out: Tensor | None = None  # a caller's buffer (cached only)
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    def optional(self) -> tuple[Any, ...]:
        """The operands that `OPTIONAL_TENSORS` names, None where there is no tensor."""
        seed, offset = self.seed, self.offset
        return (
            self.sink,
            self.cu_seqlens_q,
            self.cu_seqlens_kv,
            self.seqlens_q,
            self.seqlens_kv,
            self.page_table,
            self.k_scale,
            self.v_scale,
            self.keep,
            None if isinstance(seed, int) else seed,
            None if isinstance(offset, int) else offset,
        )

    def present(self) -> tuple[str, ...]:
        """The names of the tensors given, in a fixed order; `mask.1` and `score.0.2` name those of masks and scores."""
        return present_names(*self.given())

    def given(self) -> tuple[tuple[bool, ...], tuple[int, ...], int]:
        """What the names follow from: which optional operands are given, and how many tensors scores and masks have."""
        optional = tuple([x is not None for x in self.optional()])
        return optional, tuple([len(group) for group in self.score_tensors]), len(self.mask_tensors)

    def flatten(self, names: tuple[str, ...]) -> list[Tensor]:
        """The tensors that `names` (from `present`) name, in that order."""
        tensors = [self.q, self.k, self.v]
        if len(names) > 3:
            tensors += [x for x in self.optional() if x is not None]
            for group in self.score_tensors:
                tensors += group
            tensors += self.mask_tensors
        return tensors

    @staticmethod
    def unflatten(names: tuple[str, ...], tensors: Sequence[Tensor], num_scores: int = 0) -> Operands:
        """The Operands whose `flatten(names)` is `tensors`; `num_scores` is the length of `Problem.scores`."""
        operands = Operands(tensors[0], tensors[1], tensors[2])
        if len(names) > 3 or num_scores:
            groups: list[list[Tensor]] = [[] for _ in range(num_scores)]
            masks: list[Tensor] = []
            for name, tensor in zip(names[3:], tensors[3:], strict=True):
                kind, _, index = name.partition(".")
                if kind == "mask":
                    masks.append(tensor)
                elif kind == "score":
                    groups[int(index.partition(".")[0])].append(tensor)
                else:
                    setattr(operands, name, tensor)
            operands.mask_tensors = tuple(masks)
            operands.score_tensors = tuple(tuple(group) for group in groups)
        return operands


OPTIONAL_TENSORS = (
    "sink",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "seqlens_q",
    "seqlens_kv",
    "page_table",
    "k_scale",
    "v_scale",
    "keep",
    "seed",
    "offset",
)
"""Names of the operands beside q, k, v that may be a tensor (`out` is the caller's buffer, no input)."""


def present_names(given: tuple[bool, ...], score_counts: tuple[int, ...], mask_count: int) -> tuple[str, ...]:
    """What `Operands.present` returns, from `Operands.given`."""
    names = ["q", "k", "v"]
    names += [name for name, there in zip(OPTIONAL_TENSORS, given, strict=True) if there]
    names += [f"score.{n}.{i}" for n, count in enumerate(score_counts) for i in range(count)]
    names += [f"mask.{i}" for i in range(mask_count)]
    return tuple(names)


@dataclass
class Grads:
    """What a backward returns; None where `Problem.grad_of` did not ask."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    sink: Tensor | None = None
    score_tensors: list[list[Tensor | None]] = field(default_factory=list)  # bias and tensors of user scores
