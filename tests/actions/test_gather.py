"""Programs of very many regions become small in one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qimeng.actions import Context, check_action, legal_actions
from qimeng.actions.gather import MANY, Gather, gathered
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.setup import make_task
from qimeng.envs.steps.state import Budget
from qimeng.errors import IllegalAction
from qimeng.graph.groups import pointwise_groups
from qimeng.graph.verify import capture_spec
from qimeng.interfaces import Action
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.spec import KernelSpec
from qimeng.testing import ScriptedPlanner

X = torch.rand(8, 16)
GATHER = Action("gather")
H200 = device_named("h200")


def steps(x: torch.Tensor, k: torch.Tensor, n: int = 20) -> Any:
    """An unrolled loop: 8 operators a step."""
    v = torch.zeros_like(x)
    for _ in range(n):
        v = v + 0.01 * (-k * x - 0.1 * v)
        x = x + 0.01 * v
    return x, v


def with_sums(x: torch.Tensor) -> torch.Tensor:
    """Chains of five pointwise operators, each with a sum after it."""
    for _ in range(20):
        x = (x.sin() * 0.5 + 1).exp() * 0.1
        x = x - x.sum(-1, keepdim=True)
    return x


def start(thing: Any, *inputs: Any) -> Program:
    return Program.start(capture_spec(KernelSpec.of(thing, inputs)))


def test_one_step_makes_an_unrolled_loop_one_region() -> None:
    task = make_task(steps, (X, torch.rand(16)), device="h200")
    assert len(task.start.regions) == 161
    result = optimize(task, GreedySearch(ScriptedPlanner(["lowering"])), Budget(seconds=120, evaluations=3))
    assert [s.text.split(":")[0] for s in result.steps[:2]] == ["gather", "lowering"]
    assert len(result.program.regions) == 1 and result.evaluation.ok and result.evaluation.generated_share == 1


def test_groups_end_at_operators_of_other_kinds() -> None:
    program = start(with_sums, X)
    groups = list(pointwise_groups(program.regions))
    assert len(groups) == 20 and {len(g) for g in groups} == {5, 6}, "the difference joins the next chain"
    context = Context(H200, TemplateCoder())
    check_action(program, GATHER, context)
    regions = gathered(program, context)
    assert len(regions) == 41, "20 chains, 20 sums, and the last difference"
    model, x = program.with_regions(regions).load().Model(), torch.randn(8, 16)
    torch.testing.assert_close(model(x), with_sums(x))


def test_large_groups_are_cut_and_refused_ones_halved() -> None:
    program = start(steps, X, torch.rand(16))
    assert [len(g) for g in pointwise_groups(program.regions, most=50)] == [50, 50, 50, 11]

    class Small(TemplateCoder):
        def can_implement(self, region: Any) -> str | None:
            return "too large" if len(region.nodes) > 45 else super().can_implement(region)

    regions = gathered(program, Context(H200, Small()))
    assert 4 <= len(regions) <= 8 and max(len(r.nodes) for r in regions) <= 45


def test_small_programs_are_not_offered_it() -> None:
    program = start(lambda x: (x.sin() * 2 + 1).exp(), X)
    context = Context(H200, TemplateCoder())
    assert not [a for a in legal_actions(program, context) if a.kind == "gather"]
    with pytest.raises(IllegalAction, match=f"gather is for programs of {MANY} regions or more, this one has 4"):
        check_action(program, GATHER, context)
    many = start(lambda x: [x.cumsum(i % 2) for i in range(MANY)], X)
    with pytest.raises(IllegalAction, match="no pointwise operators that touch"):
        Gather().check(many, GATHER, context)
