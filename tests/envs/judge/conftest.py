"""A judge for tests of its parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qimeng.envs.judge import judge_clock, verdicts
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A final verification calls a program again and again for a tenth of the usual second."""
    monkeypatch.setattr(verdicts, "REPEATS_S", 0.1)


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of the judge's own clock has few calls: enough where no time is tested."""
    monkeypatch.setitem(judge_clock.MOST_CALLS, "cpu", 12)


@pytest.fixture
def evaluator() -> Iterator[GpuEvaluator]:
    spec = KernelSpec.from_module(torch.nn.ReLU(), (torch.randn(64, 64),))
    made = GpuEvaluator(spec, capture_spec(spec), torch_device="cpu")
    yield made
    made.close()
