"""A judge for tests of its parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


@pytest.fixture
def evaluator() -> Iterator[GpuEvaluator]:
    spec = KernelSpec.from_module(torch.nn.ReLU(), (torch.randn(64, 64),))
    made = GpuEvaluator(spec, capture_spec(spec), torch_device="cpu")
    yield made
    made.close()
