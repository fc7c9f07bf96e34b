"""Trees that an earlier version explored (estimates for an H200, in this folder) can still be walked."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from qimeng.planner.data.tree_file import describe, read_trees
from qimeng.planner.lm.branches import Teacher, best_branch_pairs, likeliest
from qimeng.planner.lm.stored import stored_tasks
from qimeng.program.identity import IDENTITY

KEPT = Path(__file__).parent / "h200_estimated.jsonl.xz"
MEASURED = Path(__file__).parents[3] / "benchmarks" / "trees" / "h200.xz"


def test_what_was_explored_once_stays_usable() -> None:
    trees = list(islice(read_trees(KEPT), 3, 4))  # a small one
    found = list(stored_tasks(trees))
    assert [s.tree.name for s in found] == [t.name for t in trees]
    for old, one in zip(trees, found, strict=True):
        assert len(one.tree.edges) >= len(old.edges) and len(one.tree.times) == len(old.times)
        session = one.begin()
        for _, choice in best_branch_pairs(one, 32, Teacher(0.999, guide="")):
            session.step(likeliest(choice))
        best = session.ledger.best
        assert best is not None and best.ms is not None and best.ms < 1.02 * one.best_ms < one.start_ms


def test_they_are_estimates_and_say_so() -> None:
    assert all(tree.conditions.estimated for tree in islice(read_trees(KEPT), 5))
    assert describe(KEPT).evaluations > 1000 and describe(KEPT).size < 2 << 20


def test_the_measured_trees_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They name programs as this version does, and none is verified again."""
    (tree,) = islice(read_trees(MEASURED), 1)
    monkeypatch.setattr("qimeng.program.verify.verify_graph", None)
    assert tree.identity == IDENTITY and tree.today() is tree and len(tree.edges) > 10
