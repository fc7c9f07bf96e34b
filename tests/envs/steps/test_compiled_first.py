"""What PyTorch offers for a large computation is tried before a search, and returned where it finds nothing better."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from qimeng import KernelSpec
from qimeng.actions.large import MANY
from qimeng.envs.steps.compiled_first import SEVERAL
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, EvaluationRequest, Gate, Patch, Ticket, Timing
from qimeng.interfaces.faults import LEFT_ASIDE
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.testing import FakeClock, FakeEvaluator, ScriptedPlanner, fake_task

EAGER, RECORDED, COMPILED = 10.0, 6.0, 3.0


class Network(torch.nn.Module):
    """More operators than a search has steps for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(MANY):
            x = torch.softmax(x, 0)
        return x


class OfPyTorch(FakeEvaluator):
    """Eager, its launches recorded, TorchInductor's code recorded, and generated kernels take what is said."""

    def __init__(self, generated: float = EAGER, wrong: bool = False, estimated: bool = False):
        super().__init__(wrong=lambda p: "another rounding" if wrong and self.is_compiled(p) else None)
        self.generated, self.estimated = generated, estimated

    @staticmethod
    def is_compiled(program: Program) -> bool:
        return any(program.implementation(r).language == "library" for r in program.called)

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().judge(program, patch)
        after = program if patch is None else patch.apply(program, found.chosen)
        ms = (COMPILED if self.is_compiled(after) else RECORDED) if after.launch else EAGER
        ms = self.generated if any(after.implementation(r).generated for r in after.called) else ms
        timing = Timing(ms, 0.001, estimated=self.estimated)
        return replace(found, timing=timing, eager=Timing(EAGER, 0.001)) if found.ok else found


@pytest.fixture(scope="module")
def network() -> OpGraph:
    return capture_spec(KernelSpec.from_module(Network(), (torch.rand(4, 4),)), verify=False)


def run(graph: OpGraph, evaluator: FakeEvaluator, *script: str, **budget: int) -> Any:
    search = GreedySearch(ScriptedPlanner((*script, "stop")))
    return optimize(fake_task(graph, evaluator=evaluator), search, Budget(**budget))


def test_it_is_returned_although_nothing_is_left_for_a_search(network: OpGraph) -> None:
    result = run(network, OfPyTorch(), "lowering", evaluations=3)
    assert [(s.action.kind, s.action.param) for s in result.recipe.steps] == [
        ("launch", "cuda-graph"),
        ("library", "inductor"),
    ]
    assert (result.evaluation.ms, result.stopped) == (COMPILED, "evaluations")


def test_what_a_search_finds_is_returned_where_it_is_faster(network: OpGraph) -> None:
    result = run(network, OfPyTorch(generated=1.0), "lowering")
    assert [s.action.kind for s in result.recipe.steps] == ["lowering"], "it began at the start"
    assert result.evaluation.ms == 1.0


def test_one_launch_is_left_where_the_code_is_wrong(network: OpGraph) -> None:
    result = run(network, OfPyTorch(wrong=True), evaluations=3)
    assert ([s.action.kind for s in result.recipe.steps], result.evaluation.ms) == (["launch"], RECORDED)


@pytest.mark.parametrize("estimated", [False, True])
def test_small_computations_and_estimates_go_without(graph: OpGraph, network: OpGraph, estimated: bool) -> None:
    assert run(network if estimated else graph, OfPyTorch(estimated=estimated)).evaluations == 1


def test_of_several_operators_the_code_alone_is_tried() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(SEVERAL):
                x = torch.softmax(x, 0)
            return x

    class AtOnce(OfPyTorch):
        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            found, after = super().judge(program, patch), program if patch is None else patch.apply(program)
            return replace(found, timing=Timing(COMPILED, 0.001)) if self.is_compiled(after) else found

    block = capture_spec(KernelSpec.from_module(Block(), (torch.rand(4, 4),)), verify=False)
    result = run(block, AtOnce(), "lowering", evaluations=2)
    assert [s.action.kind for s in result.recipe.steps] == ["library"] and result.evaluation.ms == COMPILED


