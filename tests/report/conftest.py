"""A result whose search met wrong programs and hostile text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from qimeng import KernelSpec, plan_and_code
from qimeng.envs.steps.result import Result
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.mcts import TreeSearch
from qimeng.program.program import Program
from qimeng.testing import FakeCoder, FakeEvaluator

HOSTILE = "</pre><script>alert(1)</script><b>"


@pytest.fixture(scope="session")
def result() -> Result:
    """A search in which some programs are wrong."""
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1)).eval()
    spec = KernelSpec.from_module(module, (torch.ones(4, 8),), name="a <small> one")
    turns: Iterator[int] = iter(range(1000))

    def wrong(program: Program) -> str | None:
        return f"off by 3 {HOSTILE}" if next(turns) in (3, 5) else None

    search = TreeSearch(HeuristicPlanner())
    return plan_and_code(
        spec, seconds=20, evaluations=12, coder=FakeCoder(), evaluator=FakeEvaluator(wrong=wrong), search=search
    )
