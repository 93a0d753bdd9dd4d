"""Every instruction set that this machine has, forced by KILAT_CPU_ISA, gives results within the budget."""

from __future__ import annotations

import pytest
from cases import BY_NAME
from helpers import build, expected

from kilat.backends.cpu.isa import supported_isas

HERE = [isa.name for isa in supported_isas()]

# Every data type, forward, backward and decode, with every modifier: few kernels, since sizes are run-time values.
SAMPLE = [f"{dtype}-{extra}" for dtype in ("float32", "float64", "bfloat16", "float16") for extra in ("rich", "bias")]
SAMPLE += ["ragged-all", "padded-dropout", "mask-everything-70x37", "d251-127-bfloat16", "d1-1-float32", "float16-huge"]
SAMPLE += ["paged-decode-all", "paged-long", "cached-decode-float16", "cached-decode-bfloat16", "cached-decode-float64"]
SAMPLE += ["int8-token-all", "float8_e4m3fn-head-page3", "float8_e4m3fn-token-prefill", "int8-head-float64"]


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("isa_name", HERE)
def test_cases_on_every_instruction_set(isa_name: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILAT_CPU_ISA", isa_name)
    case = BY_NAME[name]
    call = build(case)
    if case.cached:
        out, lse = call.run("cpu")
        expected(case).check({"out": out, "lse": lse})
    else:
        out, lse, grads = call.gradients("cpu")
        expected(case, backward=True).check({"out": out, "lse": lse} | grads)
