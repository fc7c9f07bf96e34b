"""A program whose zeros have the wrong sign is refused where the sign is part of what is computed."""

from __future__ import annotations

import torch

from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


def test_a_difference_from_zero_is_no_change_of_sign() -> None:
    x = torch.randn(16, 16).where(torch.arange(256).view(16, 16) % 5 > 0, 0.0)
    spec = KernelSpec.from_function(lambda x: -x, (x,))
    evaluator = GpuEvaluator(spec, capture_spec(spec), torch_device="cpu", sandbox="basic", timeout_s=20.0)
    try:
        assert evaluator.graph is not None
        program = Program.start(evaluator.graph)
        for text, failure in (("0 - x", "wrong"), ("x * -1", None)):
            made = Implementation("torch", f"def entry(x):\n    return ({text},)\n", "entry")
            found = evaluator.evaluate(program.with_implementation(program.regions[0].id, made))
            assert found.failure == failure and ("zeros of the wrong sign" in (found.error or "")) == bool(failure)
    finally:
        evaluator.close()
