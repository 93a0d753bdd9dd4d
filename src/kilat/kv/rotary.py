"""Rotary position embedding (RoFormer: Su et al. 2021, arXiv 2104.09864)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilat.numpy_door import as_tensor
from kilat.validate_basic import check_device, check_rank, check_tensor, fail


class Rotary:
    """Turns pairs of channels (x1, x2) at position n to (x1 cos - x2 sin, x2 cos + x1 sin), with cos = cos[n, pair].

    cos, sin [max_position, rotary_dim / 2]. The pairs of the first rotary_dim channels are (c, c + rotary_dim / 2), or
    (2 c, 2 c + 1) if interleaved; channels beyond stay. Raises ValueError for tables of different shapes.
    """

    def __init__(self, cos: Any, sin: Any, interleaved: bool = False) -> None:
        self.cos = as_tensor("cos", cos) if isinstance(cos, np.ndarray) else check_tensor("cos", cos)
        self.sin = as_tensor("sin", sin) if isinstance(sin, np.ndarray) else check_tensor("sin", sin)
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            check_rank(name, table, ("max_position", "rotary_dim / 2"))
            if not table.is_floating_point():
                fail(TypeError, f"{name} must hold floats", dtype=table.dtype)
        if self.cos.shape != self.sin.shape:
            fail(ValueError, "cos and sin must have the same shape", cos=self.cos.shape, sin=self.sin.shape)
        check_device("sin", self.sin, self.cos.device)
        self.interleaved = bool(interleaved)

    @property
    def rotary_dim(self) -> int:
        """Channels that are turned."""
        return 2 * self.cos.shape[1]

    def apply(self, x: Any, offsets: Any, same_position: bool = False) -> Any:
        """x turned to its positions, in float32 (float64 for float64), in x's dtype; differentiable.

        - x [batch, seqlen, heads, head_dim]: token t of entry b is at offsets[b] + t (an int for all), or all at
          offsets[b] with same_position. x [total, heads, head_dim]: offsets [total] are the positions themselves.

        Raises ValueError on CPUs for a position outside the tables; elsewhere positions are clamped into them.
        """
        if isinstance(x, np.ndarray):
            with torch.no_grad():
                return self.apply(as_tensor("x", x), offsets, same_position).numpy()
        check_tensor("x", x)
        if x.shape[-1] < self.rotary_dim:
            fail(ValueError, "rotary_dim must not exceed head_dim", rotary_dim=self.rotary_dim, head_dim=x.shape[-1])
        check_device("x", x, self.cos.device)
        return self.turn(x, self.positions(x, offsets, same_position))

    def positions(self, x: Tensor, offsets: Any, same_position: bool) -> Tensor:
        """The position of each token, int64 [batch, seqlen] or [total]."""
        if isinstance(offsets, np.ndarray):
            offsets = as_tensor("offsets", offsets)
        if x.dim() == 4:
            start = torch.as_tensor(offsets, device=x.device).long()
            if start.dim() == 0:
                start = start.expand(x.shape[0])
            if start.dim() != 1 or start.shape[0] != x.shape[0]:
                fail(ValueError, "offsets must be an int or [batch]", batch=x.shape[0], shape=start.shape)
            step = torch.zeros if same_position else torch.arange
            return start[:, None] + step(x.shape[1], dtype=torch.int64, device=x.device)
        if x.dim() != 3:
            shape = "[batch, seqlen, heads, head_dim] or [total, heads, head_dim]"
            fail(ValueError, f"x must be {shape}", shape=x.shape)
        position = torch.as_tensor(offsets, device=x.device).long()
        if position.shape != x.shape[:1]:
            fail(ValueError, "offsets must be the positions [total]", total=x.shape[0], shape=position.shape)
        return position

    def turn(self, x: Tensor, position: Tensor) -> Tensor:
        """x [..., heads, head_dim] turned to `position` int64 [...]."""
        limit = self.cos.shape[0]
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            if position.numel() and (int(position.min()) < 0 or int(position.max()) >= limit):
                worst = int(position.max()) if int(position.max()) >= limit else int(position.min())
                fail(ValueError, "positions must lie in the rotary tables", max_position=limit, position=worst)
        else:
            position = position.clamp(0, max(limit - 1, 0))
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = (table[position].to(work)[..., None, :] for table in (self.cos, self.sin))
        turned, rest = x[..., : self.rotary_dim].to(work), x[..., self.rotary_dim :]
        if self.interleaved:
            x1, x2 = turned[..., 0::2], turned[..., 1::2]
            both = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
        else:
            x1, x2 = turned.chunk(2, -1) if self.rotary_dim else (turned, turned)
            both = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
        return torch.cat((both.to(x.dtype), rest), -1)
