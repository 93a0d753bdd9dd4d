"""One document as one sequence through the same weights, by every way of attention, each in its own process."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kilat.bench.memory import in_fresh_process, measure_peak, return_freed_memory
from kilat.bench.oracle import forward_rows, sample_rows
from kilat.demo.model import ATTENTION, AttentionFunction, ByteTransformer, ModelConfig, next_byte_loss, rotary_angles
from kilat.numerics import max_error

# Two float32 runs of one model differ by rounding alone; seen: 1e-5 of the largest logit at 32k bytes.
LOGIT_TOLERANCE = 2e-4
# A float32 attention output is a mean of v: seen errors are below 1e-6 of the largest |v|.
OUTPUT_TOLERANCE = 1e-5
CHECKED_ROWS = 16
WARMUP_LENGTH = 512
# Scores, their softmax and a boolean mask: bytes for each pair of positions that the naive form holds at once.
NAIVE_BYTES_PER_PAIR = 9
# Seen: a naive call over 25k bytes takes 4 to 15 times as long as one of SDPA; most of it goes into touching memory.
NAIVE_SLOWDOWN = 10.0
NAIVE_SECONDS = 60.0

Weights = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class LongRun:
    """What one way of computing attention did with the document.

    `attention_seconds` is the mean of an attention call, `extra_bytes` the largest peak of one above its inputs and
    output, `error` its largest difference from float64 on sampled rows as a share of the largest |v|. `first_out` is
    the first layer's attention output `[length, num_heads, head_dim]`; what needs the whole model is None where only
    the first layer's attention ran.
    """

    name: str
    length: int
    attention_seconds: float
    extra_bytes: int
    memory_method: str
    error: float
    first_out: npt.NDArray[np.float32]
    model_seconds: float | None = None
    bits_per_byte: float | None = None
    logits: npt.NDArray[np.float32] | None = None

    def to_json(self) -> dict[str, object]:
        """Return everything but the arrays as plain values."""
        return {key: value for key, value in vars(self).items() if key not in ("logits", "first_out")}


class _Watch:
    """An attention function that measures every call of another and checks sampled rows of it against float64."""

    def __init__(self, attention: AttentionFunction) -> None:
        self.attention = attention
        self.seconds: list[float] = []
        self.overhead = 0.0
        self.extra_bytes = 0
        self.error = 0.0
        self.method = ""
        self.first_out: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        entered = time.perf_counter()
        spent = 0.0

        def call() -> Tensor:
            nonlocal spent
            start = time.perf_counter()
            out = self.attention(q, k, v)
            spent = time.perf_counter() - start
            return out

        out, peak = measure_peak(call)
        self.method = peak.method
        self.extra_bytes = max(self.extra_bytes, peak.extra - out.numel() * out.element_size())
        rows = sample_rows(q.shape[1], CHECKED_ROWS)
        expected = forward_rows(q, k, v, rows, causal=True)
        self.error = max(self.error, max_error(out[:, rows], expected.exact) / float(v.abs().max()))
        if self.first_out is None:
            self.first_out = out
        self.seconds.append(spent)
        self.overhead += time.perf_counter() - entered - spent
        return out


def model_weights(model: ByteTransformer) -> Weights:
    """Return the parameters as NumPy arrays, which travel to another process without shared memory."""
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


@dataclass(frozen=True)
class _Job:
    """Everything that the process of one run needs."""

    name: str
    config: ModelConfig
    weights: Weights
    tokens: npt.NDArray[np.int64]
    threads: int
    first_layer_only: bool


@torch.no_grad()
def _run(job: _Job) -> LongRun:
    return_freed_memory()
    torch.set_num_threads(job.threads)
    model = ByteTransformer(job.config)
    model.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in job.weights.items()})
    tokens = torch.from_numpy(job.tokens)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model(inputs[:, :WARMUP_LENGTH], ATTENTION[job.name])  # compiles kernels, starts threads
    watch = _Watch(ATTENTION[job.name])
    start = time.perf_counter()
    logits: Tensor | None = None
    if job.first_layer_only:
        angles = rotary_angles(inputs.shape[1], job.config.head_dim)
        watch(*model.first_heads(inputs, angles))
    else:
        logits = model(inputs, watch)
    seconds = time.perf_counter() - start - watch.overhead
    if watch.first_out is None:
        raise RuntimeError("the model must have at least one layer; got none")
    return LongRun(
        name=job.name,
        length=inputs.shape[1],
        attention_seconds=sum(watch.seconds) / len(watch.seconds),
        extra_bytes=watch.extra_bytes,
        memory_method=watch.method,
        error=watch.error,
        first_out=watch.first_out[0].numpy(),
        model_seconds=None if logits is None else seconds,
        bits_per_byte=None if logits is None else next_byte_loss(logits, targets).item() / math.log(2),
        logits=None if logits is None else logits[0].numpy(),
    )


def run_long(name: str, model: ByteTransformer, tokens: Tensor, *, first_layer_only: bool = False) -> LongRun:
    """Run the model over int64 tokens `[1, length + 1]` in a fresh process with the attention of that name.

    Raises RuntimeError if the process dies, as it does when memory runs out.
    """
    job = _Job(name, model.config, model_weights(model), tokens.numpy(), torch.get_num_threads(), first_layer_only)
    return in_fresh_process(_run, job, f"{name} over {tokens.shape[1] - 1} bytes")


def naive_length(available: int, num_heads: int, longest: int) -> int:
    """Largest length, in steps of 256 up to `longest`, whose score matrices fit half of the available bytes."""
    pairs = available // 2 // (NAIVE_BYTES_PER_PAIR * num_heads)
    return min(longest, max(256, math.isqrt(pairs) // 256 * 256))


def patient_length(fitting: int, sdpa: LongRun) -> int:
    """Shorten a length that fits the memory, if need be, to one whose naive run should end within NAIVE_SECONDS."""
    expected = NAIVE_SLOWDOWN * sdpa.attention_seconds * (fitting / sdpa.length) ** 2
    if expected <= NAIVE_SECONDS:
        return fitting
    return min(fitting, max(256, int(fitting * math.sqrt(NAIVE_SECONDS / expected)) // 256 * 256))


@dataclass(frozen=True)
class Difference:
    """Largest difference of two runs over the rows that both have, what it is a difference of, and what is allowed."""

    name: str
    peer: str
    of: str
    rows: int
    largest: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within what is allowed; a NaN is not."""
        return self.largest <= self.allowed


def difference(run: LongRun, peer: LongRun) -> Difference:
    """Compare the logits of two runs, or the first layer's attention outputs where one of them has no logits.

    Causality makes a shorter run equal the first rows of a longer one.
    """
    rows = min(run.length, peer.length)
    if run.logits is not None and peer.logits is not None:
        of, mine, theirs, tolerance = "logits", run.logits, peer.logits, LOGIT_TOLERANCE
    else:
        of, mine, theirs, tolerance = "outputs of the first layer", run.first_out, peer.first_out, OUTPUT_TOLERANCE
    largest = float(np.abs(mine[:rows].astype(np.float64) - theirs[:rows]).max())
    return Difference(run.name, peer.name, of, rows, largest, tolerance * float(np.abs(theirs[:rows]).max()))
