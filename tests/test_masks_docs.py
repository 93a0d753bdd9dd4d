"""The pages about masks are followed to the letter: their code runs, and what it prints is what they show."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_masks_proof import BLOCKS, MASKS, SIZES, by_definition, check

import kilat
from kilat.masks import ops

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a page's code has defined; each text block must be what the code block before it printed."""
    module = types.ModuleType(f"page_{request.param}")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = (DOCS / f"{request.param}.md").read_text(encoding="utf-8")
    printed = ""
    for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if language == "text":
            assert code == printed
        else:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(code, f"{request.param}.md", "exec"), vars(module))
            printed = output.getvalue()
    return vars(module)


@pytest.mark.parametrize("page", ["masks"], indirect=True)
def test_how_a_mask_becomes_loops(page: dict[str, Any]) -> None:
    assert page["classes"].dtype == np.int8


@pytest.mark.parametrize("page", ["add-a-mask"], indirect=True)
def test_how_to_add_a_mask(page: dict[str, Any]) -> None:
    mask, truth = page["row"]
    for q_len, kv_len in itertools.product(SIZES, SIZES):
        entries = by_definition(truth, q_len, kv_len)
        check(mask, entries, BLOCKS)
        for name in ("causal", "window_1_0_first_2", "documents_batch", "dilated"):
            other, other_truth = MASKS[name]
            check(mask & other, entries & by_definition(other_truth, q_len, kv_len), [BLOCKS[5]])
    q, k, v = (page[n].double().requires_grad_() for n in "qkv")
    visible = torch.as_tensor(by_definition(truth, 6, 6)[0, 0])
    for with_mask, entries in ((mask, visible), (mask & kilat.Causal(), visible.tril())):
        out = kilat.attention(q, k, v, mask=with_mask)
        peer = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=entries
        )
        torch.testing.assert_close(out, peer.transpose(1, 2))
        ours, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, peer))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("page", ["add-a-mask"], indirect=True)
def test_functions_of_a_mask_are_plain(page: dict[str, Any]) -> None:
    p = page["Frames"](2, 1).parameters(0, 6, 6)
    starts = [page["Frames"].kv_start(q, 0, p) for q in range(-2, 6)]
    assert starts == [-4, -4, -2, -2, 0, 0, 2, 2]
    assert [ops.rebind(page["Frames"].kv_start, {})(q, 0, p) for q in range(-2, 6)] == starts
