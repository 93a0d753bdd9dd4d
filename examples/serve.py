"""Serve a small model with a paged KV cache and continuous batching, and check every token against no cache at all.

A byte-level transformer learns the repository's text for some steps, then continues prompts greedily. Requests arrive
at different steps and leave when they are done; their pages, poisoned with NaN, go to the next ones at once.

    python examples/serve.py            # 300 steps of training, 24 requests
    python examples/serve.py --quick    # seconds
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

import kilat
from kilat.demo.data import load_bytes
from kilat.demo.model import ATTENTION, Block, ByteTransformer, ModelConfig, rotary_angles
from kilat.demo.train import TrainConfig, train

# Logits of two float32 runs differ by rounding alone, 2e-6 where seen: only a gap below twice that could be turned.
TIE = 1e-5


@dataclass
class Request:
    """A prompt, the number of tokens wanted and the step it arrives at; `tokens` grows behind the prompt."""

    prompt: list[int]
    wanted: int
    arrives: int
    tokens: list[int] = field(default_factory=list[int])
    logits: list[Tensor] = field(default_factory=list[Tensor])
    pages: list[int] = field(default_factory=list[int])
    cached: int = 0

    def pages_needed(self, page_size: int) -> int:
        """Pages at the request's end; the last token is never fed back, so it needs no place."""
        return -(-(len(self.prompt) + self.wanted - 1) // page_size)


class Server:
    """Page pools of all layers under one free list, requests that wait and requests that run.

    Raises ValueError for a page size or a number of pages below 1.
    """

    def __init__(self, model: ByteTransformer, page_size: int, num_pages: int) -> None:
        for name, value in (("page_size", page_size), ("num_pages", num_pages)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        self.model, self.page_size, self.num_pages = model, page_size, num_pages
        config = model.config
        shape = (config.num_layers, 2, num_pages, page_size, config.num_heads, config.head_dim)
        # NaN wherever no token lies: one stale read would reach the logits.
        self.pools = torch.full(shape, float("nan"))
        self.free = list(range(num_pages))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.batch_sizes: list[int] = []
        self.most_pages = 0
        self.step_number = 0
        angles = rotary_angles(num_pages * page_size, config.head_dim)[:, 0]
        self.rotary = kilat.Rotary(angles.real.contiguous(), angles.imag.contiguous(), interleaved=True)

    def submit(self, request: Request) -> None:
        """Queue a request, in the order of arrival; ValueError if it is empty or could not run even alone."""
        if not request.prompt or request.wanted < 1:
            raise ValueError(
                f"request must have a prompt and want a token; got {len(request.prompt)} and {request.wanted}"
            )
        needed = request.pages_needed(self.page_size)
        if needed > self.num_pages:
            raise ValueError(f"request must fit the pool's {self.num_pages} pages; got one that needs {needed}")
        self.waiting.append(request)

    def _admit(self) -> None:
        # First come, first served. Pages are promised for a request's whole life, so that no running one ever stalls.
        promised = sum(request.pages_needed(self.page_size) for request in self.running)
        while self.waiting and self.waiting[0].arrives <= self.step_number:
            promised += self.waiting[0].pages_needed(self.page_size)
            if promised > self.num_pages:
                break
            self.running.append(self.waiting.popleft())

    @torch.no_grad()
    def step(self) -> None:
        """Admit what fits, run one ragged mix of prompts and single tokens, and let go of what is done."""
        self._admit()
        self.step_number += 1
        if not self.running:
            return
        pieces = [(request.prompt + request.tokens)[request.cached :] for request in self.running]
        for request, piece in zip(self.running, pieces, strict=True):
            while len(request.pages) * self.page_size < request.cached + len(piece):
                request.pages.append(self.free.pop())
        self.most_pages = max(self.most_pages, self.num_pages - len(self.free))
        self.batch_sizes.append(len(self.running))
        logits = self._forward(pieces)
        for request, piece, row in zip(self.running, pieces, logits, strict=True):
            request.cached += len(piece)
            request.logits.append(row)
            request.tokens.append(int(row.argmax()))
            if len(request.tokens) == request.wanted:
                self.pools[:, :, request.pages] = float("nan")
                self.free.extend(request.pages)
                request.pages.clear()
        self.running = [request for request in self.running if len(request.tokens) < request.wanted]

    def _forward(self, pieces: list[list[int]]) -> Tensor:
        """Logits [batch, 256] of the last token of each running request's piece."""
        model, batch = self.model, self.running
        stops = torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0)
        offsets = stops.int()
        widest = max(len(request.pages) for request in batch)
        table = torch.tensor(
            [request.pages + [-1] * (widest - len(request.pages)) for request in batch], dtype=torch.int32
        )
        lengths = torch.tensor([request.cached for request in batch], dtype=torch.int32)
        x = model.embedding(torch.tensor([token for piece in pieces for token in piece]))
        for i, (request, piece) in enumerate(zip(batch, pieces, strict=True)):
            start, stop = int(stops[i]), int(stops[i + 1])
            before = [(request.prompt + request.tokens)[request.cached - 1], *piece[:-1]]
            skip = int(request.cached == 0)  # the first token of all has none before it
            x[start + skip : stop] += model.embedding_before(torch.tensor(before[skip:], dtype=torch.int64))
        plan = None
        for block, (k_pages, v_pages) in zip(model.blocks, self.pools, strict=True):
            if not isinstance(block, Block):
                raise TypeError(f"blocks must be of type Block; got {type(block).__name__}")
            # Lengths are each layer's own: every layer's append counts the new tokens.
            cache = kilat.PagedCache(k_pages, v_pages, table, lengths.clone())
            heads = block.qkv(block.norm_attention(x)).unflatten(-1, (3, model.config.num_heads, -1))
            q, k, v = heads.unbind(-3)
            # Shapes are those of all layers of this step, so its first layer plans for them all.
            plan = plan or kilat.plan(q, cache, cu_seqlens_q=offsets)
            out = kilat.cached_attention(
                q, cache, k_new=k, v_new=v, cu_seqlens_q=offsets, rotary=self.rotary, plan=plan
            )
            x = x + block.project(out.flatten(-2))
            x = x + block.mlp(block.norm_mlp(x))
        return model.logits(model.norm(x[stops[1:] - 1]))

    def run(self) -> None:
        """Step until nothing waits or runs."""
        while self.waiting or self.running:
            self.step()


@dataclass
class Checked:
    """Whether all tokens are those without a cache, the smallest gap of the best two logits, the largest error."""

    equal: bool
    gap: float
    difference: float


@torch.no_grad()
def check(model: ByteTransformer, request: Request) -> Checked:
    """Continue the prompt by whole forwards, one a token, and compare; logits only as far as the tokens agree."""
    tokens = list(request.prompt)
    gap, difference, equal = float("inf"), 0.0, len(request.tokens) == request.wanted
    for token, cached in zip(request.tokens, request.logits, strict=True):
        logits = model(torch.tensor([tokens]), ATTENTION["sdpa"])[0, -1]
        best = logits.topk(2).values
        if equal:
            gap = min(gap, float(best[0] - best[1]))
            difference = max(difference, float((logits - cached).abs().max()))
        tokens.append(int(logits.argmax()))
        equal = equal and tokens[-1] == token
    return Checked(equal, gap, difference)


def draw_requests(document: Tensor, count: int, longest: int, seed: int) -> list[Request]:
    """Draw prompts of 1 to `longest` bytes of the document, as many tokens wanted, arriving 0 to 4 steps apart."""
    generator = torch.Generator().manual_seed(seed)
    requests: list[Request] = []
    arrives = 0
    for _ in range(count):
        length, wanted = (int(n) for n in torch.randint(1, longest + 1, (2,), generator=generator))
        start = int(torch.randint(document.numel() - length, (1,), generator=generator))
        requests.append(Request(document[start : start + length].tolist(), wanted, arrives))
        arrives += int(torch.randint(5, (1,), generator=generator))
    return requests


def shown(tokens: list[int]) -> str:
    """Tokens as one line of text."""
    return " ".join(bytes(tokens).decode("utf-8", errors="replace").split())


def report(server: Server, requests: list[Request], seconds: float) -> int:
    """Check every request, print what came out, and return 1 if any differs."""
    start = time.perf_counter()
    found = [check(server.model, request) for request in requests]
    uncached = time.perf_counter() - start
    for request in requests[:3]:
        print(f"  {shown(request.prompt)!r} -> {shown(request.tokens)!r}")
    total, sizes = sum(len(request.tokens) for request in requests), server.batch_sizes
    print(f"{total} tokens: {total / seconds:.0f} a second cached, {total / uncached:.0f} uncached, one at a time")
    print(f"most pages in use: {server.most_pages} of {server.num_pages}, of {server.page_size} tokens each")
    print(f"requests in a step: {min(sizes)} at least, {statistics.mean(sizes):.1f} on average, {max(sizes)} at most")
    gap, difference = min(x.gap for x in found), max(x.difference for x in found)
    print(f"smallest gap of the best two logits {gap:.1e}; largest difference of logits {difference:.1e}")
    if gap < TIE:
        print(f"a gap below {TIE:.0e} is a near-tie, which rounding alone may turn")
    equal = sum(x.equal for x in found)
    print(f"equal token for token: {equal} of {len(requests)} requests")
    return int(equal != len(requests))


def main() -> int:
    """Train, serve, check; return 1 if a request's tokens differ from those without a cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps and requests")
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page")
    parser.add_argument("--steps", type=int, default=None, help="of training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, least in (("requests", 1), ("page_size", 1), ("steps", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}; got {value}")
    count = options.requests or (12 if options.quick else 24)
    steps = options.steps or (250 if options.quick else 300)
    longest = 24 if options.quick else 96

    torch.manual_seed(options.seed)
    document = load_bytes()
    model = ByteTransformer(ModelConfig(num_layers=2, num_heads=2, head_dim=32) if options.quick else ModelConfig())
    recipe = TrainConfig(batch=8, context=64 if options.quick else 256, steps=steps, seed=options.seed)
    losses = train(model, document, ATTENTION["kilat"], recipe)
    print(f"trained for {steps} steps: {losses[-1].loss:.2f} nats a byte", flush=True)

    requests = draw_requests(document, count, longest, options.seed)
    # Room for about four of the longest requests, so that others wait for pages.
    server = Server(model, options.page_size, 4 * -(-2 * longest // options.page_size))
    for request in requests:
        server.submit(request)
    warm = Server(model, options.page_size, server.num_pages)
    warm.submit(Request([32, 32], 2, 0))
    warm.run()  # compiles kernels
    start = time.perf_counter()
    server.run()
    return report(server, requests, time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
