"""Products with stored weights in Triton's interpreter, held against the declared computation in float64.

The cases run in a process of its own (this file as a script), where Triton interprets.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.vocabulary.lowprecision.samples import action_of, after, layer, reading, spec_of, start_of
from tests.vocabulary.values import BF16, F16, F32, Case, Errors, check, loaded, run

CASES = {
    "int8": Case("int8", (8, 200, 96), BF16),
    "int8, fp16, activation": Case("int8", (5, 96, 72), F16, nn.GELU(), fused=True),
    "int8, fp32": Case("int8", (4, 130, 40), F32, choices=(0, 1)),
    "int8, many rows": Case("int8", (130, 96, 40), BF16, bias=False),
    "int8, one row": Case("int8", (1, 100, 40), F16, choices=(0, 7)),
    "fp8": Case("fp8", (8, 200, 96), BF16),
    "fp8, fp16, activation": Case("fp8", (20, 96, 72), F16, nn.GELU(), fused=True),
    "fp8, fp32": Case("fp8", (4, 130, 40), F32, choices=(0, 1)),
    "fp8, one row": Case("fp8", (1, 100, 40), BF16, choices=(0, 7)),
    "fp8, blocks": Case("fp8:32x64", (8, 200, 96), BF16, choices=(0, 2)),
    "fp8, blocks, one row": Case("fp8:128x128", (1, 380, 250), F16, nn.GELU(), fused=True, choices=(0, 3)),
    "fp8, blocks, many rows": Case("fp8:32x128", (150, 256, 130), BF16, bias=False, choices=(0, 2)),
    "fp8, blocks, fp32": Case("fp8:32x32", (4, 70, 40), F32, choices=(0, 1)),
    "int4": Case("int4", (8, 256, 64), BF16, choices=(0, 1, 2)),
    "int4, group does not divide": Case("int4:64", (3, 200, 50), F16),
    "int4, group above the depth": Case("int4:128", (16, 100, 33), BF16),
    "int4, small groups, activation": Case("int4:16", (17, 75, 40), F16, nn.SiLU(), fused=True),
    "int4, fp32": Case("int4:32", (4, 70, 24), F32, choices=(0, 1)),
    "int4, many rows": Case("int4:64", (130, 128, 40), BF16, bias=False),
    "int4, one row": Case("int4:32", (1, 96, 40), F16, nn.GELU(), fused=True, choices=(0, 2, 7)),
    "int4, one row, parts of groups": Case("int4:1024", (1, 1100, 19), BF16, choices=(0, 3)),
    "int4, one row, fp32": Case("int4:16", (1, 75, 40), F32, choices=(0, 1)),
}


def errors_of(case: Case) -> Errors:
    """The largest errors of each program, and of PyTorch, against the declared computation in float64."""
    module, x = layer(*case.sizes, case.dtype, bias=case.bias, after=case.after)
    with torch.no_grad():
        weight = module[0].weight
        weight[:2].zero_()  # channels of zeros
        weight[2] *= 100
    spec = spec_of(module, x, case.weights)
    start = start_of(spec)
    with torch.no_grad():
        eager, exact = spec.module()(x), spec.module(dtype=torch.float64)(x.double())
    rms = exact.square().mean(-1, keepdim=True).sqrt()
    for choice in case.choices:
        program = after(start, action_of(start, "dequantize"), choice)
        if case.fused:
            program = after(program, action_of(program, "fusion"))
            assert len(program.called) == 1
        assert program.implementation(reading(program)).generated
        found = loaded(program, module)
        with torch.no_grad():
            y = found(x)
        mine, theirs = (float(((z.double() - exact).abs() / (exact.abs() + rms)).max()) for z in (y, eager))
        yield mine, theirs


QUICK = [
    "fp8",
    "fp8, blocks",
    "int8",
    "int8, fp16, activation",
    "int4, group does not divide",
    "int4, small groups, activation",
    "int4, one row, parts of groups",
]


def test_quick_cases() -> None:
    check("tests.vocabulary.lowprecision.test_values", QUICK)


@pytest.mark.slow
def test_other_cases() -> None:
    check("tests.vocabulary.lowprecision.test_values", [name for name in CASES if name not in QUICK])


if __name__ == "__main__":
    import sys

    run(CASES, sys.argv[1:], errors_of)
