"""torch's scaled_dot_product_attention for the cases that it can express, through a mask that holds every score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kilat.masks.ranges import dense_mask
from kilat.scores import Alibi, Bias


@dataclass(frozen=True)
class TorchPeer:
    """The options of a call, as far as they decide whether torch can do it."""

    mask: Any
    scores: tuple[Any, ...]
    sink: Any
    dropout: Any
    counts: dict[str, Tensor]
    cache: Any

    def refusal(self) -> str:
        """Why torch has no such call; empty if it has."""
        others = [type(score).__name__.lower() for score in self.scores if not isinstance(score, Alibi | Bias)]
        reasons = ["sink"] * (self.sink is not None) + ["given dropout"] * (self.dropout is not None)
        reasons += ["lengths"] * bool(self.counts) + ["caches"] * (self.cache is not None)
        reasons += ["user scores" if name == "score" else name for name in others]
        return f"no {', '.join(reasons)}" if reasons else ""

    def attention_mask(self, q: Tensor, k: Tensor) -> Tensor | None:
        """What torch adds to the scores, in the dtype of q as torch wants it, -inf where the mask hides a key."""
        if self.mask is None and not self.scores:
            return None
        seqlen_q, seqlen_kv = q.shape[1], k.shape[1]
        visible = torch.from_numpy(dense_mask(self.mask, q.shape[0], q.shape[2], seqlen_q, seqlen_kv))
        if not self.scores:
            return visible
        added = torch.zeros(visible.shape, dtype=torch.float64)
        for score in self.scores:
            tensor = score.tensors()[0].detach().double()
            if isinstance(score, Alibi):
                q_pos = torch.arange(seqlen_q)[:, None] + seqlen_kv - seqlen_q
                tensor = -tensor.reshape(-1, tensor.shape[-1], 1, 1) * (q_pos - torch.arange(seqlen_kv)).abs()
            added = added + tensor
        return added.masked_fill(~visible, float("-inf")).to(q.dtype)

    def results(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None
    ) -> tuple[dict[str, Tensor], str]:
        """Return out and the gradients of q, k, v, or nothing and the reason why."""
        reason = self.refusal()
        if reason:
            return {}, reason
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(
            leaves[0],
            leaves[1],
            leaves[2],
            attn_mask=self.attention_mask(q, k),
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        grads = torch.autograd.grad(out, leaves, do.transpose(1, 2))
        found = dict(zip(("q", "k", "v"), grads, strict=True)) | {"out": out.detach()}
        return {name: x.transpose(1, 2) for name, x in found.items()}, ""
