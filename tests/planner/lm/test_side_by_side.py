"""Judges that work elsewhere: steps of several environments are judged beside each other, with the same results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.wrappers import FilterObservation
from stable_baselines3.common.vec_env import DummyVecEnv

from qimeng.device import DEVICES
from qimeng.envs.gym.environment import KernelOptimizationEnv
from qimeng.envs.steps.caching import ReplayEvaluator
from qimeng.envs.steps.task import Task
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, EvaluationRequest, Evaluator, Ticket
from qimeng.planner.data.generate import Bytes, draw_many
from qimeng.planner.lm.live import Elsewhere, FirstStored, LateJudge, Meter, OpenJudges, live_tasks, mixed_task
from qimeng.planner.lm.side_by_side import SideBySide
from qimeng.planner.lm.stored import StoredTask
from qimeng.spec import KernelSpec
from qimeng.store import Store
from qimeng.testing import FakeCoder, FakeEvaluator, fake_task


class Away(FakeEvaluator):
    """Counts what is in flight in all of its kind."""

    at_once = 4
    flying: set[Ticket] = set()
    most = 0

    def submit(self, request: EvaluationRequest) -> Ticket:
        ticket = super().submit(request)
        Away.flying.add(ticket)
        Away.most = max(Away.most, len(Away.flying))
        return ticket

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        Away.flying -= set(tickets)
        return super().gather(tickets, timeout)


@pytest.fixture(autouse=True)
def nothing_in_flight() -> None:
    Away.flying, Away.most = set(), 0


def steps(graph: OpGraph, evaluator: Evaluator) -> list[tuple[list[float], list[int]]]:
    """Rewards and numbers of actions of a few steps of three environments, which take every second action."""
    task: Task = fake_task(graph, evaluator, FakeCoder())
    side = SideBySide([lambda: FilterObservation(KernelOptimizationEnv(task, max_steps=4), ["features"])] * 3)
    side.seed(1)
    side.reset()
    found = []
    for number in range(1, 5):
        masks = np.stack(side.env_method("action_masks"))
        chosen = [int(np.flatnonzero(mask)[(i + number) % mask.sum()]) for i, mask in enumerate(masks)]
        _, rewards, _, infos = side.step(np.array(chosen))
        found.append((rewards.tolist(), [info["actions"] for info in infos]))
    return found


def test_steps_are_judged_beside_each_other_and_find_the_same(graph: OpGraph) -> None:
    assert steps(graph, Away()) == steps(graph, FakeEvaluator())
    assert Away.most > 1 and len(Away.flying) == 1, "all but the start program of the next episode was gathered"


def test_start_programs_of_next_episodes_are_judged_ahead(graph: OpGraph) -> None:
    task = fake_task(graph, Away(), FakeCoder())
    tasks = [replace(task, name=name, conditions=replace(task.conditions, spec=name)) for name in "abcdef"]
    side = SideBySide([lambda: FilterObservation(KernelOptimizationEnv(tasks, max_steps=2), ["features"])] * 3)
    plain = DummyVecEnv([lambda: FilterObservation(KernelOptimizationEnv(tasks, max_steps=2), ["features"])] * 3)
    names = []
    for vector in (side, plain):
        Away.most = 0
        vector.seed(3)
        vector.reset()
        names.append([])
        for _ in range(6):
            names[-1] += [env.unwrapped.session.task.name for env in vector.envs]
            vector.step(np.ones(3, dtype=np.int64))
        if vector is side:
            assert Away.most >= 3, "one for each environment"
    assert names[0] == names[1], "the same tasks in the same order"


def test_what_a_closed_judge_was_asked_is_asked_again(graph: OpGraph) -> None:
    judges, made = OpenJudges(limit=1), list[Away]()

    def make() -> Evaluator:
        made.append(Away())
        return made[-1]

    start = fake_task(graph).start
    one, other = (LateJudge(name, make, judges, FakeEvaluator, 2) for name in "ab")
    ticket = one.submit(EvaluationRequest(start))
    assert other.evaluate(start).ok, "its judge takes the place of the first"
    assert one.ask(ticket.request, ticket).ok and len(made) == 3
    assert (one.name, one.at_once, one._asked) == ("FakeEvaluator", 2, {})


def test_stored_answers_come_first_and_others_are_in_flight(graph: OpGraph) -> None:
    start, away = fake_task(graph).start, Away()
    known = FakeEvaluator().evaluate(start)
    first = FirstStored(ReplayEvaluator({start.digest: known}), away)
    assert first.at_once == away.at_once
    other = replace(start, fallback="# another program")
    tickets = [first.submit(EvaluationRequest(program)) for program in (other, start)]
    assert len(Away.flying) == 1
    assert [ticket for ticket, _ in first.gather(tickets)] == [tickets[1], tickets[0]]
    assert not Away.flying


def test_tasks_judged_elsewhere_are_stored_under_what_judged_them() -> None:
    asked: list[KernelSpec] = []

    def make(spec: KernelSpec) -> Evaluator:
        asked.append(spec)
        return Away(estimated=True)

    versions = (("evaluator", "EstimatingEvaluator 1"), ("torch", "of the cluster"))
    away, store = Elsewhere(DEVICES["h100"], versions, make, 3), Store()
    specs = [d.spec for d in draw_many(11, 2, 3, Bytes(1 << 12, 1 << 14))]
    tasks = list(live_tasks(specs, away.device, store, Meter(), OpenJudges(), FakeCoder(), away))
    assert [t.conditions.versions for t in tasks] == [versions] * 2 and not asked
    assert all(t.evaluator.evaluate(t.start).ok and t.evaluator.at_once == 3 for t in tasks)
    assert [spec.digest for spec in asked] == [t.conditions.spec for t in tasks]
    assert {row[0].versions for row in store.evaluations()} == {versions}


def test_what_a_tree_lacks_is_judged_elsewhere(stored: tuple[StoredTask, ...]) -> None:
    one, versions = stored[0], (("evaluator", "EstimatingEvaluator 1"),)
    bare = replace(one, task=replace(one.tree, evaluations=()).task(FakeCoder()))
    with Store() as store:
        given = store, Meter(), OpenJudges(), FakeCoder()
        away = Elsewhere(DEVICES["h200"], versions, lambda spec: Away(estimated=True))
        mixed = mixed_task(bare, away.device, *given, away)
        assert mixed.evaluator.at_once == 2 and mixed.evaluator.evaluate(mixed.start).ok
        assert {row[0].versions for row in store.evaluations()} == {versions}
        other = Elsewhere(DEVICES["a100"], versions, lambda spec: Away(estimated=True))
        with pytest.raises(ValueError, match="there they would be of a100, estimated"):
            mixed_task(bare, other.device, *given, other)
