"""The serving example gives the tokens of the uncached model, reuses its pages and queues what does not fit yet."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kilat.demo.data import load_bytes
from kilat.demo.model import ByteTransformer, ModelConfig

PATH = Path(__file__).resolve().parent.parent / "examples" / "serve.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("serve_example", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


serve = _load()


@pytest.fixture(scope="module")
def model() -> ByteTransformer:
    """An untrained model whose logits are not all 0."""
    torch.manual_seed(0)
    made = ByteTransformer(ModelConfig(num_layers=2, num_heads=2, head_dim=16))
    torch.nn.init.normal_(made.logits.weight)
    return made


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tokens_are_those_without_a_cache(model: ByteTransformer, page_size: int) -> None:
    requests = serve.draw_requests(load_bytes(), 6, 12, 1)
    server = serve.Server(model, page_size, 2 * -(-24 // page_size))
    for request in requests:
        server.submit(request)
    server.run()
    found = [serve.check(model, request) for request in requests]
    assert all(x.equal for x in found)
    assert min(x.gap for x in found) > max(x.difference for x in found)
    assert sorted(server.free) == list(range(server.num_pages))
    assert bool(server.pools.isnan().all())
    assert max(server.batch_sizes) > 1


def test_a_small_pool_makes_requests_wait(model: ByteTransformer) -> None:
    server = serve.Server(model, 4, 2)
    requests = [serve.Request([65 + i, 66, 67], 4, 0) for i in range(3)]
    for request in requests:
        server.submit(request)
    server.step()
    assert (len(server.running), len(server.waiting)) == (1, 2)
    server.run()
    assert set(server.batch_sizes) == {1}
    assert all(serve.check(model, request).equal for request in requests)
    assert sorted(server.free) == [0, 1]


def test_what_can_never_fit_is_refused(model: ByteTransformer) -> None:
    server = serve.Server(model, 4, 2)
    with pytest.raises(ValueError, match="request must fit the pool's 2 pages; got one that needs 3"):
        server.submit(serve.Request([65] * 6, 4, 0))
    assert not server.waiting
