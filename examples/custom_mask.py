"""A mask of one's own: frames of a video, each of which sees itself and some frames before it.

Two integer functions say where the keys that a query may see begin and end. Everything else follows from them: which
blocks kernels visit, which need no mask at all, the backward, the picture.

    python examples/custom_mask.py [--quick] [--save mask.svg]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import kilat
from kilat.masks import IntervalMask
from kilat.masks.ops import fdiv


# --8<-- [start:mask]
@dataclass(frozen=True)
class Frames(IntervalMask):
    size: int  # tokens of a frame
    history: int  # frames before its own that a token sees

    @staticmethod
    def kv_start(q_pos: Any, i: Any, p: Any) -> Any:
        return (fdiv(q_pos, p.size) - p.history) * p.size

    @staticmethod
    def kv_stop(q_pos: Any, i: Any, p: Any) -> Any:
        return (fdiv(q_pos, p.size) + 1) * p.size


# --8<-- [end:mask]


def main() -> int:
    """Draw the mask, then compare kilat with torch under the same mask written out; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="130 tokens instead of 4,096")
    parser.add_argument("--save", type=Path, default=None, help="write the picture to this .svg or .txt file")
    options = parser.parse_args()
    if options.save is not None and (options.save.suffix not in (".svg", ".txt") or not options.save.parent.is_dir()):
        parser.error(f"--save must be an .svg or .txt file in an existing folder; got {options.save}")
    picture = Frames(size=4, history=1).plot(16)
    print(picture)
    if options.save is not None:
        picture.save(options.save)

    seqlen, mask = (130, Frames(16, 1)) if options.quick else (4096, Frames(256, 1))
    q, k, v = torch.randn(3, 1, seqlen, 4, 64, generator=torch.Generator().manual_seed(0))
    kilat.attention(q, k, v, mask=mask)  # compiles
    start = time.perf_counter()
    out = kilat.attention(q, k, v, mask=mask)
    middle = time.perf_counter()
    kilat.attention(q, k, v)
    stop = time.perf_counter()
    print(f"{seqlen:,} tokens: {(middle - start) * 1e3:.1f} ms under the mask, {(stop - middle) * 1e3:.1f} ms without")

    frame = torch.arange(seqlen) // mask.size
    distance = frame[:, None] - frame[None, :]
    visible = (distance >= 0) & (distance <= mask.history)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible)
    difference = float((out - expected.transpose(1, 2)).abs().max())
    print(f"largest difference from torch with the mask written out: {difference:.1e}")
    return int(not difference < 1e-5)


if __name__ == "__main__":
    sys.exit(main())
