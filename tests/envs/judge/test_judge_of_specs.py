"""Judges of specifications of their own: modes, views, and how seconds are counted."""

from __future__ import annotations

import torch

from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.time_spent import Clock
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.testing import FakeClock

PATIENCE_S = 60.0
"""What a call may take where tests load the machine."""


def test_what_a_specification_is_stands_in_its_evaluations():
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    for training in (True, False):
        spec = KernelSpec.from_module(Both(), (torch.randn(16, 8),), training=training)
        graph = capture_spec(spec)
        judge = GpuEvaluator(spec, graph, torch_device="cpu", timeout_s=PATIENCE_S, any_text=True)
        try:
            found = judge.evaluate(Program.start(graph))
            mine, other = ("training", "evaluation") if training else ("evaluation", "training")
            assert found.ok, found.error
            assert found.notes == (
                f"made for {mine} mode, as the spec says: in {other} mode the module computes something else",
            )
        finally:
            judge.close()


def test_views_of_inputs_and_of_parameters_may_be_returned():
    class Views(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.view(-1), x[1:], torch.relu(x @ self.weight), self.weight.t()

    spec = KernelSpec.from_module(Views(), (torch.randn(4, 8),))
    graph = capture_spec(spec)
    judge = GpuEvaluator(spec, graph, torch_device="cpu", timeout_s=PATIENCE_S, any_text=True)
    try:
        found = judge.evaluate(Program.start(graph))
        assert found.ok, found.error
    finally:
        judge.close()


def test_seconds_of_a_part_inside_another_count_once():
    clock = Clock(FakeClock(1.0))
    with clock.part("time"), clock.part("baselines"):
        pass
    with clock.part("time"):
        pass
    assert clock.seconds == {"baselines": 1.0, "time": 3.0}
