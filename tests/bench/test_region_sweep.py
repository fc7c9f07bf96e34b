"""Every action on every region of a network, each region once, whoever explores it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.actions import kind_named
from qimeng.actions.base import ScheduleKind
from qimeng.actions.large import unlike
from qimeng.bench.region_sweep import Claims, RegionSweep
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Evaluation, Patch, Timing
from qimeng.program.program import Program
from qimeng.testing import FakeEvaluator, fake_task, sample_graph

MANY = Budget(float("inf"), 10_000, 100_000)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return sample_graph()


def swept(graph: OpGraph, sweep: RegionSweep, budget: Budget = MANY) -> tuple[Session, str]:
    session = Session(fake_task(graph), budget)
    return session, sweep.run(session)


def test_every_rewrite_of_every_lowered_region_is_tried(graph: OpGraph) -> None:
    session, stopped = swept(graph, RegionSweep(few=(100, 100)))
    tried = [(a.parent, a.action) for a in session.ledger.attempts]
    assert stopped == "stop"
    lowered = [a for a in session.ledger.attempts if a.action.kind == "lowering"]
    assert {a.action.regions[0] for a in lowered} == {r.id for r in unlike(session.task.start)}
    for attempt in lowered:
        again = Session(session.task, MANY)
        again.begin()
        again.step(attempt.action)
        region = attempt.action.regions
        wanted = {a for a in again.observe().actions if a.regions == region and _rewrites(a)}
        assert wanted <= {action for parent, action in tried if parent == attempt.child}
    assert len(set(tried)) == len(tried), "nothing is tried twice"


def test_no_more_rewrites_than_asked_for_are_tried(graph: OpGraph) -> None:
    session, _ = swept(graph, RegionSweep(few=(2, 1)))
    regions = [a.action.regions for a in session.ledger.attempts if _rewrites(a.action)]
    assert regions and all(regions.count(r) <= 3 for r in regions)


def test_a_region_that_another_process_claimed_is_left_alone(graph: OpGraph, tmp_path: Path) -> None:
    first, _ = swept(graph, RegionSweep(Claims(tmp_path)))
    assert any(a.action.kind == "lowering" for a in first.ledger.attempts)
    second, stopped = swept(graph, RegionSweep(Claims(tmp_path)))
    assert stopped == "stop" and not any(a.action.kind == "lowering" for a in second.ledger.attempts)


def test_a_region_for_which_there_was_no_time_is_given_back(graph: OpGraph, tmp_path: Path) -> None:
    session, stopped = swept(graph, RegionSweep(Claims(tmp_path)), Budget(float("inf"), 3))
    assert stopped == "evaluations"
    explored = {a.action.regions for a in session.ledger.attempts if a.action.kind == "lowering"}
    assert len(list(tmp_path.iterdir())) <= len(explored)
    assert Claims(tmp_path).left(session.task.start, session.task.context.coder)


class Faster(FakeEvaluator):
    """Each generated region saves a tenth."""

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().judge(program, patch)
        after = patch.apply(program, found.chosen) if patch is not None else program
        count = sum(after.implementation(r).generated for r in after.called)
        return replace(found, timing=Timing(10.0 - count, 0.01))


def test_the_best_of_each_region_is_judged_together(graph: OpGraph) -> None:
    session = Session(fake_task(graph, Faster()), MANY)
    RegionSweep(few=(3,)).run(session)
    best = session.ledger.best
    assert best is not None and best.judged and best.ms == 10.0 - len(best.program.called)


def test_it_ends_with_the_budget(graph: OpGraph) -> None:
    session, stopped = swept(graph, RegionSweep(), Budget(float("inf"), 4))
    assert stopped == "evaluations" and session.ledger.evaluations == 4


def _rewrites(action: Action) -> bool:
    return isinstance(kind_named(action.kind), ScheduleKind)
