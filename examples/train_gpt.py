"""Train the same small causal transformer twice on a real text, with kilat and with torch's SDPA, step by step.

Both start from the same weights and see the same batches, so their losses must agree but for rounding. Steps
alternate, so that both are timed on the same machine in the same state.

    python examples/train_gpt.py            # 200 steps
    python examples/train_gpt.py --quick    # seconds
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time

import torch

from kilat.demo.data import load_bytes, random_batch
from kilat.demo.model import ATTENTION, ByteTransformer, ModelConfig, next_byte_loss

# Nats a byte. Outputs differ by 1e-7, which losses in float32 may not show at first (before the first update none can:
# the logits start at 0) and which every update can enlarge; this bounds the whole run.
TOLERANCE = 0.05
CONTENDERS = ("kilat", "sdpa")


def step(
    name: str, model: ByteTransformer, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float]:
    """Take one training step and return its loss and its seconds."""
    inputs, targets = batch
    start = time.perf_counter()
    loss = next_byte_loss(model(inputs, ATTENTION[name]), targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.item(), time.perf_counter() - start


def main() -> int:
    """Train, print both loss curves side by side, and return 1 if they differ by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model for a few steps")
    parser.add_argument("--steps", type=int, default=None)
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1; got {options.steps}")
    steps = options.steps or (8 if options.quick else 200)
    batch, context = (2, 65) if options.quick else (4, 1024)

    torch.manual_seed(0)
    document = load_bytes()
    first = ByteTransformer(ModelConfig(num_layers=1, num_heads=2, head_dim=32) if options.quick else ModelConfig())
    models = {"kilat": first, "sdpa": copy.deepcopy(first)}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1.5e-3) for name, model in models.items()}
    generator = torch.Generator().manual_seed(1)

    losses: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    print(f"{'step':>5}  {'kilat':>8}  {'sdpa':>8}  difference   (loss in nats a byte)")
    for number in range(1, steps + 1):
        drawn = random_batch(document, batch, context, generator)
        for name in CONTENDERS if number % 2 else reversed(CONTENDERS):
            loss, seconds = step(name, models[name], optimizers[name], drawn)
            losses[name].append(loss)
            times[name].append(seconds)
        if number == 1 or number % max(1, steps // 10) == 0:
            ours, peer = losses["kilat"][-1], losses["sdpa"][-1]
            print(f"{number:>5}  {ours:>8.4f}  {peer:>8.4f}  {abs(ours - peer):.1e}", flush=True)

    largest = max(abs(a - b) for a, b in zip(losses["kilat"], losses["sdpa"], strict=True))
    medians = {name: statistics.median(times[name]) for name in CONTENDERS}
    pairs = zip(*(models[name].parameters() for name in CONTENDERS), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    print(f"largest difference {largest:.1e}, allowed {TOLERANCE}; of the trained weights {apart:.1e}")
    print(f"step time: kilat {medians['kilat'] * 1e3:.1f} ms, sdpa {medians['sdpa'] * 1e3:.1f} ms (medians)")
    return int(not largest <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
