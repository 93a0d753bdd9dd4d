"""Training for a number of seconds or of steps, and a line of generated text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kilat.demo.data import random_batch
from kilat.demo.model import AttentionFunction, ByteTransformer, next_byte_loss


@dataclass(frozen=True)
class TrainConfig:
    """Recipe of the demo's training run; it ends after `seconds` or `steps`, whichever is given and comes first."""

    batch: int = 16
    context: int = 256
    learning_rate: float = 4e-3
    seconds: float | None = None
    steps: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class StepReport:
    """One training step: its number, its loss in nats a byte, its seconds, and the share of the run that is done."""

    step: int
    loss: float
    seconds: float
    progress: float


def train(
    model: ByteTransformer,
    document: Tensor,
    attention: AttentionFunction,
    config: TrainConfig,
    on_step: Callable[[StepReport], None] | None = None,
) -> list[StepReport]:
    """Train with AdamW and a cosine learning rate on random windows of the document; return every step's report.

    Raises ValueError if neither seconds nor steps bound the run.
    """
    if config.seconds is None and config.steps is None:
        raise ValueError("seconds or steps must be given; got neither")
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    # A short file still trains: its windows are as long as it allows.
    context = min(config.context, document.numel() - 1)
    reports: list[StepReport] = []
    start = time.perf_counter()
    progress = 0.0
    while progress < 1.0:
        step_start = time.perf_counter()
        warmup = min(1.0, (len(reports) + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * warmup * (0.05 + 0.95 * math.cos(progress * math.pi / 2) ** 2)
        inputs, targets = random_batch(document, config.batch, context, generator)
        loss = next_byte_loss(model(inputs, attention), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        now = time.perf_counter()
        by_time = (now - start) / config.seconds if config.seconds is not None else 0.0
        by_steps = (len(reports) + 1) / config.steps if config.steps is not None else 0.0
        progress = max(by_time, by_steps)
        reports.append(StepReport(len(reports) + 1, loss.item(), now - step_start, min(1.0, progress)))
        if on_step is not None:
            on_step(reports[-1])
    return reports


@torch.no_grad()
def generate(
    model: ByteTransformer,
    prompt: bytes,
    attention: AttentionFunction,
    *,
    length: int = 100,
    context: int = 256,
    temperature: float = 0.6,
    seed: int = 0,
) -> str:
    """Continue a prompt by `length` sampled bytes, line ends as spaces, unprintable characters as dots."""
    if not prompt:
        raise ValueError("prompt must hold at least one byte; got none")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(list(prompt))[None]
    for _ in range(length):
        logits = model(tokens[:, -context:], attention)[0, -1]
        token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        tokens = torch.cat([tokens, token[None]], 1)
    text = bytes(tokens[0, len(prompt) :].tolist()).decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))
