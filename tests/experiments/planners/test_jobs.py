"""Replays as jobs are those made one after another, and what is there already is not made again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.planners.jobs import replay_at_once
from experiments.planners.replay import Method, replay
from qimeng.bench.row import Environment
from qimeng.planner.data.tree_file import read_trees
from tests.bench.inline import Inline

KEPT = Path(__file__).parents[2] / "planner" / "data" / "h200_estimated.jsonl.xz"


def test_replays_as_jobs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.planners.jobs.Pool", Inline)
    tree = min(read_trees(KEPT), key=lambda t: len(t.edges))
    nothing = replace(tree, name="nothing to walk", edges=(), evaluations=())
    methods = [Method.parse("chance=random"), Method.parse("heuristic")]
    here = list(replay([tree], methods, Environment(), (0, 1), 6))
    assert len(here) == 3
    said: list[str] = []
    there = list(replay_at_once([tree, nothing], methods, Environment(), 1, 120.0, (0, 1), 6, here[:1], said.append))
    assert {replace(r, seconds=0.0).key: r.gains for r in there} == {r.key: r.gains for r in here[1:]}
    assert len(said) == 2 and all(text.startswith("nothing to walk: TreeError") for text in said)
    assert not list(replay_at_once([tree], methods, Environment(), 1, 120.0, (0, 1), 6, here, said.append))
