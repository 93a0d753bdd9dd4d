"""The forward kernel's barriers and numbers on the simulated machine, and planted bugs that it must notice."""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from simulated.forward_harness import Call, Shape
from simulated.gluon_rebind import SEEDS
from simulated.gluon_sim import SimError

from kilat.backends.gluon import forward, forward_parts, forward_softmax
from kilat.masks.core import FAR

CAUSAL = (FAR, 0, FAR)
SHAPES = {
    "plain": Shape(batch=2),
    "one": Shape(seqlen=(1, 1), heads=(2, 1)),
    "odd": Shape(batch=2, seqlen=(129, 200), heads=(2, 1)),
    "causal": Shape(seqlen=(257, 257), heads=(2, 2), bounds=CAUSAL),
    "causal-more-queries": Shape(seqlen=(300, 100), heads=(2, 2), bounds=CAUSAL),
    "causal-three-consumers": Shape(seqlen=(400, 430), heads=(2, 1), bounds=CAUSAL, consumers=3, block_kv=128),
    "top-left": Shape(seqlen=(300, 200), bounds=(FAR, FAR, 0)),
    "window": Shape(seqlen=(300, 400), bounds=(70, 20, FAR)),
    "window-wide-block": Shape(seqlen=(200, 230), bounds=(30, 9, 40), block_kv=128, consumers=3),
    "window-self": Shape(seqlen=(130, 130), bounds=(0, 0, FAR)),
    "negative": Shape(seqlen=(130, 200), scale=-0.3, bounds=CAUSAL),
    "zero": Shape(seqlen=(130, 200), scale=0.0, bounds=CAUSAL),
    "softcap-negative": Shape(seqlen=(130, 90), cap=2.0, scale=-0.4, bounds=CAUSAL),
    "softcap-sink": Shape(seqlen=(130, 200), cap=3.0, sink=True, heads=(2, 1)),
    "two-boxes": Shape(seqlen=(130, 200), dims=(96, 80), bounds=CAUSAL),
    "narrow": Shape(seqlen=(130, 200), dims=(72, 40)),
    "through-q": Shape(seqlen=(300, 300), bounds=CAUSAL, staging=2, q_stages=1, heads=(2, 2)),
    "without-a-table": Shape(batch=2, seqlen=(300, 300), bounds=CAUSAL, heads=(4, 2), together=3, ordered=False),
    "one-buffer-of-q": Shape(seqlen=(400, 300), bounds=CAUSAL, heads=(2, 1), q_stages=1, turns=False),
    "in-pieces": Shape(seqlen=(300, 300), dims=(200, 200), bounds=CAUSAL, staging=3, q_stages=1, heads=(2, 2)),
    "in-pieces-ragged": Shape(
        ragged=True, lengths_q=(70, 130, 5), lengths_kv=(60, 0, 90), dims=(64, 256), tail=3, staging=3, q_stages=1,
        ctas=1,
    ),
    "three-stages": Shape(seqlen=(300, 500), bounds=CAUSAL, heads=(2, 1), stages=3),
    # scores of 16 and more in log2 units: in some rows a maximum grows by more than 2^8, in others not
    "growing": Shape(batch=2, seqlen=(129, 400), heads=(2, 1), scale=1.0),
    "growing-causal": Shape(seqlen=(300, 400), bounds=CAUSAL, scale=1.0),
    "growing-negative": Shape(seqlen=(130, 300), bounds=CAUSAL, scale=-1.0),
    "growing-window": Shape(seqlen=(300, 400), bounds=(70, 20, FAR), scale=1.0),
    "growing-softcap-sink": Shape(seqlen=(130, 300), cap=30.0, scale=1.0, sink=True),
    "growing-two-boxes": Shape(seqlen=(130, 300), dims=(96, 80), bounds=CAUSAL, scale=1.0),
    "growing-in-pieces": Shape(seqlen=(130, 300), dims=(200, 200), scale=1.0, staging=3, q_stages=1),
    "growing-more-queries": Shape(seqlen=(300, 100), heads=(2, 2), bounds=CAUSAL, scale=1.0),
    "growing-ragged": Shape(
        ragged=True, lengths_q=(5, 0, 130, 64), lengths_kv=(5, 70, 20, 300), tail=3, bounds=CAUSAL, scale=1.0, sink=True
    ),
    "narrow-values": Shape(seqlen=(300, 300), dims=(128, 64), bounds=CAUSAL),
    "from-registers": Shape(seqlen=(130, 70), dims=(96, 96), staging=0),
    "ragged": Shape(
        ragged=True, lengths_q=(5, 0, 130, 64), lengths_kv=(5, 70, 20, 200), tail=3, heads=(2, 1), bounds=CAUSAL,
        sink=True,
    ),
    "ragged-two-boxes": Shape(ragged=True, lengths_q=(70, 1), lengths_kv=(0, 90), dims=(80, 96)),
    "padded": Shape(
        batch=4, seqlen=(150, 131), lengths_q=(67, 0, 5, 150), lengths_kv=(3, 9, 0, 131), bounds=CAUSAL, sink=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_right_in_any_order(name: str) -> None:
    for seed in range(2):
        Call(SHAPES[name], seed).run(seed).check()


WAIT_Q = "mbarrier.wait(m.q_full.index(at), (tiles // Q_STAGES) & 1)"
WAIT_Q_FREE = "mbarrier.wait(m.q_free.index(q_slot), ((tiles // Q_STAGES) & 1) ^ 1)"
WAIT_V = "mbarrier.wait(m.v_full.index(before), ((done + t - 1) // STAGES) & 1)"
WAIT_K = "mbarrier.wait(m.k_full.index(slot), ((done + t) // STAGES) & 1)"
WAIT_S = "x = warpgroup_mma_wait(IN_FLIGHT, deps=[st])"
WAIT_STORE = """tma.store_wait(0)
            cta_barrier()"""

BUGS: dict[str, tuple[Any, str, str]] = {
    # function, what stands there, what stands there instead
    "V is not waited for": (forward.consumer, WAIT_V, "pass"),
    "K is not waited for": (forward.consumer, WAIT_K, "pass"),
    "Q is not waited for": (forward.consumer, WAIT_Q, "pass"),
    "Q is overwritten": (forward.producer, WAIT_Q_FREE, "pass"),
    "wrong buffer of Q": (forward.consumer, "at = tiles % Q_STAGES * CONSUMERS + W", "at = W"),
    "a turn is not passed on": (forward.consumer, "pass_turn(m, W, CONSUMERS, TURNS)", "pass"),
    "the wrong consumer's turn": (forward_parts.pass_turn, "(W + 1) % CONSUMERS", "W"),
    "V is freed early": (forward.consumer, WAIT_S, f"mbarrier.arrive(m.v_free.index(before), count=1); {WAIT_S}"),
    "wrong phase": (forward.producer, "((done + t) // STAGES) & 1", "((done + t) // STAGES + 1) & 1"),
    "wrong count": (forward.forward_kernel, "k_free.index(i), count=CONSUMERS", "k_free.index(i), count=1"),
    "S is read before it is there": (forward.consumer, WAIT_S, WAIT_S.replace("IN_FLIGHT", "IN_FLIGHT + 1")),
    "no fence before the box leaves": (forward_parts.store_box, "fence_async_shared()", "pass"),
    "the output is overwritten": (forward_parts.write_tile, WAIT_STORE, "pass"),
    "a piece is overwritten": (forward_parts.store_pieces, "tma.store_wait(1)", "pass"),
    "the last piece is overwritten": (forward_parts.store_pieces, "tma.store_wait(0)", "pass"),
    "pieces share a buffer": (forward_parts.store_pieces, "m.o.index(W * 2 + i % 2)", "m.o.index(W * 2)"),
    "no rescale": (forward.consumer, "o = rescaled(o, alpha, moved)", "pass"),
    "no rescale of the second box": (forward.consumer, "o2 = rescaled(o2, alpha, moved)", "pass"),
    "no rescale of l": (forward.consumer, "l = l * gl.expand_dims", "l = l + 0 * gl.expand_dims"),
    "no key yet": (forward_softmax.softmax, 'gl.where(m == float("-inf"), 0.0, m)', "m"),
    "unseen values are not cleared": (forward_parts.load_seen_v, "clear_rows(m.v.index(slot), seen, ROWS, D)", "pass"),
}


def mutant(function: Any, there: str, instead: str) -> types.FunctionType:
    """The function with one place of its source changed."""
    source = inspect.getsource(function.fn)
    source = source[source.index("def ") :]
    assert source.count(there) >= 1, f"{there!r} is not in {function.fn.__name__}"
    namespace: dict[str, Any] = dict(function.fn.__globals__)
    exec(compile(source.replace(there, instead, 1), "mutant", "exec"), namespace)
    return namespace[function.fn.__name__]


GROWING = Shape(seqlen=(130, 700), scale=1.0, ctas=1)
SETTLING: dict[str, tuple[str, str]] = {
    # what stands in `SETTLE`, what stands there instead
    "P may grow past float16": ("upper, growth, 0f41000000", "upper, growth, 0f42000000"),
    "of either row": ("lower, growth, 0f41000000", "lower, growth, 0f42000000"),
    "half of the rows vote": ("or.pred any, upper, lower", "or.pred any, upper, upper"),
    "each lane votes for itself": ("vote.sync.any.pred any, any, 0xffffffff;", ""),
    "the votes are turned round": ("selp.s32 $4, 1, 0, any", "selp.s32 $4, 0, 1, any"),
    "l is not rescaled": ("@lower ex2.approx.ftz.f32 $3, growth;", ""),
    "m stays behind": ("selp.f32 $0, $6, $8, upper", "mov.f32 $0, $8"),
}


@pytest.mark.parametrize("bug", SETTLING)
def test_planted_bugs_of_settling_are_noticed(bug: str) -> None:
    there, instead = SETTLING[bug]
    text = forward_softmax.SETTLE.value
    assert text.count(there) == 1
    with pytest.raises((AssertionError, ValueError)):
        Call(GROWING, 0).run(also={"SETTLE": text.replace(there, instead)}).check()


def test_a_rescale_that_never_happens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_softmax._scaling, "fn", mutant(forward_softmax._scaling, "@stays bra", "bra"))
    with pytest.raises(AssertionError):
        Call(GROWING, 0).run().check()


def test_a_row_does_not_depend_on_other_rows() -> None:
    """Bit for bit, though its warp multiplies or not as others need it."""
    calm, excited = Call(GROWING, 0), Call(GROWING, 0)
    excited.q[:, 1:] *= 20
    for call in (calm, excited):
        call.run()
    assert not np.array_equal(calm.lse[..., 1:], excited.lse[..., 1:])
    np.testing.assert_array_equal(calm.out[:, 0], excited.out[:, 0])
    np.testing.assert_array_equal(calm.lse[..., 0], excited.lse[..., 0])


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, there, instead = BUGS[bug]
    monkeypatch.setattr(function, "fn", mutant(function, there, instead))
    ragged = Shape(ragged=True, lengths_q=(70, 130), lengths_kv=(60, 300), heads=(2, 1), tail=9)
    padded = Shape(batch=2, seqlen=(70, 80), lengths_q=(70, 70), lengths_kv=(60, 80))
    short = Shape(seqlen=(900, 60), ctas=1)  # so that the producer may be two tiles ahead
    pieces = Shape(seqlen=(300, 64), dims=(64, 256), staging=3, q_stages=1, ctas=1)
    shapes = [Shape(seqlen=(300, 400), heads=(2, 1), ctas=1), ragged, padded, short, pieces]
    shapes += [GROWING, Shape(seqlen=(200, 130), dims=(96, 80), bounds=CAUSAL, scale=1.0)]
    for seed in range(SEEDS):
        for shape in shapes:
            try:
                Call(shape, seed).run(seed, timeout=1.0).check()
            except (SimError, AssertionError):
                return
    pytest.fail(f"nobody noticed: {bug}")
