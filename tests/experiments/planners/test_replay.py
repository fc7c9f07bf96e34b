"""Replays on stored trees: methods, rows, what is not explored; with the judge and the coder of `qimeng.testing`."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.planners.bound import bound
from experiments.planners.heldout import explorers_of
from experiments.planners.live import append_live, live_gains, read_live, time_live
from experiments.planners.replay import (
    UNANSWERED,
    Method,
    ReplayRow,
    Stage,
    StoredSession,
    append_replay,
    log_gain,
    read_replays,
    replay,
)
from experiments.planners.summary import advantages, planners, summarize
from qimeng.bench.explore import Explored, explore
from qimeng.bench.row import Environment, RowError
from qimeng.envs.steps.caching import CachingEvaluator
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.envs.steps.task import Task
from qimeng.errors import WeightsError
from qimeng.interfaces import Evaluation, Gate
from qimeng.planner.data.generate import Bytes, Drawn, draw
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.tree_store import put_drawn, trees_of
from qimeng.planner.lm.planner import SHIPPED, LanguageModelPlanner
from qimeng.program.verify import capture_spec
from qimeng.store import Conditions, Store
from qimeng.testing import FakeCoder, FakeEvaluator, fake_task

METHODS = tuple(
    map(Method.parse, ("heuristic", "heuristic+mcts:patience=0", "heuristic+archive:patience=0", "random+best-of-n"))
)
WHERE = Environment("fake")


def fake(drawn: Drawn) -> Task:
    task = fake_task(capture_spec(drawn.spec, verify=False))
    conditions = Conditions(drawn.spec.digest, "h200", drawn.spec.mode, versions=(("evaluator", "fake"),))
    return replace(task, conditions=conditions, evaluator=FakeEvaluator())


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(11, 3, Bytes(1 << 20, 1 << 24))


@pytest.fixture(scope="module")
def tree(drawn: Drawn) -> Tree:
    """Explored by all methods, and by chance."""
    store = Store()
    put_drawn(store, drawn)
    row = Explored(drawn.spec.digest, drawn.spec.name, drawn.family, 11, 3, "h200", asked=80)
    task = fake(drawn)
    task = replace(task, evaluator=CachingEvaluator(task.evaluator, store, task.conditions))
    row = explore(task, row, store, seconds=60.0, explorers=explorers_of(METHODS))
    assert row.evaluations == 80 and set(row.by) >= {m.label for m in METHODS}
    (found,) = trees_of(store)
    return found


@pytest.fixture(scope="module")
def rows(tree: Tree) -> list[ReplayRow]:
    return list(replay([tree], METHODS, WHERE, coder=FakeCoder()))


def handmade(gains: tuple[float, ...], known: float = 1.0, **changes: object) -> ReplayRow:
    row = ReplayRow(
        "spec", "name", "gated", METHODS[0], 0, gains, known, 100, 0.5, len(gains), 9, "stop", "", 0.1, "h200", False
    )
    return replace(row, **changes)  # type: ignore[arg-type]


# ---- methods


@pytest.mark.parametrize(
    ("text", "label", "planner", "search", "draws"),
    [
        ("heuristic", "heuristic", "heuristic", "greedy", False),
        ("heuristic+mcts:c=2", "heuristic, mcts:c=2", "heuristic", "mcts:c=2", True),
        ("random", "random", "random", "greedy", True),
        ("chance=random+best-of-n", "chance", "random", "best-of-n", True),
        (
            "tree, one=heuristic+archive:islands=1,migrate=2",
            "tree, one",
            "heuristic",
            "archive:islands=1,migrate=2",
            True,
        ),
    ],
)
def test_methods_are_written_in_one_line(text: str, label: str, planner: str, search: str, draws: bool) -> None:
    method = Method.parse(text)
    assert (method.label, method.planner, method.search, method.draws) == (label, planner, search, draws)


def test_planners_of_several_seeds_of_training_are_one_method(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "rl0")
    method = Method.parse(f"RL=lm:{tmp_path}/rl{{seed}}")
    assert method.draws and isinstance(method.make(0).planner, LanguageModelPlanner)
    with pytest.raises(WeightsError, match="rl1"):
        method.make(1)


@pytest.mark.parametrize("text", ["", "oracle", "heuristic+best", "heuristic+beam:x", "a+b+c"])
def test_methods_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read|unknown"):
        Method.parse(text)


# ---- replays


def test_a_replay_finds_what_the_live_run_found(drawn: Drawn, rows: list[ReplayRow]) -> None:
    session = Session(fake(drawn), Budget(evaluations=40))
    METHODS[0].make(0).run(session)
    gains = [0.0]
    for evaluation in session.ledger.known.values():
        gains.append(max(gains[-1], log_gain(evaluation)))
    row = rows[0]
    assert row.gains[: len(gains) - 1] == pytest.approx(gains[1:], rel=1e-3)
    assert set(row.gains[len(gains) - 1 :]) <= {row.gains[-1]} and len(row.gains) == 40  # it keeps its last
    assert row.evaluations == session.ledger.evaluations and row.stopped == "stop"
    assert row.best == (session.ledger.best.program.digest if session.ledger.best else None)


def test_a_trajectory_that_goes_where_nobody_was_is_told_apart(tree: Tree, rows: list[ReplayRow]) -> None:
    assert rows[0].stopped == "stop", "the heuristic was explored with, and ends by itself"
    start = tree.start().digest  # a capture
    short = replace(tree, edges=tuple(e for e in tree.edges if e.parent == start))
    (row,) = replay([short], METHODS[:1], WHERE, coder=FakeCoder())
    assert row.stopped == UNANSWERED and row.evaluations < rows[0].evaluations
    both = [replace(row, gains=(0.0,) * 40, known=1.0), replace(rows[0], spec=row.spec)]
    assert (summarize(both[:1])[0].missed, summarize(both[:1])[0].unanswered) == (1, 1)
    other = replace(both[0], method=METHODS[1])
    assert advantages([both[1], other], METHODS[0]) and not advantages([both[1], other], METHODS[0], answered=40)
    assert summarize(both[1:])[0].unanswered == 0 and "| 100 %, unanswered 100 % |" in planners(both[:1])


def test_no_replay_is_above_what_the_tree_allows(tree: Tree, rows: list[ReplayRow]) -> None:
    most = bound(tree, WHERE)
    assert most.known == rows[0].known == most.gains[-1]
    assert all(row.gains[n] <= most.gains[n] for row in rows for n in range(len(row.gains)))
    assert most.gains[1] < most.known, "one evaluation finds less than all"


def test_every_method_is_replayed_from_every_seed_that_matters(rows: list[ReplayRow]) -> None:
    assert [(r.method, r.seed) for r in rows] == [
        (METHODS[0], 0),
        *((m, seed) for m in METHODS[1:] for seed in (0, 1, 2)),
    ]
    for row in rows:
        assert list(row.gains) == sorted(row.gains) and row.gains[0] >= 0 and row.gains[-1] <= row.known
        assert 0 < row.coverage <= 1 and row.environment == WHERE and not row.estimated


def test_with_search_no_planner_is_behind_itself(rows: list[ReplayRow]) -> None:
    alone = rows[0]
    searched = [r for r in rows if r.method.planner == "heuristic"][1:]
    assert all(r.share(n) >= alone.share(n) for r in searched for n in range(1, 41))
    assert any(r.evaluations > alone.evaluations for r in searched)


def test_what_was_not_tried_is_not_offered(tree: Tree) -> None:
    session = StoredSession(tree, Budget(math.inf, 40), FakeCoder())
    METHODS[2].make(0).run(session)
    assert len(session.ledger.attempts) > 20
    assert all(e.failure != "unknown" for e in session.ledger.known.values())
    tried = {edge.action for edge in tree.edges}
    assert all(a.action in tried for a in session.ledger.attempts if a.action.kind != "stop")
    whole = Session(tree.task(FakeCoder()))
    whole.begin()
    offered, legal = session.fork(), whole.offered()[0]
    offered.return_to(session.state.path()[0])
    assert set(offered.offered()[0]) < set(legal)
    start = session.covered[tree.task(FakeCoder()).start.digest]
    assert start == (len(offered.offered()[0]) - 1) / (len(legal) - 1)


def test_no_method_is_led_to_where_nothing_was_tried(tree: Tree) -> None:
    """A step of the graph alone is a dead end where exploring dropped the branch."""
    start = tree.task(FakeCoder()).start.digest
    free = (e for e in tree.edges if e.parent == start and e.evaluation is None and e.accepted)
    step = next(e for e in free if any(f.parent == e.child and f.evaluation is not None for f in tree.edges))
    cut = replace(tree, edges=tuple(e for e in tree.edges if e.parent != step.child))
    for one, offers in ((tree, True), (cut, False)):
        session = StoredSession(one, Budget(math.inf, 40), FakeCoder())
        session.begin()
        assert (step.action in session.offered()[0]) is offers


def test_replays_are_the_same_again_and_are_made_once(tree: Tree, rows: list[ReplayRow]) -> None:
    again = list(replay([tree], METHODS[2:3], WHERE, coder=FakeCoder()))
    assert [replace(r, seconds=0.0) for r in again] == [replace(r, seconds=0.0) for r in rows if r.method == METHODS[2]]
    assert list(replay([tree], METHODS, WHERE, done=rows, coder=FakeCoder())) == []
    fewer = list(replay([tree], METHODS[:1], WHERE, evaluations=5, done=rows, coder=FakeCoder()))
    assert [len(r.gains) for r in fewer] == [5] and fewer[0].gains == rows[0].gains[:5]


def test_a_tree_without_its_start_program_is_refused(tree: Tree) -> None:
    with pytest.raises(RowError, match="does not hold its start program"):
        Stage(replace(tree, evaluations=()), FakeCoder())


# ---- rows


def test_rows_come_back_from_a_file(rows: list[ReplayRow], tmp_path: Path) -> None:
    for row in (*rows, rows[0]):
        append_replay(tmp_path / "rows.jsonl", row)
    assert read_replays(tmp_path / "rows.jsonl") == tuple(rows)
    (tmp_path / "bad.jsonl").write_text('{"spec": 1}\n')
    with pytest.raises(RowError, match="not a row of a replay"):
        read_replays(tmp_path / "bad.jsonl")


def test_shares_and_the_evaluations_to_them() -> None:
    row = handmade((0.0, 0.5, 0.5, 0.9, 1.0))
    assert [row.share(n) for n in (1, 2, 4, 5, 99)] == [0.0, 0.5, 0.9, 1.0, 1.0]
    assert row.evaluations_to(0.9) == 4 and row.evaluations_to(0.4) == 2
    assert handmade((0.0, 0.5, 0.5)).evaluations_to(0.9) == 3  # a miss
    assert handmade((0.0,), known=0.0).share(1) == 1.0


def test_gains_are_over_eager_and_never_negative() -> None:
    judged = FakeEvaluator().evaluate(fake_task(capture_spec(draw(11, 0, Bytes(4096, 8192)).spec, verify=False)).start)
    assert judged.timing is not None
    faster = replace(judged, timing=replace(judged.timing, device_ms=judged.timing.device_ms / 2))
    slower = replace(judged, timing=replace(judged.timing, device_ms=judged.timing.device_ms * 2))
    assert log_gain(faster) == pytest.approx(math.log(2)) and log_gain(slower) == 0.0
    assert log_gain(Evaluation(Gate.COMPILE, "no", "compile")) == 0.0


# ---- live times


def test_final_programs_are_timed_live_once(drawn: Drawn, tree: Tree, rows: list[ReplayRow], tmp_path: Path) -> None:
    tasks: list[Task] = []

    def make(one: Tree) -> Task:
        tasks.append(fake(drawn))
        return tasks[-1]

    found = list(time_live([tree], rows, make, WHERE))
    assert len(tasks) == 1 and {r.program for r in found} == {r.best for r in rows} and len(found) < len(rows)
    for row in found:
        assert row.right and row.environment == WHERE and row.device == "h200"
        promised = [math.exp(r.gains[-1]) for r in rows if r.best == row.program]
        assert promised == [pytest.approx(row.speedup, rel=0.02)] * len(promised)  # ties go to generated kernels
        append_live(tmp_path / "live.jsonl", row)
    assert list(read_live(tmp_path / "live.jsonl")) == found
    assert list(time_live([tree], rows, make, WHERE, done=found)) == [] and len(tasks) == 1
    gains = live_gains(rows, found)
    assert set(gains) == set(METHODS) and gains[METHODS[0]][1] == 1 and gains[METHODS[1]][1] == 3
    assert gains[METHODS[1]][0] >= 0.98 * gains[METHODS[0]][0] > 1


def test_a_program_that_fails_live_counts_as_eager(drawn: Drawn, tree: Tree, rows: list[ReplayRow]) -> None:
    def make(one: Tree) -> Task:
        return replace(fake(drawn), evaluator=FakeEvaluator(wrong=lambda program: "off by one"))

    (row,) = time_live([tree], rows[:1], make, WHERE)
    assert (row.right, row.error, row.speedup) == (False, "off by one", 1.0)
    moved = replace(rows[0], best="elsewhere")
    (row,) = time_live([tree], [moved], make, WHERE)
    assert row.error == "the tree does not hold this program" and live_gains([moved], [row]) == {}
    assert [r.program for r in time_live([tree], [moved], make, WHERE, done=[row])] == ["elsewhere"]  # asked again
