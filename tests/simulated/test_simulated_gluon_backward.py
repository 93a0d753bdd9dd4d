"""The Hopper backward on the simulated machine: numbers, barriers, and bugs that the simulation must catch."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from simulated import backward_harness as harness
from simulated.backward_harness import Setting
from simulated.gluon_rebind import SEEDS
from simulated.gluon_sim import SimError

from kilat.backends.gluon import (
    backward,
    backward_boxes,
    backward_broad,
    backward_broad_parts,
    backward_dq,
    backward_narrow,
    backward_parts,
    backward_place,
    backward_wide,
)
from kilat.masks import Causal, Window

MODULES = (
    *(backward, backward_boxes, backward_broad, backward_broad_parts),
    *(backward_dq, backward_narrow, backward_parts, backward_place, backward_wide),
)
TOLERANCE = 1e-5  # of the largest exact value: products and sums in float32

RAGGED = ((5, 63, 0, 200), (5, 170, 20, 0))
PADDED = ((67, 0, 5, 33), (3, 9, 0, 131))

SETTINGS = {
    "one": Setting(1, 1),
    "two-turns": Setting(128, 128),
    "two-turns-late": Setting(64, 128, heads=(2, 1), dim=70),
    "three-turns": Setting(130, 100, mask=Causal()),
    "even": Setting(192, 128),
    "odd": Setting(200, 300),
    "few-queries": Setting(63, 129, dim=17),
    "causal": Setting(130, 70, mask=Causal()),
    "causal-turns": Setting(300, 300, batch=2, heads=(3, 3), mask=Causal()),
    "down": Setting(300, 400, heads=(4, 2), mask=Causal(), down=True),
    "down-narrow-window": Setting(400, 300, heads=(2, 1), dim=64, mask=Window(100, 20), down=True),
    "down-broad": Setting(300, 200, dim=192, heads=(4, 2), mask=Causal(), down=True),
    "down-ragged": Setting(ragged=RAGGED, heads=(2, 1), mask=Causal(), down=True),
    "top-left": Setting(70, 130, mask=Causal(align="top_left"), dim=40),
    "window": Setting(400, 300, heads=(4, 2), dim=96, mask=Window(50, 20)),
    "narrow-one": Setting(1, 1, dim=64),
    "narrow": Setting(400, 128, dim=64),
    "narrow-causal": Setting(400, 300, dim=64, heads=(3, 1), mask=Causal()),
    "one-head-after-another": Setting(300, 300, batch=2, heads=(2, 2), mask=Causal(), together=0),
    "last-heads-by-turns": Setting(300, 300, batch=2, heads=(3, 3), mask=Causal(), lead=3, together=3),
    "narrow-window": Setting(300, 500, dim=33, mask=Window(100, None)),
    "ragged": Setting(ragged=RAGGED, heads=(2, 1), mask=Causal()),
    "ragged-narrow": Setting(ragged=RAGGED, heads=(2, 1), dim=64),
    "padded": Setting(67, 131, batch=4, padded=PADDED, heads=(2, 1)),
    "padded-narrow": Setting(67, 131, batch=4, padded=PADDED, dim=64, mask=Causal()),
    "softcap": Setting(200, 128, softcap=2.0, scale=-0.2),
    "softcap-narrow": Setting(300, 200, dim=64, softcap=2.0, scale=0.0),
    "broad-one": Setting(1, 1, dim=256, scale=0.05),
    "broad": Setting(300, 129, dim=256, heads=(4, 2)),
    "broad-causal": Setting(130, 200, dim=192, dim_v=128, heads=(2, 1), mask=Causal()),
    "broad-unseen": Setting(63, 300, dim=129, mask=Causal(align="top_left")),
    "broad-window": Setting(300, 300, dim=160, dim_v=251, mask=Window(50, 20)),
    "broad-v": Setting(129, 63, dim=5, dim_v=200, softcap=2.0, scale=-0.2),
    "broad-ragged": Setting(ragged=RAGGED, heads=(2, 1), dim=192, dim_v=70, mask=Causal()),
    "broad-padded": Setting(67, 131, batch=4, padded=PADDED, dim=256, dim_v=160),
    "broad-deterministic": Setting(150, 129, dim=256, heads=(2, 1), mask=Causal(), deterministic=True),
    "broad-deterministic-ragged": Setting(ragged=RAGGED, dim=192, dim_v=128, deterministic=True),
    "broad-deterministic-padded": Setting(67, 131, batch=4, padded=PADDED, dim=40, dim_v=192, deterministic=True),
    "deterministic": Setting(200, 128, deterministic=True),
    "deterministic-one": Setting(1, 1, deterministic=True),
    "deterministic-two-turns": Setting(100, 128, deterministic=True),
    "deterministic-narrow": Setting(300, 128, dim=64, heads=(2, 1), mask=Causal(), deterministic=True),
    "deterministic-window": Setting(300, 400, dim=90, mask=Window(50, 20), softcap=3.0, deterministic=True),
    "deterministic-ragged": Setting(ragged=RAGGED, heads=(2, 1), deterministic=True),
    "deterministic-ragged-narrow": Setting(ragged=RAGGED, dim=64, mask=Causal(), deterministic=True),
    "deterministic-padded": Setting(67, 131, batch=4, padded=PADDED, heads=(2, 1), deterministic=True),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients(name: str, seed: int) -> None:
    errors = harness.run(SETTINGS[name], seed)
    assert max(errors.values()) < TOLERANCE, errors


WIDE, NARROW = Setting(384, 128), Setting(512, 128, dim=64)
WIDE_LONG = Setting(1024, 128)
BROAD, BROAD_SHORT = Setting(384, 64, dim=192), Setting(67, 131, batch=2, padded=((67, 33), (131, 100)), dim=192)
DQ = Setting(64, 600, deterministic=True)
SHORT = Setting(67, 131, batch=2, padded=((67, 33), (131, 100)))


BUGS: dict[str, tuple[Setting, Any, str, str]] = {
    # name: (setting, function, what stands there, what stands there instead)
    "no-wait-for-q": (
        WIDE, backward_wide.turn, "mbarrier.wait(r.q_full.index(third), parity)", "pass"),
    "no-wait-for-k": (WIDE, backward_wide.consume_wide, "mbarrier.wait(r.kv_full, 0)", "pass"),
    "no-turns": (WIDE_LONG, backward_wide.turn, "mbarrier.wait(r.turn.index(0), t & 1)", "pass"),
    "no-turns-of-the-other": (
        WIDE_LONG, backward_wide.turn, "mbarrier.wait(r.turn.index(1), (t - 1) & 1)", "pass"),
    "no-wait-for-last-ds": (
        WIDE, backward_wide.consume_wide,
        "mbarrier.wait(r.turn.index(1 - W), last & 1)", "pass"),
    "wrong-phase": (
        WIDE, backward_wide.turn, "phase = (t // 2) & 1", "phase = ((t + 1) // 2) & 1"),
    "ds-arrives-early": (
        WIDE, backward_wide.turn, "r.ds.index(third * 2 + W).store(ds_half)",
        "mbarrier.arrive(r.turn.index(W), count=1); r.ds.index(third * 2 + W).store(ds_half)"),
    "ds-after-its-turn": (
        WIDE, backward_wide.turn, "fence_async_shared()\n    mbarrier.arrive(r.turn.index(W), count=1)",
        "fence_async_shared()"),
    "no-fence": (
        WIDE, backward_wide.turn,
        "r.ds.index(third * 2 + W).store(ds_half)\n        fence_async_shared()",
        "r.ds.index(third * 2 + W).store(ds_half)"),
    "frees-twice": (
        WIDE, backward_wide.turn,
        "mbarrier.arrive(r.free.index(before), count=1)", "mbarrier.arrive(r.free.index(before), count=2)"),
    "never-frees": (WIDE, backward_wide.turn, "mbarrier.arrive(r.free.index(before), count=1)", "pass"),
    "dq-buffer-reused": (
        WIDE, backward_wide.consume_wide, "tma.store_wait(0)\n            cta_barrier()", "cta_barrier()"),
    "dk-overwrites-dv": (
        Setting(64, 128), backward_wide.consume_wide,
        "tma.store_wait(0)  # dV and dQ have left their buffers", "pass"),
    "delta-not-awaited": (
        WIDE, backward_wide.turn,
        "mbarrier.wait(r.do_full.index(stage), phase)\n    delta", "delta"),
    "loads-into-used-stage": (
        WIDE, backward_parts.produce, "mbarrier.wait(r.free.index((t + 1) % 3), ((t - 2) // 3) & 1)", "pass"),
    "loads-a-turn-early": (
        WIDE, backward_parts.produce,
        "mbarrier.wait(r.free.index((t + 1) % 3), ((t - 2) // 3) & 1)",
        "mbarrier.wait(r.free.index(t % 3), ((t // 3) & 1) ^ 1)"),
    "narrow-loads-into-used-stage": (
        NARROW, backward_parts.produce, "mbarrier.wait(r.free.index(stage), ((t // 2) & 1) ^ 1)", "pass"),
    "two-buffers-of-ds": (
        WIDE_LONG, backward_wide.turn, "r.ds.index(third * 2 + W)", "r.ds.index(t % 2 * 2 + W)"),
    "wrong-bytes": (
        WIDE, backward_parts.produce,
        "mbarrier.expect(do_full, DO_BYTES)", "mbarrier.expect(do_full, DO_BYTES - BM * 4)"),
    "narrow-dq-buffer-reused": (
        NARROW, backward_narrow.consume_narrow, "tma.store_wait(0)\n        cta_barrier()", "cta_barrier()"),
    "v-not-awaited": (
        WIDE, backward_parts.produce,
        "mbarrier.expect(do_full, DO_BYTES + 2 * v_desc.block_type.nbytes)", "mbarrier.expect(do_full, DO_BYTES)"),
    "v-read-before-it-came": (
        replace(WIDE, dim=64), backward_narrow.consume_narrow,
        "mbarrier.wait(r.do_full.index(0), 0)\n    v = v_buffer.load(OPERAND)",
        "v = v_buffer.load(OPERAND)\n    mbarrier.wait(r.do_full.index(0), 0)"),
    "garbage-left": (SHORT, backward_parts.clear_rows, "if start + STEP > first:", "if start > first + STEP:"),
    "clears-before-load": (SHORT, backward_parts.load_keys, "mbarrier.wait(r.kv_raw, 0)", "pass"),
    "mask-one-off": (
        Setting(130, 130, mask=Causal()), backward_parts.hide, "query - lane >= first", "query - lane > first"),
    "mask-one-off-on-the-left": (
        Setting(300, 300, mask=Window(50, 20)), backward_parts.hide, "lane <= gl.expand_dims", "lane < gl.expand_dims"),
    "mask-skipped": (
        Setting(130, 130, mask=Causal()), backward_parts.is_masked,
        "last_key - row > x.high", "last_key - row > x.high + 64"),
    "dq-no-wait-for-v": (
        DQ, backward_dq.consume_keys,
        "mbarrier.wait(r.v_full.index(stage), phase)\n        dp_next", "dp_next"),
    "dq-frees-k-early": (
        DQ, backward_dq.consume_keys, "mbarrier.arrive(r.k_free.index(before), count=1)",
        "mbarrier.arrive(r.k_free.index(stage), count=1)"),
    "dq-garbage-left": (
        replace(SHORT, deterministic=True), backward_dq.produce_keys,
        "load_cleared(k_desc, k2_desc, at, r.raw, 0, k, k2, x.kv_len - key, BN, D, D2)",
        "load_rows(k_desc, k2_desc, at, r.raw, k, k2, 0, D2); mbarrier.wait(r.raw, 0)"),
    "dq-second-box-lost": (
        replace(BROAD, deterministic=True), backward_dq.consume_keys,
        "dq2 = gl.where(sees, dq2 * scale, 0.0)", "dq2 = dq2 * 0.0"),
    "boxes-same-columns": (
        BROAD, backward_boxes.load_rows, "[batch, row, head, desc.block_shape[3]]", "[batch, row, head, 0]"),
    "boxes-garbage-left": (BROAD_SHORT, backward_boxes.load_cleared, "clear_rows(x, left, ROWS, W1)", "pass"),
    "boxes-garbage-left-in-second": (
        BROAD_SHORT, backward_boxes.load_cleared, "clear_rows(x2, left, ROWS, W2)", "pass"),
    "boxes-cleared-before-load": (BROAD_SHORT, backward_boxes.load_cleared, "mbarrier.wait(bar, raws & 1)", "pass"),
    "boxes-second-product-lost": (BROAD, backward_boxes.scores_of, "if W2:", "if False:"),
    "broad-no-wait-for-q": (BROAD, backward_broad.scores, "mbarrier.wait(r.q_full.index(stage), phase)", "pass"),
    "broad-no-wait-for-k": (BROAD, backward_broad.scores, "mbarrier.wait(r.kv_full.index(0), 0)", "pass"),
    "broad-no-wait-for-v": (BROAD, backward_broad.scores, "mbarrier.wait(r.kv_full.index(1), 0)", "pass"),
    "broad-no-wait-for-ds": (BROAD, backward_broad.gradients, "mbarrier.wait(r.ds_full.index(slot), phase)", "pass"),
    "broad-frees-q-early": (
        BROAD, backward_broad.gradients, "mbarrier.wait(r.q_full.index(slot), phase)",
        "mbarrier.wait(r.q_full.index(slot), phase); mbarrier.arrive(r.q_free.index(slot), count=1)"),
    "broad-no-fence": (BROAD, backward_broad.scores, "fence_async_shared()", "pass"),
    "broad-frees-do-early": (
        BROAD, backward_broad.scores, "mbarrier.arrive(r.ds_full.index(stage), count=1)",
        "mbarrier.arrive(r.ds_full.index(stage), count=1); mbarrier.arrive(r.do_free.index(stage), count=1)"),
    "broad-never-frees-q": (BROAD, backward_broad.gradients, "mbarrier.arrive(r.q_free.index(slot), count=1)", "pass"),
    "broad-wrong-part-of-dq": (BROAD, backward_broad.add_dq_part, "PART * 2", "PART"),
    "broad-adds-nowhere": (
        Setting(63, 300, dim=129, mask=Causal(align="top_left")), backward_broad.add_dq_part,
        "if tile < NOWHERE:", "if True:"),
    "broad-loads-into-used-do": (
        BROAD, backward_broad_parts.produce_broad, "mbarrier.wait(r.do_free.index(stage), free)", "pass"),
    "broad-loads-into-used-q": (
        BROAD, backward_broad_parts.produce_broad, "mbarrier.wait(r.q_free.index(stage), free)", "pass"),
    "broad-wrong-bytes": (
        BROAD, backward_broad_parts.produce_broad,
        "load_rows(q_desc, q2_desc, at, q_full, q, q2, ROW_BYTES, D2)",
        "load_rows(q_desc, q2_desc, at, q_full, q, q2, 0, D2)"),
    "broad-raws-uncounted": (
        BROAD_SHORT, backward_broad_parts.produce_broad,
        "load_cleared(v_desc, v2_desc, at_keys, r.raw, raws + 1,",
        "load_cleared(v_desc, v2_desc, at_keys, r.raw, raws,"),
    "narrow-no-wait-for-ds": (
        NARROW, backward_narrow.turn,
        "mbarrier.wait(r.ds_full.index((t - 1) % BUFFERS_NARROW), ((t - 1) // BUFFERS_NARROW) & 1)", "pass"),
    "narrow-no-wait-for-q": (
        NARROW, backward_narrow.turn,
        "if not LAST:\n        mbarrier.wait(r.q_full.index(stage_after), phase_after)", "if not LAST:"),
    "narrow-two-buffers": (
        Setting(1024, 128, dim=64), backward_narrow.turn, "slot = t % BUFFERS_NARROW", "slot = t % 2"),
    "narrow-frees-twice": (
        NARROW, backward_narrow.turn,
        "mbarrier.arrive(r.free.index(stage), count=1)", "mbarrier.arrive(r.free.index(stage), count=2)"),
}  # fmt: skip


def mutant(function: Any, right: str, wrong: str) -> Any:
    """The function of a kernel with one place of its source changed."""
    source = inspect.getsource(function.fn)
    source = source[source.index("def ") :]
    assert source.count(right) == 1, f"{right!r} stands {source.count(right)} times in {function.fn.__name__}"
    namespace = dict(function.fn.__globals__)
    exec(compile(source.replace(right, wrong), "mutant", "exec"), namespace)
    return SimpleNamespace(fn=namespace[function.fn.__name__])


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed draws its own delays; some of them must show the bug."""
    setting, function, right, wrong = BUGS[name]
    broken = mutant(function, right, wrong)
    for module in MODULES:
        if hasattr(module, function.fn.__name__):
            monkeypatch.setattr(module, function.fn.__name__, broken)
    for seed in range(SEEDS):
        try:
            errors = harness.run(setting, seed, timeout=0.5)
        except (SimError, IndexError, OverflowError):
            return
        if not max(errors.values()) < TOLERANCE:
            return
    pytest.fail(f"nobody noticed: {name}")
