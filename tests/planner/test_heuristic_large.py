"""What the planner by rule does with programs of many operators: all at once first, then region by region."""

from __future__ import annotations

from dataclasses import replace

import torch

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.state import Budget
from qimeng.envs.steps.task import Task
from qimeng.interfaces import Action, Evaluation, Gate, Observation, Request, Step, Timing
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.store import Conditions
from qimeng.testing import FakeEvaluator

H200 = device_named("h200")
CONTEXT = Context(H200, TemplateCoder())
X = torch.rand(64, 256)


def chain(x: torch.Tensor) -> torch.Tensor:
    """161 small operators: pointwise ones, and a sum of rows after each six."""
    for _ in range(23):
        x = (x.sin() * 0.5 + 1).exp() * 0.1
        x = x - x.sum(-1, keepdim=True)
    return x


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Forty operators that no kernel can compute together, of a few kinds."""
    for _ in range(10):
        x = x.sin().cumsum(1).exp().cumsum(0)
    return x


def start(thing: object) -> Program:
    return Program.start(capture_spec(KernelSpec.of(thing, (X,))))


def observed(program: Program, times: dict[str, float] | None = None, *tried: Action) -> Observation:
    """The program with these milliseconds a region label, 1 for others."""
    found = {r.id: (times or {}).get(r.label(), 1.0) for r in program.regions}
    evaluation = Evaluation(Gate.PASSED, timing=Timing(sum(found.values()), estimated=True), region_ms=found)
    history = tuple(Step(a, None, True) for a in tried)
    offered = legal_actions(program, CONTEXT)
    return Observation(program, offered, evaluation, None, 1.0, history, H200)


def test_a_chain_of_161_small_operators_becomes_few_kernels_within_a_few_evaluations() -> None:
    program = start(chain)
    assert len(program.regions) == 161
    task = Task(program, CONTEXT, FakeEvaluator(H200, estimated=True), Conditions("x", H200.name, estimated=True))
    result = optimize(task, GreedySearch(HeuristicPlanner()), Budget(seconds=1e9, evaluations=5))
    assert len(result.program.regions) <= 3 and result.evaluation.generated_share == 1
    assert [s.action.kind for s in result.steps[:2]] in (["cluster", "lowering"], ["cluster", "lower_all"])


def test_a_large_program_is_clustered_then_lowered_then_tuned() -> None:
    choose, program = HeuristicPlanner().choose, start(mixed)
    assert choose(observed(program)) == Action("cluster")
    program = CONTEXT.coder.write(Request(program, Action("cluster"), H200)).apply(program)
    assert choose(observed(program)) == Action("lower_all")
    program = CONTEXT.coder.write(Request(program, Action("lower_all"), H200)).apply(program)
    chosen = choose(observed(program, None, Action("lower_all")))
    assert len(chosen.regions) == 1 and chosen.kind not in ("cluster", "lower_all", "fusion", "stop")
    estimated = observed(program, None, Action("lower_all"))
    measured = replace(estimated, evaluation=replace(estimated.evaluation, timing=Timing(1.0)))
    assert choose(measured) == Action("launch", (), "cuda-graph"), "before any region is tuned"


def test_a_large_program_that_was_timed_is_recorded_first() -> None:
    choose, program = HeuristicPlanner().choose, start(mixed)
    estimated = observed(program)
    for timing, first in (
        (Timing(1.0), Action("launch", (), "cuda-graph")),
        (Timing(1.0, estimated=True), Action("cluster")),
    ):
        assert choose(replace(estimated, evaluation=replace(estimated.evaluation, timing=timing))) == first


def test_attempts_go_to_regions_by_their_share_of_the_time() -> None:
    choose, program = HeuristicPlanner().choose, start(mixed)
    for action in (Action("cluster"), Action("lower_all")):
        program = CONTEXT.coder.write(Request(program, action, H200)).apply(program)
    labels = sorted({r.label() for r in program.regions})
    assert len(labels) >= 2
    times = {labels[0]: 10.0, labels[1]: 6.0}
    tried = [Action("lower_all")]
    for _ in range(5):
        tried.append(choose(observed(program, times, *tried)))
    chosen = [program.region(a.regions[0]).label() for a in tried[1:]]
    assert chosen[0] == labels[0] and 1 <= chosen.count(labels[1]) < chosen.count(labels[0]), chosen


def test_kernels_that_take_no_longer_than_a_launch_are_left_alone() -> None:
    choose, program = HeuristicPlanner().choose, start(mixed)
    for action in (Action("cluster"), Action("lower_all")):
        program = CONTEXT.coder.write(Request(program, action, H200)).apply(program)
    labels = {r.label() for r in program.regions}
    assert choose(observed(program, dict.fromkeys(labels, 0.0035), Action("lower_all"))) == Action("stop")
    assert choose(observed(program, dict.fromkeys(labels, 0.1), Action("lower_all"))) != Action("stop")


def test_a_kernel_much_slower_than_pytorch_is_given_back_with_all_equal_ones() -> None:
    choose, program = HeuristicPlanner().choose, start(mixed)
    program = CONTEXT.coder.write(Request(program, Action("cluster"), H200)).apply(program)
    region = next(r for r in program.regions if sum(r.signature == s.signature for s in program.regions) > 2)
    lowering = Action("lowering", (region.id,))
    lowered = CONTEXT.coder.write(Request(program, lowering, H200)).apply(program)
    before, after = observed(program), observed(lowered, {region.label(): 3.0})
    history = (Step(Action("lower_all"), before.evaluation, True), Step(lowering, after.evaluation, True))
    assert choose(replace(after, history=history)) == Action("library", (region.id,))
