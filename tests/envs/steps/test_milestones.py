"""Steps judged on their region: sums until a milestone, which measures them or leaves out the step at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from qimeng.envs.judge.region_judges import RegionJudges
from qimeng.envs.steps import milestones
from qimeng.envs.steps.caching import CachingEvaluator, ReplayEvaluator
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.result import outcome_text
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.setup import make_task
from qimeng.envs.steps.state import Budget, Progress
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Asked, Evaluation, EvaluationRequest, Gate, Patch, Scope, Timing
from qimeng.program.program import Program
from qimeng.store import Store
from qimeng.testing import FakeClock, FakeEvaluator, fake_task


class ByRegion(FakeEvaluator):
    """Answers about the region alone where that is asked. A generated kernel takes half of PyTorch's time.

    Args:
        wrong_whole: says why a whole program is wrong, or None.
        more: a whole program takes so many times the sum of its regions.
    """

    def __init__(self, wrong_whole: Callable[[Program], str | None] = lambda program: None, more: float = 1.0):
        super().__init__()
        self.wrong_whole, self.more = wrong_whole, more
        self.asked: list[Asked] = []

    def answer(self, request: EvaluationRequest) -> Evaluation:
        self.asked.append(request.asked)
        return self.alone(request) if request.asked is Asked.REGION else super().answer(request)

    def alone(self, request: EvaluationRequest) -> Evaluation:
        assert request.patch is not None and request.patch.target is not None
        program = request.candidates[0]
        at = self.times(program)[request.patch.target]
        beside = self.times(Program(program.graph, program.regions))[request.patch.target]
        return Evaluation(Gate.PASSED, timing=Timing(at), eager=Timing(beside), scope=Scope.REGION)

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        if patch is None and (reason := self.wrong_whole(program)):
            return Evaluation(Gate.PROGRAM, reason, "wrong")
        found, times = super().judge(program, patch), self.times(patch.apply(program) if patch else program)
        return replace(found, timing=Timing(sum(times.values()) * self.more), region_ms=times)

    def times(self, program: Program) -> dict[str, float]:
        plain = super().judge(Program(program.graph, program.regions)).region_ms
        return {r.id: plain[r.id] / (1 + program.implementation(r).generated) for r in program.regions}


def started(graph: OpGraph, evaluator: FakeEvaluator, **options: object) -> Session:
    session = Session(replace(fake_task(graph, evaluator), by_region=True), **options)  # type: ignore[arg-type]
    session.begin()
    return session


def lowerings(session: Session) -> list[Action]:
    return [a for a in session.observe().actions if a.kind == "lowering"]


def test_a_step_is_judged_on_its_region_and_its_time_is_a_sum(graph: OpGraph) -> None:
    judge = ByRegion()
    session = started(graph, judge)
    action = lowerings(session)[0]
    step = session.step(action)
    assert judge.asked == [Asked.TIMING, Asked.REGION]
    assert step.accepted and step.evaluation is not None and step.evaluation.scope is Scope.SUM
    whole = judge.judge(session.state.program)
    assert step.evaluation.ms == pytest.approx(whole.ms)
    assert step.evaluation.region_ms == pytest.approx(whole.region_ms)
    share = whole.region_ms[action.regions[0]] / sum(whole.region_ms.values())
    assert step.evaluation.generated_share == pytest.approx(share)
    assert "sum of its regions" in outcome_text(step)
    assert not session.state.judged and session.ledger.best is not session.state
    assert session.ledger.leader is session.state and session.state.record is not None
    assert session.state.record.ms is None


def test_regions_count_with_their_share_of_what_the_whole_program_took(graph: OpGraph) -> None:
    session = started(graph, ByRegion(more=2.0))
    step = session.step(lowerings(session)[0])
    assert step.evaluation is not None and step.evaluation.eager is not None
    assert step.evaluation.ms == pytest.approx(ByRegion(more=2.0).judge(session.state.program).ms)


def test_a_fused_region_counts_with_what_its_operators_took_on_pytorch(graph: OpGraph) -> None:
    judge = ByRegion()
    session = started(graph, judge)
    for name in ("lowering", "fusion"):
        session.step(next(a for a in session.observe().actions if a.kind == name))
    fused = max(session.state.program.regions, key=lambda r: len(r.ops))
    session.step(Action("lowering", (fused.id,)))
    plain = judge.judge(Program.start(graph)).region_ms
    alone = session.ledger.known[session._names(*_last_patch(session))[0]]
    assert alone.speedup is not None and session.state.evaluation is not None
    on_torch = sum(ms for r, ms in plain.items() if set(Program.start(graph).region(r).nodes) <= set(fused.nodes))
    assert session.state.evaluation.region_ms[fused.id] == pytest.approx(on_torch / alone.speedup)


def _last_patch(session: Session) -> tuple[Program, Patch]:
    parent, record = session.state.parent, session.state.record
    assert parent is not None and record is not None
    return parent.program, record.patch.patch(parent.program.graph)


def test_the_whole_program_is_judged_after_so_many_steps(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milestones, "EVERY", 2)
    judge = ByRegion(more=3.0)
    session = started(graph, judge)
    for _ in range(2):
        session.step(lowerings(session)[0])
    assert judge.asked == [Asked.TIMING, Asked.REGION, Asked.REGION, Asked.TIMING]
    assert session.state.judged and session.state.evaluation is not None
    assert session.state.evaluation.scope is Scope.PROGRAM
    assert session.ledger.best is session.ledger.leader is session.state
    assert session.state.record is not None and session.state.record.ms == session.state.ms


def test_a_run_ends_with_a_milestone_and_a_final_verification(graph: OpGraph) -> None:
    judge = ByRegion()

    class Planned:
        def run(self, session: Session) -> str:
            for action in (*lowerings(session)[:2], Action("stop")):
                session.step(action)
            return "stop"

    result = optimize(replace(fake_task(graph, judge), by_region=True), Planned())
    assert judge.asked == [Asked.TIMING, Asked.REGION, Asked.REGION, Asked.TIMING, Asked.FINAL]
    assert len(result.recipe) == 2 and result.evaluation.scope is Scope.PROGRAM
    assert "time: sum of its regions" in result.report()


def test_a_search_that_ends_without_a_stop_has_its_best_sum_judged(graph: OpGraph) -> None:
    judge = ByRegion()

    class Two:
        def run(self, session: Session) -> str:
            branch = session.fork()
            for _ in range(2):
                branch.step(lowerings(branch)[0])
            return "steps"

    result = optimize(replace(fake_task(graph, judge), by_region=True), Two())
    assert judge.asked[-2:] == [Asked.TIMING, Asked.FINAL] and len(result.recipe) == 2


def test_without_time_to_look_for_the_step_at_fault_all_are_left_out(graph: OpGraph) -> None:
    clock = FakeClock()
    judge = ByRegion(wrong_whole=lambda p: None if p.on_pytorch else "error 3.0")
    session = started(graph, judge, budget=Budget(wall_seconds=100.0), clock=clock)
    session.ledger.milestone = 20.0
    for action in lowerings(session)[:2]:
        session.step(action)
    asked, clock.now = judge.asked.count(Asked.TIMING), 75.0
    session.settle()
    assert judge.asked.count(Asked.TIMING) == asked + 1 and session.state.program is session.task.start


def test_the_step_at_fault_is_left_out_and_the_others_are_kept(graph: OpGraph) -> None:
    bad: list[str] = []
    told: list[Progress] = []
    judge = ByRegion(wrong_whole=lambda p: "error 3.0" if any(b in p.source for b in bad) else None)
    session = started(graph, judge, on_step=told.append)
    actions = lowerings(session)[:4]
    before = session.state.program
    bad.append(f"fake_{before.region(actions[1].regions[0]).signature}")
    for action in actions:
        session.step(action)
    alone = judge.asked.count(Asked.REGION)
    session.step(Action("stop"))
    assert judge.asked.count(Asked.REGION) == alone, "what was judged alone is not judged again"
    program = session.state.program
    kept = [program.implementation(program.region(a.regions[0])).generated for a in actions]
    assert kept == [True, False, True, True]
    assert session.state.path()[-1].judged and session.ledger.best is not None
    assert session.ledger.best.program is program
    refused = [s for s in session.state.history if not s.accepted]
    assert [s.action for s in refused] == [actions[1]] and "right alone" in str(refused[0].evaluation)
    assert len(session.state.history) == 5
    assert [a.accepted for a in session.ledger.attempts] == [True, False, True, True, True]
    assert any("refused as part of the whole" in p.text for p in told)
    again = started(graph, judge)
    again.ledger = session.ledger
    assert not again.step(actions[1]).accepted, "it is not accepted again on its region"


def test_a_program_is_settled_before_a_step_that_is_about_the_whole(graph: OpGraph) -> None:
    judge = ByRegion()
    session = started(graph, judge)
    session.step(lowerings(session)[0])
    step = session.step(Action("launch", (), "cuda-graph"))
    assert judge.asked[1:] == [Asked.REGION, Asked.TIMING, Asked.TIMING], step
    assert session.state.judged


def test_a_step_on_all_of_the_program_is_judged_as_a_whole(graph: OpGraph) -> None:
    judge = ByRegion()
    session = started(graph, judge)
    for _ in range(4):
        session.step(next(a for a in session.observe().actions if a.kind == "fusion"))
    (one,) = session.state.program.regions
    step = session.step(Action("lowering", (one.id,)))
    assert step.accepted and judge.asked == [Asked.TIMING, Asked.TIMING] and session.state.judged


def test_an_engine_that_knows_whole_programs_alone_judges_those(graph: OpGraph) -> None:
    judge = ByRegion()
    session = started(graph, judge)
    judge.alone = lambda request: judge.judge(request.program, request.patch)  # type: ignore[method-assign]
    step = session.step(lowerings(session)[0])
    assert step.evaluation is not None and step.evaluation.scope is Scope.PROGRAM
    assert session.state.judged and session.ledger.best is session.state


def test_what_was_judged_on_its_region_is_answered_from_the_store(graph: OpGraph) -> None:
    store, judge = Store(), ByRegion()
    task = replace(fake_task(graph, judge), by_region=True)
    task = replace(task, evaluator=CachingEvaluator(judge, store, task.conditions))
    for _ in range(2):
        session = Session(task, store=store)
        session.begin()
        taken = [session.step(lowerings(session)[0]) for _ in range(2)]
        assert all(s.evaluation is not None and s.evaluation.scope is Scope.SUM for s in taken)
    assert judge.asked == [Asked.TIMING, Asked.REGION, Asked.REGION]
    assert {purpose for _, purpose, _, e in store.evaluations() if e.scope is Scope.REGION} == {"region"}
    replayed = Session(replace(task, evaluator=ReplayEvaluator(store, task.conditions)))
    replayed.begin()
    assert replayed.step(lowerings(replayed)[0]).accepted


def test_the_scope_travels_with_an_evaluation() -> None:
    found = Evaluation(Gate.PASSED, timing=Timing(1.0), scope=Scope.SUM)
    assert Evaluation.from_json(found.to_json()) == found


TWO = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Tanh())


def test_a_task_is_judged_by_region_where_that_is_asked_for() -> None:
    for by_region in (None, True):
        task = make_task(TWO, (torch.rand(8, 8),), device="h200", by_region=by_region)
        assert task.by_region is bool(by_region)
        assert isinstance(task.evaluator, RegionJudges) is bool(by_region)
        task.evaluator.close()


@pytest.mark.slow
def test_estimates_by_region_are_sums_of_estimates() -> None:
    task = make_task(TWO, (torch.rand(8, 8),), device="h200", by_region=True)
    session = Session(task)
    session.begin()
    step = session.step(lowerings(session)[0])
    assert step.accepted and step.evaluation is not None and step.evaluation.scope is Scope.SUM
    assert step.evaluation.timing is not None and step.evaluation.timing.estimated
    session.settle()
    assert session.state.judged and session.state.ms == pytest.approx(step.evaluation.ms)
    task.evaluator.close()
