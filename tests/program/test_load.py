"""Programs as modules: copies and pickles of them, and optimizing one again."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qimeng import KernelSpec, plan_and_code
from qimeng.testing import FakeCoder, FakeEvaluator

X = torch.randn(4, 8)


@pytest.fixture
def faster() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    found = plan_and_code(
        module, (X,), seconds=20, coder=FakeCoder(), evaluator=FakeEvaluator(), planner="heuristic", search="greedy"
    )
    assert not found.on_pytorch
    return found.module


@torch.no_grad()
@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_program_can_be_copied(faster: nn.Module, way: Callable[[nn.Module], nn.Module]) -> None:
    before = faster(X)
    twin = way(faster)
    assert type(twin).__name__ == "Model" and not twin.training
    assert torch.equal(twin(X), before)
    for parameter in twin.parameters():
        parameter.zero_()
    assert torch.equal(twin(X), torch.zeros(4, 8)) and torch.equal(faster(X), before)


@torch.no_grad()
def test_a_pickle_is_read_by_another_process(faster: nn.Module, tmp_path: Path) -> None:
    torch.save((faster, X, faster(X)), tmp_path / "model.pt")
    code = "import sys, torch; m, x, y = torch.load(sys.argv[1], weights_only=False); assert torch.equal(m(x), y)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@torch.no_grad()
def test_a_program_is_optimized_again_from_what_it_was_made_from(faster: nn.Module) -> None:
    faster.load_state_dict({key: value * 2 for key, value in faster.state_dict().items()})
    spec = KernelSpec.from_module(faster, (X,))
    made: Any = spec.module()
    assert isinstance(made, nn.Sequential)
    assert torch.allclose(made(X), faster(X), atol=1e-6)
    assert spec.digest == KernelSpec.from_module(nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), (X,)).digest
