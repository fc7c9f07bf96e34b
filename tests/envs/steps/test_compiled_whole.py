"""torch.compile's code is returned where it is right and faster than what the search found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qimeng.envs.steps.compiled_whole import BEHIND
from qimeng.envs.steps.loop import optimize
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, Gate, Patch, Timing
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.testing import FakeEvaluator, ScriptedPlanner, fake_task

EAGER, FOUND = 10.0, 8.0


class Beside(FakeEvaluator):
    """Generated programs take `FOUND` ms; torch.compile and TorchInductor's code take what is said."""

    def __init__(self, compiled: float, inductor: float, mode: str = "default", wrong: str = "", found: float = FOUND):
        super().__init__()
        self.found, self.compiled, self.inductor, self.mode, self.wrong_in = found, compiled, inductor, mode, wrong
        self.finals, self.recorded = 0, 0.0

    def _timed(self, found: Evaluation, program: Program) -> Evaluation:
        by_inductor = "inductor" in {program.implementation(r).language for r in program.called} or any(
            "inductor" in program.implementation(r).source for r in program.called
        )
        if by_inductor and self.wrong_in:
            return Evaluation(Gate.PROGRAM, self.wrong_in, "wrong")
        ms = self.inductor if by_inductor else self.found
        return replace(found, timing=Timing(ms, 0.001), eager=Timing(EAGER, 0.001))

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().judge(program, patch)
        return self._timed(found, program if patch is None else patch.apply(program, found.chosen))

    def verify(self, program: Program) -> Evaluation:
        self.finals += 1
        found = self._timed(super().judge(program), program)
        return replace(found, compiled={self.mode: Timing(self.compiled, 0.001)})


def run(graph: OpGraph, evaluator: Beside) -> Any:
    return optimize(fake_task(graph, evaluator=evaluator), GreedySearch(ScriptedPlanner(("lowering", "stop"))))


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_it_is_returned_where_it_is_faster(graph: OpGraph, mode: str) -> None:
    result = run(graph, Beside(compiled=5.0, inductor=5.1, mode=mode))
    assert result.evaluation.ms == 5.1
    assert [step.action.kind for step in result.recipe.steps] == ["library"]
    assert result.recipe.steps[0].action.param == ("inductor" if mode == "default" else "inductor-tuned")


@pytest.mark.parametrize(
    "evaluator",
    [
        Beside(compiled=FOUND / BEHIND * 1.001, inductor=1.0),
        Beside(compiled=5.0, inductor=9.0),
        Beside(compiled=5.0, inductor=1.0, wrong="another rounding"),
        Beside(compiled=5.0, inductor=1.0, mode="reduce-overhead"),
    ],
    ids=["not behind", "its code by itself is slower", "wrong", "a mode without such an option"],
)
def test_else_what_was_found_is(graph: OpGraph, evaluator: Beside) -> None:
    result = run(graph, evaluator)
    assert result.evaluation.ms == FOUND
    said = [note for note in result.notes if "torch.compile's code is faster" in note]
    assert [evaluator.wrong_in in note for note in said] == ([True] if evaluator.wrong_in else [])
    assert [step.action.kind for step in result.recipe.steps] == ["lowering"]


def test_code_that_is_slower_than_eager_is_not_returned(graph: OpGraph) -> None:
    result = run(graph, Beside(compiled=5.0, inductor=EAGER * 1.05, found=EAGER * 1.2))
    assert result.on_pytorch and result.speedup == 1.0


def test_it_is_recorded_as_a_cuda_graph_where_that_is_faster_still(graph: OpGraph) -> None:
    class Recorded(Beside):
        def _timed(self, found: Evaluation, program: Program) -> Evaluation:
            found = super()._timed(found, program)
            return replace(found, timing=Timing(self.recorded, 0.001)) if program.launch else found

    for recorded, launch in ((3.0, "cuda-graph"), (5.5, "")):
        evaluator = Recorded(compiled=5.0, inductor=5.1)
        evaluator.recorded = recorded
        result = run(graph, evaluator)
        assert (result.evaluation.ms, result.program.launch) == (min(recorded, 5.1), launch)
