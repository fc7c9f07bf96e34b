"""Live answers: judges start late, few at a time, each program once; trees first; the budget counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qimeng.device import DEVICES
from qimeng.envs.estimate.estimator import EstimatingEvaluator
from qimeng.envs.steps.caching import ReplayEvaluator
from qimeng.envs.steps.task import Task
from qimeng.interfaces import Evaluation, EvaluationRequest, Evaluator
from qimeng.planner.data.generate import Bytes, draw_many
from qimeng.planner.lm import live
from qimeng.planner.lm.live import FirstStored, Meter, MeteredEvaluator, OpenJudges, live_tasks, mixed_task
from qimeng.planner.lm.stored import StoredTask
from qimeng.store import Store
from qimeng.testing import FakeCoder, FakeEvaluator


class Closing(FakeEvaluator):
    """Remembers how many are open."""

    open = made = 0

    def __init__(self) -> None:
        super().__init__(estimated=True)
        Closing.open += 1
        Closing.made += 1

    def close(self) -> None:
        Closing.open -= 1


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake is the judge of this machine."""
    Closing.open = Closing.made = 0

    def make(*_: Any) -> Evaluator:
        return Closing()

    monkeypatch.setattr(live, "make_evaluator", make)


def test_judges_are_open_a_few_at_a_time(judged: None) -> None:
    meter, judges, store = Meter(limit=4), OpenJudges(limit=2), Store()
    specs = [d.spec for d in draw_many(11, 3, 3, Bytes(1 << 12, 1 << 14))]
    tasks = list(live_tasks(specs, DEVICES["h200"], store, meter, judges, FakeCoder()))
    assert len(tasks) == 3 and Closing.made == 0
    assert all(
        t.estimated and dict(t.conditions.versions)["evaluator"] == f"EstimatingEvaluator {EstimatingEvaluator.version}"
        for t in tasks
    )
    for task in tasks:
        assert task.evaluator.evaluate(task.start).ok
    assert (Closing.made, Closing.open, meter.used, meter.over()) == (3, 2, 3, False)
    assert tasks[0].evaluator.evaluate(tasks[0].start).ok  # from the store: neither judged nor counted again
    assert (Closing.made, meter.used, store.counts()["evaluations"]) == (3, 3, 3)
    judges.close()
    assert Closing.open == 0


def test_a_meter_without_limit_is_never_over(task: Task) -> None:
    meter = Meter()
    MeteredEvaluator(task.evaluator, meter, "a").evaluate(task.start)
    assert meter.used == 1 and not meter.over()


def test_what_is_submitted_ahead_and_never_needed_is_not_counted(task: Task) -> None:
    meter = Meter(limit=1)
    metered = MeteredEvaluator(FakeEvaluator(), meter, "a")
    ticket = metered.submit(task.request(task.start))
    assert meter.used == 0 and not meter.over()
    for _ in range(2):
        assert metered.ask(ticket.request).ok and (meter.used, meter.over()) == (1, True)


def test_a_budget_goes_on_where_a_run_was_interrupted(task: Task, tmp_path: Path) -> None:
    for _ in range(2):
        meter = Meter(2, tmp_path / "answered.txt")
        MeteredEvaluator(FakeEvaluator(), meter, "a").evaluate(task.start)
        assert (meter.used, meter.over()) == (1, False)
    MeteredEvaluator(FakeEvaluator(), meter, "b").evaluate(task.start)
    assert Meter(2, tmp_path / "answered.txt").over()


def test_the_judge_is_asked_what_is_not_stored(task: Task) -> None:
    judge = FakeEvaluator()
    known = task.evaluator.evaluate(task.start)
    assert FirstStored(ReplayEvaluator({task.start.digest: known}), judge).evaluate(task.start) == known
    assert judge.calls == []
    assert FirstStored(ReplayEvaluator({}), judge).evaluate(task.start).ok and len(judge.calls) == 1

    class OfOneSpec(FakeEvaluator):
        def answer(self, request: EvaluationRequest) -> Evaluation:
            request.fits("today's digest", request.device, request.mode)
            return super().answer(request)

    older = task.request(task.start)
    assert older.spec and FirstStored(ReplayEvaluator({}), OfOneSpec()).ask(older).ok, "a tree's digest may be older"


def test_a_tree_goes_on_live(stored: tuple[StoredTask, ...], judged: None, tmp_path: Path) -> None:
    meter, judges, one = Meter(), OpenJudges(), stored[0]
    with Store(tmp_path / "live.sqlite") as store:
        mixed = mixed_task(one, DEVICES["h200"], store, meter, judges, FakeCoder())
        assert mixed.evaluator.evaluate(mixed.start).ok and (meter.used, Closing.made) == (0, 0)
        unknown = replace(one, tree=replace(one.tree, evaluations=()))
        bare = mixed_task(replace(unknown, task=unknown.tree.task(FakeCoder())), DEVICES["h200"], store, meter, judges)
        assert bare.evaluator.evaluate(bare.start).ok and (meter.used, Closing.made) == (1, 1)
        with pytest.raises(ValueError, match="has times of h200, estimated; here they would be of a100, estimated"):
            mixed_task(one, DEVICES["a100"], store, meter, judges)
    judges.close()
