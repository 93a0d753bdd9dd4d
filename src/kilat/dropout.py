"""Dropout of attention probabilities, by Philox4x32-10 or by a given keep mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kilat.structure import check_broadcast, check_dtype, check_number, four_axes, shape_of


@dataclass(frozen=True, eq=False, init=False)
class Dropout:
    """Each probability is dropped with probability p, and what is left is scaled by 1 / (1 - p); p = 1 gives out 0.

    By default (seed, offset) are drawn at each call from `generator` (None: torch's own of q's device). An int or a 0-d
    int64 tensor for `seed` (and `offset`, 0 if only seed is given) fixes them. `keep`, bool, True keeps, broadcastable
    to [batch, num_heads_q, seqlen_q, seqlen_kv], decides instead. Raises ValueError unless 0 <= p <= 1.
    """

    p: float
    generator: Any
    seed: Any
    offset: Any
    keep: Any

    def __init__(
        self, p: float, *, generator: Any = None, seed: Any = None, offset: Any = None, keep: Any = None
    ) -> None:
        if not 0.0 <= check_number(p, "p") <= 1.0:
            raise ValueError(f"p must be between 0 and 1; got p={p}")
        _check_counter(seed, "seed")
        _check_counter(offset, "offset")
        if offset is not None and seed is None:
            raise ValueError(f"offset needs a seed; got offset={offset!r}, seed=None")
        if seed is not None and generator is not None:
            raise ValueError("seed and generator must not both be given")
        if keep is not None:
            if seed is not None or generator is not None:
                raise ValueError("keep must not be combined with seed, offset or generator")
            check_dtype(keep, "keep", "bool")
            keep = four_axes(keep, "keep")
        for name, value in (
            ("p", float(p)),
            ("generator", generator),
            ("seed", seed),
            ("offset", offset),
            ("keep", keep),
        ):
            object.__setattr__(self, name, value)

    def check(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, exact: bool = True) -> None:
        """Raises ValueError if `keep` does not fit the call; with exact=False it may be longer."""
        if self.keep is not None:
            check_broadcast(self.keep, "keep", batch, num_heads_q, seqlen_q, seqlen_kv, exact=exact)


def _check_counter(value: Any, name: str) -> None:
    """Raises unless value is None, an int of 64 bits or a 0-d int64 tensor."""
    if value is None:
        return
    if hasattr(value, "shape"):
        check_dtype(value, name, "int64")
        if shape_of(value) != ():
            raise ValueError(f"{name} must be an int or a 0-d int64 tensor; got {name}.shape={shape_of(value)}")
    elif isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or a 0-d int64 tensor; got {name}={value!r}")
    elif not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must fit 64 bits; got {name}={value}")
