"""The final verification walks back to what is right, and returns the fastest of what it verified."""

from __future__ import annotations

import pytest

from qimeng.envs.steps import final_verification
from qimeng.envs.steps.loop import finish, optimize
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, Gate
from qimeng.program.program import Program
from qimeng.testing import FakeClock, FakeEvaluator, fake_task
from tests.envs.steps.scripts import FUSE_ALL, Timed, first, scripted, started


def test_a_winner_that_fails_is_walked_back(graph: OpGraph) -> None:
    class Fails(Timed):
        def verify(self, program: Program) -> Evaluation:
            generated = sum(program.implementation(r).generated for r in program.regions)
            if generated > 1:
                return Evaluation(Gate.PROGRAM, "output 0 differs", "wrong")
            return super().verify(program)

    result = optimize(
        fake_task(graph, Fails(10.0, 8.0, 6.0, 5.0, final=(7.9,))), scripted("lowering", "lowering", "lowering")
    )
    assert len(result.recipe) == 1 and result.evaluation.ms == 7.9
    assert sum("output 0 differs" in note for note in result.notes) == 2


def test_when_everything_fails_the_start_program_is_returned(graph: OpGraph) -> None:
    class Fails(FakeEvaluator):
        def verify(self, program: Program) -> Evaluation:
            if any(program.implementation(r).generated for r in program.regions):
                return Evaluation(Gate.PROGRAM, "differs", "wrong")
            return super().verify(program)

    result = optimize(fake_task(graph, Fails()), scripted(*FUSE_ALL))
    assert len(result.recipe) == 0 and result.speedup == pytest.approx(1.0)


def test_a_winner_that_is_slower_when_timed_again_is_walked_back(graph: OpGraph) -> None:
    evaluator = Timed(10.0, 5.0, final=(10.2, 10.0))
    result = optimize(fake_task(graph, evaluator), scripted("lowering"))
    assert len(result.recipe) == 0
    assert any("when timed again" in note for note in result.notes)


def test_a_winner_is_returned_where_what_came_before_it_turns_out_to_be_slower_still(graph: OpGraph) -> None:
    evaluator = Timed(10.0, 5.0, 4.0, final=(5.5, 7.0))
    result = optimize(fake_task(graph, evaluator), scripted("lowering", "lowering"))
    assert len(result.recipe) == 2 and result.evaluation.ms == 5.5
    assert any("to replace it" in note for note in result.notes)


def test_the_faster_one_before_a_winner_is_returned(graph: OpGraph) -> None:
    evaluator = Timed(10.0, 5.0, 4.0, final=(5.5, 5.0))
    result = optimize(fake_task(graph, evaluator), scripted("lowering", "lowering"))
    assert len(result.recipe) == 1 and result.evaluation.ms == 5.0


def test_a_winner_that_was_verified_is_returned_where_no_time_is_left_for_another(graph: OpGraph) -> None:
    session = started(graph, evaluator=Timed(10.0, 5.0, 4.0, final=(5.5, 5.0)))
    for _ in range(2):
        session.step(first(session, "lowering"))
    left = iter([True, True])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session, "fits", lambda evaluations=0: next(left, False))
        result = finish(session, "stop")
    assert len(result.recipe) == 2 and result.evaluation.ms == 5.5


def test_a_winner_slower_than_eager_is_not_returned(graph: OpGraph) -> None:
    evaluator = Timed(10.0, 5.0, final=(5.0, 10.0), eager=4.9)
    result = optimize(fake_task(graph, evaluator), scripted("lowering"))
    assert len(result.recipe) == 0


def test_what_the_verification_refused_is_not_returned_when_it_is_interrupted(graph: OpGraph) -> None:
    class Interrupted(Timed):
        refused = 0

        def verify(self, program: Program) -> Evaluation:
            if self.refused:
                raise KeyboardInterrupt
            self.refused += 1
            return Evaluation(Gate.PROGRAM, "output 0 differs", "wrong")

    result = optimize(fake_task(graph, Interrupted(10.0, 8.0, 6.0)), scripted("lowering", "lowering"))
    assert len(result.recipe) == 1 and result.evaluation.ms == 8.0


@pytest.mark.parametrize(
    ("failure", "templates", "seconds", "finals"),
    [
        ("clock", True, 60, 2),
        ("not-timed", True, 60, 2),
        ("clock", False, 60, 1),
        ("wrong", True, 60, 1),
        ("clock", True, 0, 1),
    ],
)
def test_a_program_whose_clocks_disagreed_in_the_end_is_verified_once_more(
    graph: OpGraph, monkeypatch: pytest.MonkeyPatch, failure: str, templates: bool, seconds: float, finals: int
) -> None:
    """Where seconds are left, and where no text could cheat."""

    class Disagrees(Timed):
        asked = 0

        def verify(self, program: Program) -> Evaluation:
            if program.on_pytorch:
                return super().verify(program)
            self.asked += 1
            return Evaluation(Gate.TIMING, "too long", failure) if self.asked == 1 else super().verify(program)

    evaluator, clock = Disagrees(10.0, 5.0, final=(5.0,)), FakeClock()
    session = Session(fake_task(graph, evaluator), Budget(seconds=60), clock=clock)
    session.begin()
    session.step(first(session, "lowering"))
    clock.now = 60 - seconds
    monkeypatch.setattr(final_verification, "printed", lambda program: templates)
    result = finish(session, "done")
    assert evaluator.asked == finals and result.on_pytorch is (finals == 1)
    assert ("the program of 1 steps was verified again: too long" in result.notes) is (finals == 2)
