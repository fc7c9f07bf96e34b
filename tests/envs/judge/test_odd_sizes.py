"""Tensors without elements or dimensions, conjugated ones, and bits seen as another dtype, are judged like others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.envs.cost.roofline import node_ms
from qimeng.envs.estimate.interpret import Interpreter
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

DEVICE = device_named("h200")
CASES: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "no rows": (lambda x: (x.softmax(-1), x.sum(0), x.norm(dim=1), x.var(0)), torch.rand(0, 5)),
    "no columns": (lambda x: (x.sum(-1), x.mean(-1), x.softmax(-1), x.logsumexp(-1), x.t() @ x), torch.rand(4, 0)),
    "no images": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)), torch.rand(0, 2, 4, 4)),
    "no dimensions": (lambda x: (x.sum(0), x.mean(-1), x.logsumexp(0), x.softmax(0), x.cumsum(0)), torch.tensor(2.5)),
    "conjugated": (lambda z: (z.mH, (z * 2).conj(), z.abs()), torch.randn(4, 6, dtype=torch.complex64)),
    "bits": (lambda x: (x * 2).view(torch.int32) + 1, torch.rand(4, 6)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
def test_sizes_that_divide_by_nothing(name: str) -> None:
    make, x = CASES[name]
    spec = KernelSpec.of(make, (x,))
    program = Program.start(capture_spec(spec))
    faults: dict[str, str] = {}
    assert legal_actions(program, Context(DEVICE, TemplateCoder()), faults) and not faults
    assert all(node_ms(program.graph, node, DEVICE) >= 0 for node in program.graph.ops())
    verdict = Interpreter(spec).check(program).verdict
    assert verdict is not None and verdict.ok, verdict
