"""Methods on programs put together from parts, beside a planner that knows everything."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.planner import app
from experiments.planners.networks import METHODS, ORACLE, play
from experiments.planners.replay import ReplayRow, read_replays
from qimeng.bench.row import Environment
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.tree_file import put_trees, read_trees
from qimeng.planner.lm.networks import NetworkTask, captured_networks, network_tasks

KEPT = Path(__file__).parents[2] / "planner" / "data" / "h200_estimated.jsonl.xz"


@pytest.fixture(scope="module")
def trees() -> list[Tree]:
    return list(islice(read_trees(KEPT), 9, 12))


def tasks_of(trees: list[Tree]) -> list[NetworkTask]:
    return list(network_tasks(captured_networks(trees)))


@pytest.fixture(scope="module")
def rows(trees: list[Tree]) -> list[ReplayRow]:
    return list(play(tasks_of(trees), METHODS, Environment("h200 (estimated)"), (0,), 12))


def test_nobody_finds_more_than_who_knows_everything(rows: list[ReplayRow], trees: list[Tree]) -> None:
    assert {(r.name, r.method) for r in rows} == {(t.name, m) for t in trees for m in METHODS}
    known = {r.name: r for r in rows if r.method == ORACLE}
    assert all(r.known > 0.1 for r in rows)
    for row in rows:
        assert list(row.gains) == sorted(row.gains) and len(row.gains) == 12
        assert row.gains[-1] <= 1.02 * known[row.name].gains[-1] + 1e-9
        assert 0 < row.coverage <= 1
    means = {m: sum(r.share(12) for r in rows if r.method == m) for m in METHODS}
    assert means[ORACLE] > means[METHODS[1]], "tuning gains something too"


def test_what_is_there_is_not_played_again(rows: list[ReplayRow], trees: list[Tree]) -> None:
    assert list(play(tasks_of(trees), METHODS, Environment("h200 (estimated)"), (0,), 12, rows)) == []


def test_the_command_goes_on_where_it_ended(trees: list[Tree], tmp_path: Path) -> None:
    path, out = tmp_path / "trees.xz", tmp_path / "rows.jsonl"
    put_trees(trees, path)
    arguments = ["networks", str(path), "--rows", str(out), "--seeds", "1", "--evaluations", "6", "--only", "1"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0 and first.output.count("after 20") == len(METHODS), first.output
    assert len(read_replays(out)) == len(METHODS)
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0 and again.output == ""
