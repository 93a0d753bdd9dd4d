# pyright: basic, reportOperatorIssue=false
# Triton's compiler reads these functions, not Python: values are tensors of Triton, which carry no types here.
"""Tile functions of score modifiers and dropout; indices and `at` as in tiles.py."""

from __future__ import annotations

import triton
import triton.language as tl

from kilat.backends.triton.tiles import load_pairs, plain
from kilat.backends.triton.tiles_user import tanh


@triton.jit
def modify_scores(s, scores, numbers, i, j, at, spec: tl.constexpr, USERS: tl.constexpr):
    """Scores after softcap, ALiBi, bias and the first USERS user functions; s = scale q k^T, of i's and j's shape."""
    b, h, _, q_len, kv_len = at
    q_pos = i + (kv_len - q_len)
    if spec.softcap:
        s = numbers.softcap * tanh(s / numbers.softcap)
    if scores.slopes is not None:
        slope = tl.load(scores.slopes + b.to(tl.int64) * plain(scores.slopes_batch) + h).to(tl.float32)
        s = s - slope * tl.abs(q_pos - j).to(tl.float32)
    if scores.bias is not None:
        s = s + load_pairs(scores.bias, i, j, at, spec, 0.0).to(tl.float32)
    for n in tl.static_range(USERS):
        s = spec.users[n](s, b, h, q_pos, j, scores.users[n])
    return s


@triton.jit
def score_gradient(ds, s, scores, numbers, i, j, at, spec: tl.constexpr, N: tl.constexpr):
    """The gradient of the scores before user function N (N = -1: before softcap), from that after it.

    s is scale q k^T. Slopes are not finite where a hidden pair's score is not: mask the result.
    """
    b, h, _, q_len, kv_len = at
    if N >= 0:
        before = modify_scores(s, scores, numbers, i, j, at, spec, N)
        return ds * spec.d_users[N](before, b, h, i + (kv_len - q_len), j, scores.users[N])
    else:
        if spec.softcap:
            t = tanh(s / numbers.softcap)
            return ds * (1.0 - t * t)
        else:
            return ds


# ---- dropout ---------------------------------------------------------------------------------------------------------
@triton.jit
def philox_round(c0, c1, c2, c3, k0, k1):
    """One round of Philox4x32 (Salmon et al., SC 2011); all uint32."""
    return (
        tl.umulhi(c2, 0xCD9E8D57) ^ c1 ^ k0,
        c2 * 0xCD9E8D57,
        tl.umulhi(c0, 0xD2511F53) ^ c3 ^ k1,
        c0 * 0xD2511F53,
    )


@triton.jit
def load_word(value, low, high):
    """The low and the high word (uint32) of an int64 in memory, or those given."""
    if value is not None:
        x = tl.load(value)
        return x.to(tl.uint32), (x >> 32).to(tl.uint32)
    else:
        return low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)


@triton.jit
def kept(dropout, numbers, i, j0, at, seqs, spec: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Which probabilities of queries i [block_q, 1] and keys j0 to j0 + BLOCK_KV are kept: bool [block_q, BLOCK_KV].

    j0 is a multiple of 4: four keys share a counter.
    """
    b, h, _, _, _ = at
    if spec.dropout == "keep":
        j = j0 + tl.arange(0, BLOCK_KV)[None, :]
        return load_pairs(dropout.keep, i, j, at, spec, 0) != 0
    else:
        seed_low, seed_high = load_word(dropout.seed, plain(numbers.seed_low), plain(numbers.seed_high))
        offset_low, offset_high = load_word(dropout.offset, plain(numbers.offset_low), plain(numbers.offset_high))
        k0 = seed_low
        k1 = seed_high ^ offset_high
        fours = (j0 // 4 + tl.arange(0, BLOCK_KV // 4))[None, :]
        zero = (i * 0 + fours * 0).to(tl.uint32)  # [block_q, BLOCK_KV / 4]
        c0 = zero + fours.to(tl.uint32)
        c1 = zero + i.to(tl.uint32)
        c2 = zero + (b * plain(seqs.heads_q) + h).to(tl.uint32)
        c3 = zero + offset_low
        for _ in tl.static_range(10):
            c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
            k0 = k0 + 0x9E3779B9
            k1 = k1 + 0xBB67AE85
        words = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))  # [block_q, BLOCK_KV]
        return words >= plain(numbers.threshold).to(tl.uint32, bitcast=True)
