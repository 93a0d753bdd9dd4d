"""The demo's text, model, training and long-document comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kilat.demo import compare, data, model, train


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TINY = model.ModelConfig(num_layers=1, num_heads=2, head_dim=16)


def test_the_text_is_long_enough_and_plain() -> None:
    text = bytes(data.load_bytes().tolist())
    assert len(text) >= 131072
    assert text.isascii()
    assert b"\r" not in text
    assert b"Down the Rabbit-Hole" in text


def test_a_file_of_the_users_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc" * 2000)
    assert data.load_bytes(path).numel() == 6000
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="file must hold at least 4096 bytes of text; got 3"):
        data.load_bytes(path)
    with pytest.raises(ValueError, match="file must be an existing file"):
        data.load_bytes(tmp_path / "none")


def test_a_short_document_is_read_again() -> None:
    document = torch.arange(5, dtype=torch.uint8)
    assert data.first_tokens(document, 12).tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]]


def test_targets_are_the_next_bytes() -> None:
    document = torch.arange(200, dtype=torch.uint8)
    inputs, targets = data.random_batch(document, 3, 17, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (3, 17)
    assert (targets == inputs + 1).all()


@pytest.mark.parametrize("name", model.ATTENTION)
def test_the_model_is_causal_and_every_attention_agrees(name: str) -> None:
    torch.manual_seed(0)
    network = model.ByteTransformer(TINY)
    torch.nn.init.normal_(network.logits.weight)
    tokens = torch.randint(0, 256, (2, 67))
    with torch.no_grad():
        logits = network(tokens, model.ATTENTION[name])
        expected = network(tokens, model.naive_attention)
        shorter = network(tokens[:, :40], model.ATTENTION[name])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[:, :40], shorter, atol=1e-4, rtol=1e-4)


def test_training_with_kilat_lowers_the_loss() -> None:
    torch.manual_seed(0)
    network = model.ByteTransformer(TINY)
    config = train.TrainConfig(batch=2, context=33, learning_rate=3e-3, steps=30)
    seen: list[train.StepReport] = []
    reports = train.train(network, data.load_bytes(), model.kilat_attention, config, seen.append)
    assert seen == reports
    assert len(reports) == 30
    assert reports[-1].progress == 1.0
    assert reports[-1].loss < reports[0].loss - 0.5
    line = train.generate(network, b"Alice ", model.kilat_attention, length=5)
    assert line == train.generate(network, b"Alice ", model.kilat_attention, length=5)


def test_training_needs_an_end() -> None:
    with pytest.raises(ValueError, match="seconds or steps must be given; got neither"):
        train.train(model.ByteTransformer(TINY), data.load_bytes(), model.sdpa_attention, train.TrainConfig())


def test_naive_length_fits_half_of_what_is_free() -> None:
    for free in (1 << 28, 1 << 32, 1 << 36):
        length = compare.naive_length(free, 2, 1 << 20)
        assert length % 256 == 0
        assert compare.NAIVE_BYTES_PER_PAIR * 2 * length**2 <= free / 2
    assert compare.naive_length(1 << 40, 2, 1000) == 1000


def test_a_naive_run_that_would_take_minutes_is_shortened() -> None:
    ones = np.ones((1, 1, 1), np.float32)
    sdpa = compare.LongRun("sdpa", 32768, 1.0, 0, "a test", 0.0, ones)
    assert compare.patient_length(32768, sdpa) == 32768
    slow = replace(sdpa, attention_seconds=24.0)
    assert compare.patient_length(32768, slow) == 16384
    assert compare.patient_length(300, slow) == 300


def test_long_runs_agree_and_a_wrong_one_is_found() -> None:
    torch.manual_seed(0)
    network = model.ByteTransformer(TINY)
    torch.nn.init.normal_(network.logits.weight)
    tokens = data.first_tokens(data.load_bytes(), 601)
    ours = compare.run_long("kilat", network, tokens)
    naive = compare.run_long("naive", network, tokens[:, :401], first_layer_only=True)
    assert ours.error < compare.OUTPUT_TOLERANCE
    assert ours.logits is not None
    assert ours.logits.shape == (600, 256)
    found = compare.difference(ours, naive)
    assert (found.ok, found.rows, found.of) == (True, 400, "outputs of the first layer")
    assert compare.difference(ours, ours).largest == 0.0
    off = replace(ours, logits=ours.logits + 0.1)
    assert not compare.difference(off, ours).ok
    assert not compare.difference(replace(ours, logits=np.full_like(ours.logits, np.nan)), ours).ok
