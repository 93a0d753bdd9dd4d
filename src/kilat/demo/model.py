"""A byte-level causal transformer whose attention is handed in, so that kilat and its peers run the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_BYTES = 256
ROTARY_BASE = 10000.0

# q, k, v and the result are [batch, seqlen, num_heads, head_dim]; the mask is causal.
AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer; the defaults train to readable syllables within seconds on two cores."""

    num_layers: int = 3
    num_heads: int = 2
    head_dim: int = 64

    @property
    def width(self) -> int:
        """Width of the residual stream: num_heads * head_dim."""
        return self.num_heads * self.head_dim


def kilat_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention through kilat."""
    import kilat

    return kilat.attention(q, k, v, mask=kilat.Causal())


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention through torch's SDPA, which wants `[batch, num_heads, seqlen, head_dim]`."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return out.transpose(1, 2)


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v as the formula reads, causal, with the whole score matrix in memory."""
    s = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k)  # [batch, num_heads, seqlen, seqlen]
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
    p = s.masked_fill_(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", p, v)


ATTENTION: dict[str, AttentionFunction] = {
    "kilat": kilat_attention,
    "sdpa": sdpa_attention,
    "naive": naive_attention,
}


def rotary_angles(seqlen: int, head_dim: int) -> Tensor:
    """Return the rotation angles position * base^(-2 t / head_dim) as complex64 `[seqlen, 1, head_dim / 2]`."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(seqlen, dtype=torch.float64)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring pairs of `[batch, seqlen, num_heads, head_dim]` by their position's angles."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2)


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm_attention = nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.RMSNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def heads(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v, each `[batch, seqlen, num_heads, head_dim]`, of `[batch, seqlen, width]`."""
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.config.num_heads, -1)).unbind(2)
        return rotate(q, angles), rotate(k, angles), v

    def forward(self, x: Tensor, angles: Tensor, attention: AttentionFunction) -> Tensor:
        """Map `[batch, seqlen, width]` to the same shape."""
        out = attention(*self.heads(x, angles))  # [batch, seqlen, num_heads, head_dim]
        x = x + self.project(out.flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class ByteTransformer(nn.Module):
    """Next-byte predictor: embeddings, blocks, logits over 256 bytes; rotary positions, so any length runs.

    A second embedding looks at the byte before, so that pairs are learned in the first seconds and attention has
    words to find.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(NUM_BYTES, config.width)
        self.embedding_before = nn.Embedding(NUM_BYTES, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.logits = nn.Linear(config.width, NUM_BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.embedding_before.weight, std=0.5)
        nn.init.zeros_(self.logits.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first block, `[batch, seqlen, width]`."""
        return self.embedding(tokens) + F.pad(self.embedding_before(tokens[:, :-1]), (0, 0, 1, 0))

    def first_heads(self, tokens: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v of the first block, for runs of one attention call."""
        block = self.blocks[0]
        if not isinstance(block, Block):
            raise TypeError(f"blocks must be of type Block; got {type(block).__name__}")
        return block.heads(self.embed(tokens), angles)

    def forward(self, tokens: Tensor, attention: AttentionFunction) -> Tensor:
        """Return next-byte logits `[batch, seqlen, 256]` of int64 tokens `[batch, seqlen]`."""
        angles = rotary_angles(tokens.shape[1], self.config.head_dim)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, angles, attention)
        return self.logits(self.norm(x))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte of logits `[batch, seqlen, 256]` against targets `[batch, seqlen]`."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
