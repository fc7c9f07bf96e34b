"""The store: keys, merging, caching, and what a kill at any moment leaves."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.envs.steps.caching import CachingEvaluator, ReplayCoder, ReplayEvaluator, subject_of
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.result import Result
from qimeng.envs.steps.state import Budget
from qimeng.errors import CoderError, StoreError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import (
    LASTING,
    Action,
    Asked,
    Evaluation,
    EvaluationRequest,
    Evaluator,
    FinalOptions,
    Gate,
    Patch,
    Request,
    Timing,
)
from qimeng.interfaces.records import program_from_json
from qimeng.planner.beam import BeamSearch
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.random import RandomPlanner
from qimeng.program.program import Program
from qimeng.store import Conditions, Store, StoredStep
from qimeng.testing import FakeCoder, FakeEvaluator, fake_task, sample_graph

HERE = Conditions("s", "h200", "default", False, (("evaluator", "1"), ("torch", "2.11")))
RIGHT = Evaluation(Gate.PASSED, timing=Timing(1.0), eager=Timing(2.0))


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return sample_graph()


# ---- rows


def test_what_is_put_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.sqlite")
    digest = store.put_evaluation(HERE, "p1", RIGHT)
    assert store.evaluation(HERE, "p1") == RIGHT == store.evaluation_of(digest)
    assert store.evaluation(HERE, "p2") is None
    assert store.evaluation(HERE, "p1", "final") is None


@pytest.mark.parametrize(
    "other",
    [
        {"spec": "t"},
        {"device": "a100"},
        {"mode": "high"},
        {"versions": (("evaluator", "2"), ("torch", "2.11"))},
        {"estimated": True},
    ],
    ids=lambda d: next(iter(d)),
)
def test_other_conditions_are_another_key(other: dict[str, object]) -> None:
    store = Store()
    store.put_evaluation(HERE, "p1", RIGHT)
    assert store.evaluation(replace(HERE, **other), "p1") is None  # type: ignore[arg-type]


def test_estimated_and_measured_times_never_mix() -> None:
    store, guess = Store(), replace(RIGHT, timing=Timing(1.0, estimated=True))
    with pytest.raises(StoreError, match="never stored under the same conditions"):
        store.put_evaluation(HERE, "p1", guess)
    store.put_evaluation(replace(HERE, estimated=True), "p1", guess)
    assert store.evaluation(HERE, "p1") is None


def test_the_first_row_stays() -> None:
    store = Store()
    store.put_evaluation(HERE, "p1", RIGHT)
    store.put_evaluation(HERE, "p1", replace(RIGHT, timing=Timing(9.0)))
    assert store.evaluation(HERE, "p1") == RIGHT
    assert store.counts()["evaluations"] == 1


def test_many_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def opened(path: Path) -> int:
        together.wait()
        with Store(path) as store:
            store.put_spec("a", "b")
            return store.counts()["specs"]

    with ThreadPoolExecutor(8) as pool:
        for number in range(30):
            path = tmp_path / f"{number}.sqlite"
            assert list(pool.map(opened, [path] * 8)) == [1] * 8


def test_stores_merge(tmp_path: Path) -> None:
    mine, theirs = Store(tmp_path / "a.sqlite"), Store(tmp_path / "b.sqlite")
    for store, subjects in ((mine, ("p1", "p2")), (theirs, ("p2", "p3"))):
        for subject in subjects:
            store.put_evaluation(HERE, subject, RIGHT)
        store.put_step(HERE, StoredStep(subjects[0], Action("stop"), None, None, True, subjects[1]))
        store.put_spec("s", "softmax")
    mine.merge(theirs)
    assert {e[2] for e in mine.evaluations()} == {"p1", "p2", "p3"}
    assert len(mine.steps()) == 2 and mine.steps(HERE, "p2")[0].child == "p3"
    assert mine.counts()["specs"] == 1
    before = mine.counts()
    mine.merge(theirs)
    assert mine.counts() == before


def test_the_order_of_merging_does_not_matter(tmp_path: Path) -> None:
    found = []
    for order in (("p1", "p2"), ("p2", "p1")):
        whole = Store()
        for subject in order:
            part = Store()
            part.put_evaluation(HERE, subject, RIGHT)
            whole.merge(part)
        found.append([e[2] for e in whole.evaluations()])
    assert found[0] == found[1]


def test_other_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.sqlite"
    text.write_text("this is no database, " * 100)
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(text)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE cats (name TEXT)")
    with pytest.raises(StoreError, match="not a store"):
        Store(other)
    with sqlite3.connect(other) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="version 99"):
        Store(other)


def test_a_store_that_cannot_be_written_ends_the_run_or_is_left_behind(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.sqlite")
    store.put_spec("a", "first")
    store._db.execute("PRAGMA query_only = 1")  # as on a full disk, every write fails
    with pytest.raises(StoreError, match="cannot be written .*make room or choose another place, then run the same"):
        store.put_spec("b", "second")
    store.goes_on = True
    store.put_spec("b", "second")
    store.put_evaluation(HERE, "p", RIGHT)
    assert store.counts()["specs"] == 1 and "cannot be written" in store.lost


def test_a_full_disk_does_not_end_a_search(graph: OpGraph) -> None:
    store = Store()
    store._db.execute("PRAGMA query_only = 1")
    store.goes_on = True
    task = fake_task(graph)
    task = replace(task, evaluator=CachingEvaluator(task.evaluator, store, task.conditions))
    result = optimize(task, BeamSearch(RandomPlanner()), Budget(evaluations=4), store)
    assert result.evaluation.ok and any("not all that was tried is stored" in note for note in result.notes)


def test_two_openings_see_each_other(tmp_path: Path) -> None:
    one, two = Store(tmp_path / "s.sqlite"), Store(tmp_path / "s.sqlite")
    one.put_evaluation(HERE, "p1", RIGHT)
    assert two.evaluation(HERE, "p1") == RIGHT


# ---- caching and the tree of trajectories


def searched(graph: OpGraph, store: Store, evaluator: Evaluator | None = None, seed: int = 5) -> Result:
    task = fake_task(graph, evaluator)
    task = replace(task, evaluator=CachingEvaluator(task.evaluator, store, task.conditions))
    return optimize(task, GreedySearch(RandomPlanner(seed)), Budget(evaluations=12, steps=24), store)


def outcome(result: Result) -> tuple[object, ...]:
    steps = [(s.action, s.accepted, s.patch_digest, s.evaluation) for s in result.steps]
    return result.source, result.recipe, result.evaluation, result.stopped, result.evaluations, steps


def test_a_second_run_judges_nothing_again(graph: OpGraph) -> None:
    store, first, second = Store(), FakeEvaluator(), FakeEvaluator()
    one = searched(graph, store, first)
    two = searched(graph, store, second)
    assert len(first.calls) == 13 and second.calls == []
    assert outcome(one) == outcome(two)
    assert (one.cached, two.cached) == (0, 13)


def test_a_sweep_is_known_as_its_chosen_program_too(graph: OpGraph) -> None:
    store, task = Store(), fake_task(graph)
    cached = CachingEvaluator(task.evaluator, store, task.conditions)
    coder, device = FakeCoder(), task.context.device
    start = task.start
    lowered = coder.write(Request(start, Action("lowering", (start.regions[0].id,)), device)).apply(start)
    patch = coder.write(Request(lowered, Action("tiling", (lowered.regions[0].id,), "smaller"), device))
    assert len(patch.alternatives) > 1
    found = cached.evaluate(lowered, patch)
    again = cached.evaluate(patch.apply(lowered, found.chosen))
    assert cached.hits == 1 and again == replace(found, chosen=0)


class Unlucky(FakeEvaluator):
    """Out of time at the first try of each program, as on a busy machine."""

    def __init__(self, failure: str = "timeout"):
        super().__init__()
        self.failure, self.met = failure, set[str]()

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found, subject = super().judge(program, patch), subject_of(program, patch)
        if subject in self.met:
            return found
        self.met.add(subject)
        return Evaluation(Gate.PROGRAM, "no luck", self.failure)


@pytest.mark.parametrize("failure", ["timeout", "memory", "crash", "exit", "protocol", "clock", "judge"])
def test_an_accident_is_on_record_and_judged_again(graph: OpGraph, failure: str) -> None:
    store, task, evaluator = Store(), fake_task(graph), Unlucky(failure)
    cached = CachingEvaluator(evaluator, store, task.conditions)
    first = cached.evaluate(task.start)
    assert first.failure == failure and not first.lasting
    assert [(e[1], e[3]) for e in store.evaluations()] == [("accident", first)]
    replay = ReplayEvaluator(store, task.conditions)
    assert replay.evaluate(task.start) == first, "nothing better is stored"
    second = cached.evaluate(task.start)
    assert second.ok and cached.hits == 0 and len(evaluator.calls) == 2
    assert cached.evaluate(task.start) == second and cached.hits == 1
    assert {e[1] for e in store.evaluations()} == {"accident", "step"}
    assert ReplayEvaluator(store, task.conditions).evaluate(task.start) == second
    assert cached.evaluate(task.start, asked=Asked.FINAL).ok


@pytest.mark.parametrize("failure", sorted(LASTING))
def test_what_the_program_itself_is_to_blame_for_is_never_judged_again(graph: OpGraph, failure: str) -> None:
    store, task, evaluator = Store(), fake_task(graph), Unlucky(failure)
    cached = CachingEvaluator(evaluator, store, task.conditions)
    assert cached.evaluate(task.start) == cached.evaluate(task.start)
    assert cached.hits == 1 and len(evaluator.calls) == 1


def test_a_final_verification_is_known_beside_the_same_modes_only(graph: OpGraph) -> None:
    class Counting(FakeEvaluator):
        finals = 0

        def answer(self, request: EvaluationRequest) -> Evaluation:
            self.finals += request.asked is Asked.FINAL
            return replace(super().answer(request), compiled={m: Timing(1.0) for m in request.options.compile_modes})

    judge, store = Counting(), Store()
    task = fake_task(graph, judge)

    def final(*modes: str) -> set[str]:
        options = FinalOptions(modes, 10.0)
        cached = CachingEvaluator(judge, store, task.conditions)
        return set(cached.evaluate(task.start, asked=Asked.FINAL, options=options).compiled)

    assert final() == set()
    assert [final("default") for _ in range(2)] == [{"default"}] * 2
    assert judge.finals == 2 and final() == set()
    assert judge.finals == 2


def test_every_attempt_is_in_the_tree(graph: OpGraph) -> None:
    store = Store()
    order: dict[str, int] = {}

    def second(p: Program) -> str | None:
        """The second program of all is wrong."""
        return "no" if order.setdefault(p.digest, len(order)) == 1 else None

    wrong = FakeEvaluator(wrong=second)
    result = searched(graph, store, wrong)
    conditions = fake_task(graph).conditions
    edges = store.steps(conditions)
    tried = {(s.action, s.accepted) for s in result.steps if s.action.kind != "stop"}
    assert {(e.action, e.accepted) for e in edges} == tried
    assert any(not e.accepted for e in edges)
    for edge in edges:
        body = store.program(edge.parent)
        assert body is not None
        parent = program_from_json(body[0], graph)
        assert parent.digest == edge.parent and parent.source == body[1]
        assert edge.patch is not None
        patch = store.patch(edge.patch)
        assert patch is not None
        evaluation = store.evaluation_of(edge.evaluation) if edge.evaluation else None
        chosen = evaluation.chosen if evaluation else 0
        if edge.accepted:
            assert patch.patch(graph).apply(parent, chosen).digest == edge.child


def test_a_replaying_evaluator_answers_what_is_stored_only(graph: OpGraph) -> None:
    store = Store()
    result = searched(graph, store)
    conditions = fake_task(graph).conditions
    replay = ReplayEvaluator(store, conditions)
    task = fake_task(graph, replay)
    again = optimize(task, GreedySearch(RandomPlanner(5)), Budget(evaluations=12, steps=24))
    assert outcome(again) == outcome(result)
    unknown = optimize(task, GreedySearch(RandomPlanner(6)), Budget(evaluations=12, steps=24))
    failures = {s.evaluation.failure for s in unknown.steps if s.evaluation is not None and not s.accepted}
    assert failures == {"unknown"}
    with pytest.raises(ValueError, match="which"):
        ReplayEvaluator(store)
    mapping = ReplayEvaluator({subject_of(task.start, None): RIGHT})
    assert mapping.evaluate(task.start) == RIGHT == mapping.evaluate(task.start, asked=Asked.FINAL)


def test_a_replaying_coder_writes_what_was_written(graph: OpGraph) -> None:
    store = Store()
    result = searched(graph, store)
    conditions = fake_task(graph).conditions
    task = fake_task(graph, ReplayEvaluator(store, conditions), ReplayCoder(store, conditions, FakeCoder()))
    again = optimize(task, GreedySearch(RandomPlanner(5)), Budget(evaluations=12, steps=24))
    assert outcome(again) == outcome(result)
    with pytest.raises(CoderError, match="no stored patch"):
        task.context.coder.write(Request(task.start, Action("stop"), task.context.device))


# ---- kill -9


class Mortal(FakeEvaluator):
    """Notes every evaluation that it begins, and dies by SIGKILL in the middle of number `last`."""

    def __init__(self, log: Path, last: int | None):
        super().__init__(delay=0.002)
        self.log, self.last, self.count = log, last, 0

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        with self.log.open("a") as file:
            file.write(subject_of(program, patch) + "\n")
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().judge(program, patch)

    def verify(self, program: Program) -> Evaluation:
        return super().judge(program)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_a_run_killed_at_any_moment_resumes(graph: OpGraph, tmp_path: Path, search: str) -> None:
    def run(path: Path, evaluator: Evaluator) -> Result:
        store, task = Store(path), fake_task(graph, evaluator)
        task = replace(task, evaluator=CachingEvaluator(evaluator, store, task.conditions))
        planner = RandomPlanner(7)
        chosen = BeamSearch(planner, 2, 2) if search == "beam" else GreedySearch(planner)
        return optimize(task, chosen, Budget(evaluations=15, steps=40), store)

    whole = run(tmp_path / "whole.sqlite", Mortal(tmp_path / "undisturbed", None))
    log, path = tmp_path / "log", tmp_path / "killed.sqlite"
    deaths = []
    for last in (1, 4, 2, 5):  # evaluations that this life begins; in the middle of the last it is killed
        child = os.fork()
        if child == 0:
            run(path, Mortal(log, last))
            os._exit(0)
        deaths.append(os.waitpid(child, 0)[1])
    assert [os.WTERMSIG(d) for d in deaths] == [signal.SIGKILL] * 4
    resumed = run(path, Mortal(log, None))
    assert outcome(resumed) == outcome(whole)
    begun = log.read_text().splitlines()
    assert len(begun) - len(set(begun)) == 4  # only those that were killed in the middle were begun again
    assert set(begun) == set((tmp_path / "undisturbed").read_text().splitlines())


def test_a_store_made_before_a_fork_is_used_after_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.sqlite")
    store.put_evaluation(HERE, "p1", RIGHT)
    store._pid = -1  # as a forked child sees it
    assert store.evaluation(HERE, "p1") == RIGHT