def test_the_code_of_a_small_computation_is_begun_all_the_same(graph: OpGraph) -> None:
    class Listening(OfPyTorch):
        begun = 0

        def submit(self, request: EvaluationRequest) -> Ticket:
            self.begun += not self.calls and self.is_compiled(request.candidates[0])
            return super().submit(request)

    for at_once, begun in ((1, 1), (2, 0)):
        evaluator = Listening()
        evaluator.at_once = at_once
        assert (run(graph, evaluator).evaluations, evaluator.begun) == (1, begun)


class Compiling(OfPyTorch):
    """TorchInductor's code is there `compiles_s` seconds after it was submitted first; every answer takes 2 s."""

    def __init__(self, compiles_s: float):
        super().__init__(generated=5.0)
        self.clock, self.compiles_s, self.waits = FakeClock(), compiles_s, list[float]()
        self.began: float | None = None

    def submit(self, request: EvaluationRequest) -> Ticket:
        if self.began is None and self.is_compiled(request.candidates[0]):
            self.began = self.clock()
        return super().submit(request)

    def answer(self, request: EvaluationRequest) -> Evaluation:
        self.clock.now += 2.0
        if request.patch is not None and self.is_compiled(request.candidates[0]):
            assert request.library_seconds is not None and self.began is not None
            self.waits.append(request.library_seconds)
            missing = max(0.0, self.began + self.compiles_s - self.clock.now)
            waited = min(missing, request.library_seconds)
            self.clock.now += waited
            if waited < missing:
                return Evaluation(Gate.COMPILE, "left aside: no time", LEFT_ASIDE, seconds={"library": waited})
        return super().answer(request)


@pytest.mark.parametrize(
    ("compiles_s", "answers", "ms"), [(4.0, 1, COMPILED), (10.0, 2, COMPILED), (45.0, 2, COMPILED), (90.0, 2, 5.0)]
)
def test_what_the_budget_leaves_no_time_for_is_left_aside(
    network: OpGraph, compiles_s: float, answers: int, ms: float
) -> None:
    """At once; after the search, which went on meanwhile; never, and what the search found is returned."""
    evaluator = Compiling(compiles_s)
    clock, task = evaluator.clock, fake_task(network, evaluator=evaluator)

    class Slowly(GreedySearch):
        def run(self, session: Session) -> str:
            reason = super().run(session)
            clock.now = 48.0
            return reason

    search = Slowly(ScriptedPlanner(("lowering", "stop")))
    result = optimize(task, search, Budget(seconds=60.0), clock=clock, began=0.0)
    assert (result.evaluation.ms, len(evaluator.waits)) == (ms, answers)
    assert clock.now < 60.0, "within the budget"
    said = [note for note in result.notes if "left aside" in note]
    assert len(said) == (ms != COMPILED) and all("inductor" in note for note in said)


def test_the_search_leaves_time_for_what_is_compiled_meanwhile(network: OpGraph) -> None:
    """It goes on until no step fits; the code that is there by then is tried all the same."""
    evaluator = Compiling(50.0)

    class Busy:
        def run(self, session: Session) -> str:
            while (reason := session.exhausted()) is None:
                evaluator.clock.now += 0.5
            return reason

    result = optimize(fake_task(network, evaluator=evaluator), Busy(), Budget(60.0), clock=evaluator.clock, began=0.0)
    assert (result.evaluation.ms, result.stopped) == (COMPILED, "seconds") and 50.0 < evaluator.clock.now <= 60.0


def test_what_was_submitted_ahead_gets_the_seconds_that_are_left_when_it_is_asked(graph: OpGraph) -> None:
    """Unless the engine has worked on it since."""

    class Echo(FakeEvaluator):
        def answer(self, request: EvaluationRequest) -> Evaluation:
            return Evaluation(Gate.PASSED, notes=(str(request.library_seconds),))

    task = fake_task(graph, evaluator=(engine := Echo()))
    for engine.at_once, seconds in ((1, 7.0), (2, 0.0)):
        old = Ticket(task.request(task.start, library_s=5.0), at=time.monotonic() - 1000.0)
        found = task.judged(task.start, submitted={old.request.digest: old}, library_s=7.0)
        assert float(found.notes[0]) == pytest.approx(seconds, abs=1.0)
