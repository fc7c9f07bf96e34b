"""A judge that works on several requests gets a beam's next steps at once; the search finds what it finds without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from qimeng.envs.steps.ahead import submit_ahead
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.result import Result
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.envs.workers.local_pool import LocalPool
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Evaluation, EvaluationRequest, Evaluator, Patch, Request, Ticket
from qimeng.planner.beam import BeamSearch
from qimeng.planner.random import RandomPlanner
from qimeng.testing import FakeCoder, FakeEvaluator, fake_task

BUDGET = Budget(evaluations=24, steps=6)


class Several(FakeEvaluator):
    """Counts what is in flight."""

    at_once = 4

    def __init__(self) -> None:
        super().__init__()
        self.waiting: set[Ticket] = set()
        self.most = 0

    def submit(self, request: EvaluationRequest) -> Ticket:
        ticket = super().submit(request)
        self.waiting.add(ticket)
        self.most = max(self.most, len(self.waiting))
        return ticket

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        self.waiting -= set(tickets)
        return super().gather(tickets, timeout)


class Counting(FakeCoder):
    """Counts what it writes; another seed of the search would write something else."""

    written = 0

    def write(self, request: Request) -> Patch:
        self.written += 1
        return super().write(request)


def beam(graph: OpGraph, evaluator: Evaluator, coder: FakeCoder | None = None) -> Result:
    return optimize(fake_task(graph, evaluator, coder), BeamSearch(RandomPlanner(3), 3, 3), BUDGET)


def facts(result: Result) -> tuple[object, ...]:
    steps = [(s.action, s.accepted, s.patch_digest) for s in result.steps]
    return result.recipe, result.stopped, result.evaluations, result.evaluation.ms, steps


def test_a_beam_finds_the_same_with_several_requests_in_flight(graph: OpGraph) -> None:
    several, once, ahead = Several(), Counting(), Counting()
    assert facts(beam(graph, several, ahead)) == facts(beam(graph, FakeEvaluator(), once))
    assert several.most > 2, "children of one generation are in flight together"
    assert ahead.written <= once.written + 3 * 3, "each patch is written once; those of the last generation may be left"


def test_no_more_is_submitted_than_evaluations_are_left(graph: OpGraph) -> None:
    several = Several()
    session = Session(fake_task(graph, several), Budget(evaluations=3))
    session.begin()
    lowerings = [a for a in session.observe().actions if a.kind == "lowering"]
    assert len(lowerings) > 2
    submit_ahead([(session, action) for action in lowerings])
    assert len(several.waiting) == 2


def test_nothing_is_done_ahead_for_a_judge_of_one_request(graph: OpGraph) -> None:
    coder = Counting()
    session = Session(fake_task(graph, FakeEvaluator(), coder))
    session.begin()
    submit_ahead([(session, a) for a in session.observe().actions])
    assert not coder.written and not session.ledger.submitted


def test_an_engine_that_takes_no_request_is_named_by_the_step(graph: OpGraph) -> None:
    class Full(Several):
        def submit(self, request: EvaluationRequest) -> Ticket:
            if request.patch is not None:
                raise OSError("the queue is full")
            return super().submit(request)

    told = [s.evaluation.error or "" for s in beam(graph, Full()).steps if s.evaluation and not s.evaluation.ok]
    assert told and all("the evaluator Full raised OSError: the queue is full" in text for text in told)


def test_a_clone_gathers_no_ticket_of_another(graph: OpGraph) -> None:
    session = Session(fake_task(graph, Several()))
    session.begin()
    action = next(a for a in session.observe().actions if a.kind == "lowering")
    submit_ahead([(session, action)])
    twin = session.clone()
    assert session.step(action).evaluation == twin.step(action).evaluation


def in_a_process(graph: OpGraph) -> tuple[Evaluator, OpGraph]:
    return FakeEvaluator(), graph


@pytest.mark.slow
def test_a_beam_over_a_pool_of_processes(graph: OpGraph) -> None:
    pool = LocalPool(partial(in_a_process, graph), FakeEvaluator)
    assert pool.at_once == 2
    try:
        assert facts(beam(graph, pool)) == facts(beam(graph, FakeEvaluator()))
    finally:
        pool.close()


def test_an_action_that_does_not_apply_is_left_to_its_step(graph: OpGraph) -> None:
    session = Session(fake_task(graph, Several()))
    session.begin()
    submit_ahead([(session, Action("levitation", ()))])
    assert not session.ledger.submitted
