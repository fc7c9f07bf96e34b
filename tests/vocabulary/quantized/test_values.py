"""Products of codes in Triton's interpreter, held against the declared computation in float64.

The cases run in a process of its own (this file as a script), where Triton interprets.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qimeng import KernelSpec
from qimeng.interfaces import Action
from tests.vocabulary.lowprecision.samples import action_of, after, layer, reading, start_of
from tests.vocabulary.values import BF16, F16, F32, Case, Errors, check, loaded, run

CASES = {
    "int8": Case("int8", (8, 200, 96), BF16, choices=(0, 4)),
    "int8, activation": Case("int8", (5, 96, 72), F16, nn.GELU(), fused=True, choices=(0,)),
    "int8, one scale": Case("int8:tensor", (20, 256, 40), BF16, choices=(0, 3)),
    "int8, fp32": Case("int8", (4, 130, 40), F32, choices=(0,)),
    "int8, many rows": Case("int8", (130, 256, 40), BF16, bias=False, choices=(0, 2, 6)),
    "int8, one row": Case("int8", (1, 100, 40), F16, choices=(0,)),
    "fp8": Case("fp8", (8, 200, 96), BF16, choices=(0, 4)),
    "fp8, activation": Case("fp8", (20, 96, 72), F16, nn.SiLU(), fused=True, choices=(0,)),
    "fp8, one scale": Case("fp8:tensor", (8, 512, 40), BF16, choices=(0, 3)),
    "fp8, blocks": Case("fp8:1x128", (20, 256, 140), BF16, choices=(0, 3)),
    "fp8, blocks, few rows": Case("fp8:1x32", (5, 96, 72), F16, nn.SiLU(), fused=True, choices=(0,)),
    "fp8, blocks, many rows": Case("fp8:1x128", (150, 256, 130), BF16, bias=False, choices=(0, 3)),
    "fp8, fp32": Case("fp8", (4, 130, 40), F32, choices=(0,)),
    "fp8, many rows": Case("fp8", (130, 256, 40), BF16, bias=False, choices=(0, 2, 6)),
    "fp8, one row": Case("fp8", (1, 100, 40), BF16, choices=(0,)),
}


def errors_of(case: Case) -> Errors:
    """The largest errors of each program whose codes are made by a kernel too, and of PyTorch."""
    module, x = layer(*case.sizes, case.dtype, bias=case.bias, after=case.after)
    with torch.no_grad():
        module[0].weight[:2].zero_()  # channels of zeros
        module[0].weight[2] *= 100
        if len(x) > 2:
            x[0], x[1] = 0.0, x[1] * 100
    kind, _, rest = case.weights.partition(":")
    weights = f"{kind}:{rest.replace('1x', '64x')}" if "1x" in rest else kind
    spec = KernelSpec.from_module(module, (x,), weights=weights, activations=case.weights)
    start = start_of(spec)
    with torch.no_grad():
        eager, exact = spec.module()(x), spec.module(dtype=torch.float64)(x.double())
    rms = exact.square().mean(-1, keepdim=True).sqrt() + 1e-30
    for choice in case.choices:
        program = after(start, action_of(start, "multiply_codes"), choice)
        if case.fused:
            product = reading(program)
            last = next(r for r in program.called if set(product.outputs) & set(r.inputs))
            program = after(program, Action("fusion", (product.id, last.id)))
        making = next(r for r in program.called if "amax" in r.label())
        program = after(program, Action("lowering", (making.id,)))
        assert len(program.called) == 2 and all(program.implementation(r).generated for r in program.called)
        found = loaded(program, module)
        with torch.no_grad():
            y = found(x)
            if len(x) > 2:
                wild = x.clone()
                wild[0, 0], wild[2, 1] = float("inf"), float("nan")
                assert torch.equal(found(wild).isfinite(), spec.module()(wild).isfinite())
        mine, theirs = (float(((z.double() - exact).abs() / (exact.abs() + rms)).max()) for z in (y, eager))
        yield mine, theirs


QUICK = ["int8", "int8, one scale", "fp8", "fp8, blocks", "fp8, fp32", "fp8, activation"]


def test_quick_cases() -> None:
    check("tests.vocabulary.quantized.test_values", QUICK)


@pytest.mark.slow
def test_other_cases() -> None:
    check("tests.vocabulary.quantized.test_values", [name for name in CASES if name not in QUICK])


if __name__ == "__main__":
    import sys

    run(CASES, sys.argv[1:], errors_of)
