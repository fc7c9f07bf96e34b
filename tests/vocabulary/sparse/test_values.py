"""Products with kept blocks in Triton's interpreter, held against the declared computation in float64.

The cases run in a process of its own (this file as a script), where Triton interprets.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qimeng import KernelSpec
from qimeng.actions import legal_actions
from tests.vocabulary.sparse.samples import CONTEXT, Turned, action_of, after, layer, reading, spec_of, start_of
from tests.vocabulary.values import BF16, F16, F32, Case, Errors, check, loaded, run

CASES = {
    "bsr": Case("bsr:16:30", (8, 200, 96), BF16),
    "bsr, overhanging, activation": Case("bsr:32:20", (5, 100, 72), F16, nn.GELU(), fused=True),
    "bsr, fp32": Case("bsr:16:30", (20, 130, 40), F32, choices=(0, 1, 2)),
    "bsr, many rows": Case("bsr:64:40", (150, 192, 130), BF16, bias=False, choices=(0, 1, 2, 3)),
    "bsr, one block": Case("bsr:32:0.1", (8, 200, 96), BF16),
    "bsr, large blocks": Case("bsr:128:50", (8, 256, 256), BF16, choices=(0,)),
    "csr": Case("csr:10", (8, 200, 96), BF16),
    "csr, activation": Case("csr:5", (5, 100, 72), F16, nn.SiLU(), fused=True),
    "csr, fp32": Case("csr:20", (20, 130, 40), F32, choices=(0, 1, 2)),
    "csr, many rows": Case("csr:3", (130, 192, 130), BF16, bias=False),
    "csr, few rows": Case("csr:10", (3, 200, 96), BF16, choices=(0, 2)),
    "csr, every schedule": Case("csr:6", (72, 70, 60), F16, choices=tuple(range(8))),
    "csr, shared, activation": Case("csr:5", (20, 100, 72), BF16, nn.SiLU(), fused=True, choices=(5, 6)),
    "csr, one row": Case("csr:10", (1, 200, 96), BF16, nn.GELU(), fused=True, choices=(0, 5, 7)),
    "csr, one row, fp32": Case("csr:3", (1, 203, 40), F32, choices=(0, 5)),
    "bsr, one row": Case("bsr:16:30", (1, 200, 96), BF16),
    "csr, lies transposed": Case("csr:5", (24, 100, 72), BF16, choices=(0, 5), turned=True),
    "csr, one weight": Case("csr:0.001", (8, 200, 96), BF16),
    "ell": Case("csr:5", (20, 100, 72), F16, storage="ell", choices=(0, 1)),
    "ell, activation": Case("csr:5", (24, 100, 72), BF16, nn.SiLU(), fused=True, storage="ell", choices=(1,)),
    "ell, one row": Case("csr:10", (1, 200, 96), F32, storage="ell", choices=(0, 2)),
    "ell, many rows": Case("csr:3", (70, 100, 50), BF16, bias=False, storage="ell"),
    "csc": Case("csr:5", (20, 100, 72), F16, storage="csc", choices=(0, 3)),
    "csc, activation": Case("csr:10", (24, 100, 70), BF16, nn.SiLU(), fused=True, storage="csc", choices=(1,)),
    "csc, fp32, many rows": Case("csr:3", (130, 192, 130), F32, bias=False, storage="csc", choices=(0, 1)),
    "csc, one weight": Case("csr:0.001", (20, 200, 96), BF16, storage="csc", choices=(0,)),
    "balanced": Case("csr:5", (20, 100, 72), BF16, storage="balanced", choices=(0,)),
}
"""One block or weight leaves all other rows empty."""


def errors_of(case: Case) -> Errors:
    """The largest errors of each program, and of PyTorch, against the declared computation in float64."""
    module, x = layer(*case.sizes, case.dtype, bias=case.bias, after=case.after)
    if case.turned:
        module, x = Turned(*module), x.t().contiguous()
    with torch.no_grad():
        module[0].weight[:33].zero_()  # rows of nothing
        module[0].weight[34] *= 100
    spec = spec_of(module, x, case.weights)
    start = start_of(spec)
    for choice in case.choices:
        program = after(start, action_of(start, "sparsify"), choice)
        if case.storage:
            kind = next(a for a in legal_actions(program, CONTEXT) if a.kind == "storage" and a.param == case.storage)
            program = after(program, kind, choice)
        if case.fused:
            program = after(program, action_of(program, "fusion"))
            assert len(program.called) == 1
        assert program.implementation(reading(program)).generated
        found = loaded(program, module)
        first = errors_beside(spec, found, x)
        changed = torch.randn(module[0].weight.shape).to(case.dtype)  # also in what was zero
        yield max(first, errors_beside(spec, found, x, changed))


def errors_beside(
    spec: KernelSpec, found: nn.Module, x: torch.Tensor, changed: torch.Tensor | None = None
) -> tuple[float, float]:
    """Those of one call, after the weight has changed in place."""
    eager, exact = spec.module(), spec.module(dtype=torch.float64)
    with torch.no_grad():
        for module in (found, eager, exact) if changed is not None else ():
            module.get_parameter("0.weight").copy_(changed)
        y, theirs, wanted = found(x), eager(x), exact(x.double())
    scale = (wanted.abs() + wanted.square().mean(-1, keepdim=True).sqrt()).clamp_min(1e-30)
    assert wanted.abs().max() > 0
    return float(((y.double() - wanted).abs() / scale).max()), float(((theirs.double() - wanted).abs() / scale).max())


QUICK = [
    "ell",
    "csc",
    "bsr",
    "bsr, overhanging, activation",
    "bsr, one block",
    "csr",
    "csr, activation",
    "csr, one weight",
]


def test_quick_cases() -> None:
    check("tests.vocabulary.sparse.test_values", QUICK)


@pytest.mark.slow
def test_other_cases() -> None:
    check("tests.vocabulary.sparse.test_values", [name for name in CASES if name not in QUICK])


if __name__ == "__main__":
    import sys

    run(CASES, sys.argv[1:], errors_of)
