"""What a stored tree allows at most, on a tree made by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from experiments.planners.bound import bound, read_bounds, table
from experiments.planners.replay import EVALUATIONS
from qimeng.bench.row import Environment, RowError
from qimeng.interfaces import Action, Evaluation, Gate, Timing
from qimeng.planner.data.generate import Bytes, draw
from qimeng.planner.data.tree import Tree
from qimeng.store import Conditions, StoredStep, evaluation_key

WHERE = Environment("fake")


def answer(ms: float) -> Evaluation:
    return Evaluation(Gate.PASSED, timing=Timing(ms), eager=Timing(8.0))


@pytest.fixture(scope="module")
def tree() -> Tree:
    """From the start program a: a step of the graph to b, from which c is judged; d only after two judged steps."""
    drawn = draw(11, 3, Bytes(1 << 20, 1 << 24))
    spec = drawn.spec
    conditions = Conditions(spec.digest, "h200", spec.mode, versions=(("evaluator", "fake"),))
    blank = Tree(spec.name, spec.source, spec.dtype, spec.mode, "", None, None, conditions, (), {}, ())
    a = blank.start().digest
    times = {a: 8.0, "c": 4.0, "d": 2.0, "e": 1.0, "refused": 0.5}
    key = {d: evaluation_key(conditions, d, "step") for d in times}

    def step(parent: str, child: str | None, judged: str | None, accepted: bool = True) -> StoredStep:
        return StoredStep(parent, Action("lowering", (f"r{parent}{child}{judged}",)), None, judged, accepted, child)

    edges = (
        step(a, "b", None),
        step("b", "c", key["c"]),
        step("c", "d", key["d"]),
        step("d", "d", key["e"]),
        step(a, None, None, accepted=False),
    )
    return replace(blank, evaluations=tuple(("step", d, answer(ms)) for d, ms in times.items()), edges=edges)


@pytest.fixture(autouse=True)
def names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "today", lambda self, start=None: self)


def test_a_gain_counts_from_the_fewest_evaluations_that_find_it(tree: Tree) -> None:
    found = bound(tree, WHERE)
    assert len(found.gains) == EVALUATIONS and found.device == "h200"
    assert found.gains[:5] == pytest.approx((0.0, log(2), log(4), log(8), log(8)), abs=1e-4)
    assert found.known == pytest.approx(log(16), abs=1e-4), "nothing leads to the fastest"
    assert [round(found.share(n), 2) for n in (1, 2, 100)] == [0.0, 0.25, 0.75]


def test_a_shorter_way_counts(tree: Tree) -> None:
    late = tree.edges[2]
    found = bound(replace(tree, edges=(*tree.edges, replace(late, parent="b"))), WHERE, evaluations=4)
    assert found.gains == pytest.approx((0.0, log(4), log(8), log(8)), abs=1e-4)


def test_bounds_are_read_back_and_tabled(tree: Tree, tmp_path: Path) -> None:
    found, file = bound(tree, WHERE), tmp_path / "bounds.jsonl"
    file.write_text(f"{found.to_json()}\n")
    assert read_bounds(file) == (found,)
    assert "| h200 | 1 | 75 % (75 … 75) |" in table([found])
    file.write_text("{}\n")
    with pytest.raises(RowError, match="not a bound"):
        read_bounds(file)
