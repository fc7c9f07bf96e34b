"""A search that shares its device ends in time: what waiting does not count against, and what it does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.envs.steps.time_up import SIGNAL, TimeUp, time_up_after
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, Patch
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.random import RandomPlanner
from qimeng.program.program import Program
from qimeng.testing import FakeClock, FakeEvaluator, ScriptedPlanner, fake_task

PATIENCE_S = 60.0


class Shared(FakeEvaluator):
    """An answer takes 2 s, after a wait for the device."""

    def __init__(self, waits: Callable[[int], float]):
        super().__init__()
        self.clock, self.waits, self.waited, self.finals = FakeClock(), waits, 0.0, 0

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        wait = self.waits(len(self.calls))
        self.waited += wait
        self.clock.now += wait + 2.0
        return super().judge(program, patch)

    def verify(self, program: Program) -> Evaluation:
        self.finals += 1
        return super().verify(program)


def run(graph: OpGraph, judge: Shared, *script: str, **budget: Any) -> Any:
    search = GreedySearch(ScriptedPlanner(script) if script else RandomPlanner(0))
    made = Budget(**{"seconds": 1e6, "steps": 1000, "evaluations": 1000, **budget})
    return optimize(fake_task(graph, judge), search, made, clock=judge.clock, began=0.0, waited=lambda: judge.waited)


def test_waiting_does_not_count_against_the_budget(graph: OpGraph) -> None:
    alone, shared = Shared(lambda call: 0.0), Shared(lambda call: 50.0)
    results = [run(graph, judge, seconds=20.0) for judge in (alone, shared)]
    assert [len(judge.calls) for judge in (alone, shared)] == [10, 10], "9 programs and the final verification"
    assert shared.clock.now > 500 and {result.stopped for result in results} == {"seconds"}


def test_the_wall_limit_counts_waiting_and_leaves_time_to_verify(graph: OpGraph) -> None:
    judge = Shared(lambda call: 8.0)
    result = run(graph, judge, wall_seconds=100.0)
    assert result.stopped == "seconds" and judge.finals == 1 and result.evaluation.ok
    assert 80.0 < judge.clock.now <= 100.0, "a step and the verification were expected to wait as others did"


def test_one_long_wait_does_not_end_a_search(graph: OpGraph) -> None:
    judge = Shared(lambda call: 45.0 if call == 2 else 0.0)
    result = run(graph, judge, wall_seconds=120.0)
    assert judge.finals == 1 and result.evaluation.ok and judge.clock.now > 90.0


def test_what_there_is_no_time_to_verify_is_not_returned(graph: OpGraph) -> None:
    judge = Shared(lambda call: 45.0 if call == 2 else 0.0)
    result = run(graph, judge, *["fusion"] * 2, "lowering", "lowering", wall_seconds=54.0)
    assert judge.finals == 0 and result.on_pytorch and result.speedup == 1.0 and not result.unchecked
    assert result.notes[0].startswith("a program of ") and "no time for a final verification" in result.notes[0]


class Ended(FakeEvaluator):
    """The wall limit comes while it judges a program, or verifies one."""

    def __init__(self, call: int | None):
        super().__init__()
        self.call = call

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        if len(self.calls) == self.call:
            self.call = None
            raise TimeUp
        return super().judge(program, patch)

    def verify(self, program: Program) -> Evaluation:
        if self.call is not None:
            raise TimeUp
        return super().judge(program)


@pytest.mark.parametrize(("call", "verified"), [(2, True), (99, False)])
def test_a_limit_that_comes_in_the_middle_gives_a_result(graph: OpGraph, call: int, verified: bool) -> None:
    """In a step, after which there is time to verify, and in the final verification."""
    search = GreedySearch(ScriptedPlanner([*["fusion"] * 2, "lowering", "lowering", "stop"]))
    result = optimize(fake_task(graph, Ended(call)), search)
    assert result.evaluation.ok and result.on_pytorch is not verified and result.stopped == "seconds"
    assert any("no time for a final verification" in note for note in result.notes) is not verified


def test_a_limit_that_comes_before_anything_was_judged_is_said(graph: OpGraph) -> None:
    search = GreedySearch(ScriptedPlanner(["lowering", "stop"]))
    result = optimize(fake_task(graph, Ended(0)), search, Budget(wall_seconds=0.0))
    assert result.on_pytorch and result.evaluation.error == "there was no time to judge it: give more seconds"


def test_no_second_candidate_is_verified_without_time(graph: OpGraph) -> None:
    session = Session(fake_task(graph), Budget(wall_seconds=100.0), clock=(clock := FakeClock()))
    session.ledger.milestone, session.ledger.waiting = 10.0, 5.0
    clock.now = 85.0
    session.check_time()
    with pytest.raises(TimeUp):
        session.check_time(1)
    assert Session(fake_task(graph), Budget(), clock=clock).fits(1000)


def test_it_is_raised_even_while_a_lock_is_waited_for() -> None:
    before = signal.getsignal(SIGNAL)
    with pytest.raises(TimeUp), time_up_after(0.01):
        threading.Event().wait(PATIENCE_S)
    assert signal.getsignal(SIGNAL) is before
    with time_up_after(PATIENCE_S), time_up_after(float("inf")):
        pass


def test_other_threads_get_no_signal() -> None:
    seen: list[bool] = []

    def work() -> None:
        with time_up_after(0.001):
            seen.append(not threading.Event().wait(0.02))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
