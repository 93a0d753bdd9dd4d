"""What all caches share: the caller's tensors, their lengths, and appending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kilat.numpy_door import as_tensor
from kilat.problem import Operands
from kilat.validate_basic import check_int32, check_tensor, fail

if TYPE_CHECKING:
    from typing_extensions import Self

    from kilat.kv.rotary import Rotary


class Cache:
    """Keys and values of several sequences, in tensors of the caller that are never copied.

    A subclass sets `k` and `v`, whose last two axes are [num_heads_kv, head_dim] and whose first two are what `locate`
    returns indices of, and `lengths` int32 [batch], the tokens of each sequence; and defines `batch`, `capacity`,
    `locate` and `operands`. `overflow` is a bool tensor [], set where an append found no room and could not raise.

    k and v of float8_e4m3fn or int8 are quantised, value = stored * scale: `k_scale` and `v_scale` are then float32,
    [num_heads_kv] or, one a token and head, [first two axes of k, num_heads_kv].
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    overflow: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    ring_first: int | None = None
    """Of a ring: the first tokens, which are kept."""
    shares_values = False
    """Whether v is a part of k, so that an append writes keys only."""

    def __init__(self, k: Any, v: Any, lengths: Any, k_scale: Any = None, v_scale: Any = None) -> None:
        self.holds_numpy = isinstance(k, np.ndarray)
        given: dict[str, Any] = {"k": k, "v": v, "lengths": lengths, "k_scale": k_scale, "v_scale": v_scale}
        given = {name: value for name, value in given.items() if value is not None or not name.endswith("_scale")}
        for name, value in given.items():
            if isinstance(value, np.ndarray) is not self.holds_numpy:
                fail(
                    TypeError, "a cache must hold either torch tensors or NumPy arrays", **{name: type(value).__name__}
                )
        self.writable = not self.holds_numpy or all(x.flags.writeable for x in given.values())
        self.k, self.v, self.lengths = shared("k", k), shared("v", v), shared("lengths", lengths)
        self.k_scale = None if k_scale is None else shared("k_scale", k_scale)
        self.v_scale = None if v_scale is None else shared("v_scale", v_scale)
        if self.lengths.dim() != 1:
            fail(ValueError, "lengths must be [batch]", shape=self.lengths.shape)
        check_int32("lengths", self.lengths, self.lengths.shape, "batch", self.k.device)
        self.overflow = torch.zeros((), dtype=torch.bool, device=self.k.device)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence can have."""
        raise NotImplementedError(f"{type(self).__name__} must define capacity")

    def locate(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """Indices of the first axes of k and v for tokens at `position` of `sequence`, both int64 [n]."""
        raise NotImplementedError(f"{type(self).__name__} must define locate")

    def lasting(self, position: Tensor, after: Tensor, longest: int) -> Tensor | None:
        """Which tokens of an append are still there at its end, bool [n]; None: all are.

        Token i goes to position[i] of a sequence that will have after[i] tokens, at most `longest` of them new.
        """
        return None

    def operands(self, q: Any) -> Operands:
        """Operands of a call: k, v, `seqlens_kv`, scales, and for pages `page_table`."""
        return Operands(q, self.k, self.v, seqlens_kv=self.lengths, k_scale=self.k_scale, v_scale=self.v_scale)

    def append(
        self,
        k_new: Any,
        v_new: Any,
        *,
        cu_seqlens_new: Any = None,
        batch_index: Any = None,
        rotary: Rotary | None = None,
    ) -> Self:
        """Write new keys and values behind those of each sequence, then add their number to `lengths`, all in place.

        - k_new, v_new [n, seqlen, num_heads_kv, head_dim], or [total, num_heads_kv, head_dim] with cu_seqlens_new
          int32 [n + 1]; v_new is None where the values are a part of the keys.
        - batch_index: integers [n], the sequences that the new tokens belong to; None means all, in order.
        - rotary: turns k_new to its positions lengths[b] + t first.

        A quantised cache takes floats. With one scale a token and head, scale = max |x| / 448 (float8_e4m3fn) or
        max |x| / 127 (int8) is written beside the token; with one a head, that scale is used. stored = x / scale, in
        float32, is rounded to the nearest and never leaves the type's range (int8 has no NaN: it is stored as 0).

        Returns the cache. Raises ValueError before anything is written where there is no room; on a GPU what fits is
        written and `overflow` set, and under torch.compile the index that is too large raises when the step runs.
        """
        from kilat.kv.append import prepared

        prepared(self, k_new, v_new, cu_seqlens_new, batch_index, rotary).write()
        return self


def shared(name: str, value: Any) -> Tensor:
    """A tensor over the caller's memory: writes must reach it."""
    if not isinstance(value, np.ndarray):
        return check_tensor(name, value)
    tensor = as_tensor(name, value)
    if value.size and tensor.data_ptr() != value.__array_interface__["data"][0]:
        fail(ValueError, f"{name} must have strides that torch can address", strides=value.strides)
    return tensor


def swapped(x: Any) -> Any:
    """x [n, heads, tokens, ...] as [n, tokens, heads, ...]; None and scales [heads] as they are."""
    return x if x is None or len(x.shape) < 2 else x.swapaxes(1, 2)
