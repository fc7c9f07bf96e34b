"""A spec that asks for the same bits in every call: programs whose results differ are refused in the end."""

from __future__ import annotations

import torch

from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.interfaces import Asked
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from tests.envs.judge.test_judge import PATIENCE_S, in_torch

# Each call rounds another row up, so that any two calls differ, however many were made between them.
ROUNDING = in_torch(
    "K.append(1); y = a[0].clamp(min=0); y[len(K) % 64] *= 1 + 2e-7; return (y,)",
    before="K = []",
)
STEADY = in_torch("return (a[0].clamp(min=0),)")


def test_bits_that_differ_are_refused_in_the_end_where_the_spec_asks() -> None:
    torch.manual_seed(0)
    spec = KernelSpec.from_module(torch.nn.ReLU(), (torch.randn(64, 64),), deterministic=True)
    judge = GpuEvaluator(spec, capture_spec(spec), torch_device="cpu", timeout_s=PATIENCE_S, any_text=True)
    try:
        assert judge.graph is not None and judge.graph.deterministic
        start = Program.start(judge.graph)
        (relu,) = start.regions
        found = judge.evaluate(start.with_implementation(relu.id, ROUNDING), asked=Asked.FINAL)
        assert found.failure == "wrong" and "asks for the same bits in every call" in (found.error or ""), found
        found = judge.evaluate(start.with_implementation(relu.id, STEADY), asked=Asked.CHECK)
        assert found.ok and not any("not repeatable" in note for note in found.notes), found
    finally:
        judge.close()
