"""Collections: what is explored is stored, killed ones go on, several merge; with the judge of `qimeng.testing`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from qimeng.bench.collect import (
    LOG,
    STORE,
    append_rows,
    assignments,
    collect,
    explore_one,
    logged_specs,
    merge,
    read_log,
    specs_of,
)
from qimeng.bench.explore import Explored, explore
from qimeng.bench.suite import Suite
from qimeng.cli import main
from qimeng.errors import QimengError, SpecError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Observation
from qimeng.planner.data.generate import draw
from qimeng.planner.data.tree_store import trees_of
from qimeng.planner.mixture import MixturePlanner
from qimeng.program.program import Program
from qimeng.spec import KernelSpec
from qimeng.store import Store
from qimeng.testing import FakeEvaluator, ScriptedPlanner, fake_task, sample_graph
from tests.bench import collecting
from tests.bench.inline import Inline

SCRIPT = Path(__file__).with_name("collecting.py")


@pytest.fixture(autouse=True, scope="module")
def here_and_now() -> Iterator[None]:
    """Specs are explored in this process; `qimeng.bench.pool` has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qimeng.bench.collect.Pool", Inline)
        yield


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return sample_graph()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a collection of two specs that nothing came in the way of."""
    folder = tmp_path_factory.mktemp("whole")
    collect(collecting.plan(2), folder, partial(collecting.work, out=folder), collecting.DEVICE)
    return folder


def blank(asked: int = 12) -> Explored:
    return Explored("spec", "name", "block", 0, 0, "h200", asked)


def test_an_exploration_keeps_the_tree(graph: OpGraph) -> None:
    store = Store()
    row = explore(fake_task(graph), blank(), store, seconds=60.0)
    assert row.evaluations == 12 and row.stopped == "evaluations" and row.error is None
    assert row.right == 12 and row.steps >= row.accepted > 0
    assert row.gain is not None and row.gain > 1
    assert set(row.by) >= {"heuristic", "beam"} and sum(row.by.values()) == 11  # the start program is nobody's
    assert row.programs <= store.counts()["programs"] and len(store.steps()) > 0
    assert Explored.from_json(row.to_json()) == row


def test_what_chance_finds_is_wrong_now_and_then_and_stays_on_record(graph: OpGraph) -> None:
    def wrong(program: Program) -> str | None:
        return "off by one" if len(program.regions) == 1 and program.digest != start else None

    start = Program.start(graph).digest
    store = Store()
    row = explore(fake_task(graph, FakeEvaluator(wrong=wrong)), blank(40), store, seconds=60.0)
    assert 0 < row.right < row.evaluations
    refused = [s for s in store.steps() if not s.accepted]
    assert refused and all(s.child is None for s in refused)


def test_a_small_tree_is_explored_whole() -> None:
    import torch

    from qimeng.graph.capture import capture

    class Add(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    task = fake_task(capture(Add, lambda: (torch.empty(64, 64),)))
    row = explore(task, blank(5000), Store(), seconds=60.0)
    assert row.stopped == "explored" and 1 < row.evaluations < 5000


def test_a_start_program_that_is_refused_is_said(graph: OpGraph) -> None:
    row = explore(fake_task(graph, FakeEvaluator(wrong=lambda program: "no")), blank(), Store(), seconds=60.0)
    assert row.error == "the start program is refused: no"


def test_collections_are_stored_and_done_once(tmp_path: Path) -> None:
    run = partial(collect, collecting.plan(), tmp_path, partial(collecting.work, out=tmp_path), collecting.DEVICE)
    rows = run()
    assert {r.name for r in rows} == {draw(5, i, collecting.LITTLE).spec.name for i in (0, 1)}
    assert all(r.error is None and r.evaluations == 10 for r in rows)
    assert read_log(tmp_path / LOG) == rows
    assert run() == ()
    more = collect(collecting.plan(evaluations=14), tmp_path, partial(collecting.work, out=tmp_path), collecting.DEVICE)
    assert [r.evaluations for r in more] == [14, 14]
    judged = (tmp_path / "calls").read_text().split()
    assert len(judged) == 28  # the ten of the first time came from the store
    with Store(tmp_path / STORE) as store:
        body = json.loads(store._db.execute("SELECT body FROM specs LIMIT 1").fetchone()[0])
    assert "class Model" in body["source"] and body["dtype"] and body["family"]


def test_failures_are_rows_and_are_tried_again_where_asked(tmp_path: Path) -> None:
    def fails(assignment: object) -> Explored:
        raise OSError("the disk is full")

    rows = collect(collecting.plan(1), tmp_path, fails, collecting.DEVICE)
    collect(collecting.plan(1, retry=True), tmp_path, fails, collecting.DEVICE)
    assert (len(read_log(tmp_path / LOG)), logged_specs(tmp_path / LOG)) == (2, 1)
    assert [r.error for r in rows] == ["OSError: the disk is full"]
    assert assignments(collecting.plan(1), tmp_path / LOG, collecting.DEVICE) == []
    assert len(assignments(collecting.plan(1, retry=True), tmp_path / LOG, collecting.DEVICE)) == 1
    assert len(assignments(collecting.plan(1), tmp_path / LOG, "a100")) == 1


def test_a_killed_collection_goes_on_where_it_ended(whole: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    root = str(SCRIPT.parents[2])
    command = [sys.executable, str(SCRIPT), str(killed), "2", "0.2"]
    process = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": root}, start_new_session=True)
    calls, limit = killed / "calls", time.monotonic() + 120
    while not (calls.exists() and len(calls.read_text().split()) >= 5) and time.monotonic() < limit:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(read_log(killed / LOG)) < 2
    collect(collecting.plan(2), killed, partial(collecting.work, out=killed), collecting.DEVICE)
    with Store(killed / STORE) as one, Store(whole / STORE) as other:
        assert one.steps() == other.steps() and one.counts() == other.counts()
        found = [[(s, e.ms) for _, _, s, e in store.evaluations()] for store in (one, other)]
    assert found[0] == found[1]
    assert len(calls.read_text().split()) <= len((whole / "calls").read_text().split()) + 2  # one in flight each
    assert len(read_log(killed / LOG)) == 2


def test_collections_of_several_machines_merge(whole: Path, tmp_path: Path) -> None:
    parts, together = [tmp_path / "a", tmp_path / "b"], tmp_path / "together"
    for count, part in zip((1, 2), parts, strict=True):  # one spec in common
        collect(collecting.plan(count), part, partial(collecting.work, out=part), collecting.DEVICE)
    added = merge(together, parts)
    assert added["specs"] == 2 and added["log"] in (2, 3)  # the common one took other seconds
    with Store(together / STORE) as one, Store(whole / STORE) as other:
        assert one.steps() == other.steps() and one.counts() == other.counts()
    assert assignments(collecting.plan(2), together / LOG, collecting.DEVICE) == []
    assert set(merge(together, parts).values()) == {0}
    with pytest.raises(QimengError, match="holds no collection"):
        merge(together, [tmp_path / "nowhere"])


def test_a_half_written_row_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / LOG
    append_rows(log, [blank()])
    with open(log, "a") as out:
        out.write('{"spec": "cut o')
    assert read_log(log) == (blank(),)
    append_rows(log, [blank(13)])
    assert read_log(log) == (blank(), blank(13))


def test_reserved_structures_are_not_explored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qimeng.bench.collect import Assignment
    from qimeng.planner.data import overlap
    from qimeng.planner.data.generate import Bytes

    one = Assignment(5, 0, Bytes(1 << 12, 1 << 14), (), 4, "h200")
    own = overlap.signatures_of(one.draw().spec).structure
    monkeypatch.setattr(overlap, "reserved", lambda: frozenset({own}))
    row = explore_one(one, tmp_path / STORE, 10.0, "h200")
    assert row.error is not None and row.error.startswith("reserved") and row.evaluations == 0


def test_the_specs_of_a_suite_are_explored_as_drawn_ones_are(tmp_path: Path) -> None:
    class Mine(Suite):
        name = "mine"

        def __init__(self, *specs: KernelSpec):
            self.specs = specs

        def problems(self) -> Iterator[tuple[str, KernelSpec]]:
            yield from ((spec.name, spec) for spec in self.specs)

    text = draw(5, 0, collecting.LITTLE, ("product",)).spec.source
    given = specs_of(Mine(*(KernelSpec.from_source(text, name, mode=name) for name in ("default", "high"))), "high")
    plan = collecting.plan(given=given)
    collect(plan, tmp_path, partial(collecting.work, out=tmp_path), collecting.DEVICE)
    (row,) = read_log(tmp_path / LOG)
    assert (row.name, row.family, row.index, row.evaluations) == ("high", "mine", 0, 10)
    with Store(tmp_path / STORE) as store:
        (tree,) = trees_of(store)
    assert tree.spec() == given[0].spec and not assignments(plan, tmp_path / LOG, collecting.DEVICE)
    live = KernelSpec.from_module(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(SpecError, match="needs the spec's text"):
        specs_of(Mine(live))


def test_mixtures_take_chances(graph: OpGraph) -> None:
    from qimeng.envs.steps.session import Session

    session = Session(fake_task(graph))
    session.begin()
    seen: Observation = session.observe()
    never = MixturePlanner(ScriptedPlanner(["stop"] * 40), 0.0)
    always = MixturePlanner(ScriptedPlanner([]), 1.0, seed=3)
    assert never.choose(seen) == Action("stop")
    drawn = [always.choose(seen) for _ in range(40)]
    assert Action("stop") not in drawn and len(set(drawn)) > 1
    again = MixturePlanner(ScriptedPlanner([]), 1.0, seed=3)
    assert [again.choose(seen) for _ in range(40)] == drawn
    with pytest.raises(ValueError, match="probability"):
        MixturePlanner(ScriptedPlanner([]), 1.5)


@pytest.mark.slow
def test_the_command_line_collects_estimates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--specs", "1", "--least-mib", "0.01", "--most-mib", "0.02", "--evaluations", "4", "--jobs", "1"]
    arguments += ["--families", "pointwise", "--device", "h200", "--out", str(tmp_path / "c")]
    for expected in ("1 specs explored now, 1 in all", "0 specs explored now, 1 in all"):
        with pytest.raises(SystemExit) as ended:
            main(["collect", *arguments])
        assert ended.value.code in (0, None)
        assert expected in capsys.readouterr().out.replace("\n", " ")
    row = read_log(tmp_path / "c" / LOG)[0]
    assert row.estimated and row.error is None and row.evaluations == 4
    with pytest.raises(SystemExit):
        main(["collect", "merge", str(tmp_path / "d"), str(tmp_path / "c")])
    assert "added to" in capsys.readouterr().out
    assert read_log(tmp_path / "d" / LOG) == (replace(row),)
