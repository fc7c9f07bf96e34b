"""The same on Ray itself: few tests, since its processes take seconds. Who judges what: `test_scheduling`.

Processes of GPUs answer without PyTorch (`light`), but for the collections. A simulated node costs two seconds of a
core (most of it the process of its keeper), a request that needs no judging six milliseconds, a process with PyTorch
four seconds. With QIMENG_FULL_SCALE=1, specs are explored and a planner is trained as well.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from qimeng.bench.collect import LOG, STORE, collect, read_log
from qimeng.cli import main
from qimeng.cluster.collecting import merge_files
from qimeng.cluster.fleet import Fleet, described
from qimeng.cluster.pool import ClusterPool
from qimeng.cluster.tasks import ClusterTasks
from qimeng.errors import RequestError
from qimeng.interfaces import Evaluation, Ticket
from qimeng.planner.lm.weights import is_planner
from qimeng.store import Store
from tests.bench import collecting
from tests.bench.inline import Inline
from tests.cluster import light
from tests.cluster.conftest import ROOT, Nodes
from tests.cluster.fakes import Measuring, explore_there, fake_judge_of, request
from tests.cluster.light import of_text
from tests.cluster.virtual import judged

SCRIPT = Path(__file__).with_name("interrupted.py")
FULL = bool(os.environ.get("QIMENG_FULL_SCALE"))
KILLS = 20
REQUESTS, LANES = 10_000, 4
full_scale = pytest.mark.skipif(not FULL, reason="takes minutes of a core: QIMENG_FULL_SCALE=1 runs it")
GROWTH = 24 << 20
"""Bytes that a process may have more after all requests."""
TRAINED = """
answers = "live"
device = "h100"
specs = 2
seed = 3
length = 96
[mini]
hidden = 32
layers = 1
heads = 2
inner = 64
[ppo]
steps = 6
environments = 2
rollout = 3
batch = 6
epochs = 1
max_steps = 3
"""
LONG_S = 300.0
"""Seconds after which a busy machine is given up."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qimeng.cluster.pool.answer", light.answer)


def alone(texts: list[str]) -> dict[str, Evaluation]:
    return {text: replace(Measuring().answer(request(text)), card=None) for text in texts}


def test_a_cluster_answers_as_one_process(nodes: Nodes, quick: None) -> None:
    pool, texts = ClusterPool(light.make, Measuring, Fleet(nodes.address, "B200")), ["a", "wrong b", "c", "a"]
    try:
        assert judged(pool, texts) == alone(texts)
        assert (pool.name, pool.version, pool.estimated, pool.at_once) == ("Measuring", 7, False, 2)
        assert pool.home is not None and pool.home.generation == "B200"
        with pytest.raises(RequestError, match="answered before"):
            list(pool.gather([Ticket(request("a"))]))
        late = pool.submit(request("sleep 600", seconds=1.0))
        (found,) = dict(pool.gather([late])).values()
        assert (found.failure, found.error) == ("late", "the judge took longer than 1 s")
        assert pool.evaluate(request("later").program).ok, "its lane is free again"
    finally:
        pool.close()


@pytest.mark.slow
def test_ten_thousand_requests_take_no_more_memory_than_few(nodes: Nodes, quick: None) -> None:
    fleet = Fleet(nodes.address, "B200")
    pool = ClusterPool(light.make, Measuring, fleet, pinned=False, lanes=LANES)

    def several(first: int, number: int) -> int:
        tickets = [pool.submit(request(f"{i}")) for i in range(first, first + number)]
        return sum(found.ok for _, found in pool.gather(tickets))

    def resident() -> list[int]:
        said = described(fleet._ray, fleet.gpus, LONG_S)
        pids = [os.getpid(), *(row["pid"] for row in said.values())]
        return [psutil.Process(pid).memory_info().rss for pid in pids]

    try:
        assert several(0, 500) == 500
        before = resident()
        assert len(before) == 3, "this process and the two keepers"
        for first in range(500, REQUESTS, 500):
            assert several(first, 500) == 500
        grown = [after - was for was, after in zip(before, resident(), strict=True)]
        assert max(grown) < GROWTH, f"{[g >> 20 for g in grown]} MiB more after {REQUESTS} requests"
    finally:
        pool.close()


def test_what_a_task_does_is_its_outcome_and_a_death_is_tried_elsewhere(nodes: Nodes, tmp_path: Path) -> None:
    files: list[str] = []
    begun = tmp_path / "begun"

    def clock() -> float:
        return time.monotonic() + (1e6 if begun.exists() else 0.0)

    with ClusterTasks(Fleet(nodes.address, "B200"), on_files=files.extend, clock=clock) as pool:
        found = {o.task: o for o in pool.run(["raise", "die", "fine"], light.misbehave, LONG_S)}
        assert found["fine"].result == "fine" and found["raise"].failure == "ValueError: no"
        assert found["die"].failure == "the worker process died: exit code 3 (tried 3 times)"
        assert len(pool.again) == 2 and sum(pool.again.values()) == 2, "each GPU once before the last try"
        assert pool.ask(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) in ("0", "1")
        assert files == ["fine"]
        (late,) = pool.run(["sleep"], light.misbehave, 1.0)
        assert late.failure == "took longer than 1 s" and not late.interrupted
        cut = list(pool.run([f"sleep {begun}"] * 3, light.misbehave, LONG_S, stop_at=clock() + LONG_S))
        assert [o.interrupted for o in cut] == [True] * 2, "the third was not begun"
        assert "sleep" in files, "what is cut off leaves its files as well"


def test_a_keeper_that_dies_comes_back_and_its_work_is_done(nodes: Nodes, quick: None, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    fleet = Fleet(nodes.address, "B200")
    pool = ClusterPool(light.make, Measuring, fleet, lanes=1)
    try:
        assert pool.evaluate(request("before").program).ok and pool.home is not None
        ticket, limit = pool.submit(request(f"once {begun}")), time.monotonic() + LONG_S
        while not begun.exists() and time.monotonic() < limit:
            time.sleep(0.02)
        (pid,) = (said["pid"] for said in described(fleet._ray, [pool.home], LONG_S).values())
        os.kill(pid, signal.SIGKILL)
        assert pool.ask(ticket.request, ticket).ok
        assert pool.report.again == {"machine": 1} and fleet.lost == {pool.home.name: 1}
        (other,) = (said["pid"] for said in described(fleet._ray, [pool.home], LONG_S).values())
        assert other != pid, "Ray has started it anew, and the pool has stayed on its GPU"
    finally:
        pool.close()


def test_what_a_task_tells_is_heard_while_it_runs(nodes: Nodes, tmp_path: Path) -> None:
    heard, going = list[str | None](), tmp_path / "goes on"

    def hear(note: str | None) -> None:
        heard.append(note)
        if note == str(going):  # it waits for this
            going.touch()

    with ClusterTasks(Fleet(nodes.address, "B200"), on_note=hear) as pool:
        (outcome,) = pool.run([str(going)], light.tell, LONG_S)
    assert outcome.result == "done" and [note for note in heard if note is not None] == ["first", str(going)]


def test_what_needs_no_gpu_is_done_on_another_node_where_the_gpus_own_cannot(nodes: Nodes) -> None:
    node = nodes.add(0)
    fleet = Fleet(nodes.address, "B200")
    try:
        with ClusterTasks(fleet) as pool:
            (own,) = {gpu.node for gpu in fleet.gpus}
            assert pool.ask(partial(light.errand_not_on, own), LONG_S) == [node.node_id, node.node_id]
            said = described(fleet._ray, fleet.gpus, LONG_S).values()
            assert sum(row["cpu_tasks"] for row in said) == 2 and not any(row["done_here"] for row in said)
    finally:
        nodes.remove(node)


def killed_meanwhile(nodes: Nodes, kills: int, seed: int) -> Iterator[tuple[str, Evaluation]]:
    """All answers of a pool whose nodes are killed at random, one after another, and replaced meanwhile."""
    rng = random.Random(seed)
    with ThreadPoolExecutor(1) as starting:
        alive = list(starting.map(nodes.add, [1, 1]))
        coming: list[Future[Any]] = []
        pool = ClusterPool(light.make, Measuring, Fleet(nodes.address, "H100"), pinned=False, lanes=1)
        tickets = [pool.submit(request(text)) for text in texts_of(kills)]
        at, done = sorted(rng.sample(range(1, len(tickets) - 5), kills)), 0
        try:
            for ticket, answer in pool.gather(tickets):
                yield ticket.request.program.fallback, replace(answer, card=None)
                done += 1
                if at and done >= at[0]:
                    at.pop(0)
                    alive += [coming.pop().result() for n in range(len(coming)) if coming[-1].done() or not alive]
                    busy = {call.gpu.node for call in pool._calls}
                    victims = [node for node in alive if node.node_id in busy] or alive
                    alive.remove(victim := rng.choice(victims))
                    nodes.remove(victim)
                    coming.append(starting.submit(nodes.add, 1))
            assert pool.report.again["machine"] >= kills // 2 > 0 and "was lost" in pool.report.reason
        finally:
            pool.close()
            for node in (*alive, *(one.result() for one in coming)):
                nodes.remove(node)


def texts_of(kills: int) -> list[str]:
    return [f"{'wrong ' if i % 7 == 3 else 'sleep 0.1 '}{i}" for i in range(5 * kills)]


@pytest.mark.slow
def test_nodes_that_are_killed_lose_nothing_and_count_nothing_twice(nodes: Nodes, quick: None) -> None:
    answers = list(killed_meanwhile(nodes, KILLS, seed=7))
    assert len(answers) == len(dict(answers)), "an answer counts once"
    assert dict(answers) == {text: of_text(text, None) for text in texts_of(KILLS)}, "the same as one process says"


@pytest.mark.slow
def test_status_lists_every_gpu(nodes: Nodes) -> None:
    command = [sys.executable, "-m", "qimeng.cli", "cluster", "status", nodes.address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=LONG_S)
    generations = [row["generation"] for row in json.loads(done.stdout)]
    assert generations.count("B200") == 2, "and perhaps a node that was killed a moment ago"


def content(folder: Path) -> dict[str, int]:
    with Store(folder / STORE) as store:
        return store.counts()


@pytest.mark.slow
@full_scale
def test_a_collection_on_a_cluster_is_that_of_one_process(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, here = tmp_path / "away", tmp_path / "here"
    pool = ClusterTasks(Fleet(nodes.address, "B200"), on_files=partial(merge_files, away / STORE))
    rows = collect(collecting.plan(2), away, explore_there, collecting.DEVICE, pool=pool)
    monkeypatch.setattr("qimeng.bench.collect.Pool", Inline)
    one = collect(collecting.plan(2), here, partial(collecting.work, out=here), collecting.DEVICE)
    assert {(r.name, r.evaluations, r.right, r.programs, r.best_ms) for r in rows} == {
        (r.name, r.evaluations, r.right, r.programs, r.best_ms) for r in one
    }
    assert content(away) == content(here)
    before = content(away)
    with Store(here / STORE) as store:
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    merge_files(away / STORE, {path.name: path.read_bytes() for path in here.glob(f"{STORE}*")})
    assert content(away) == before, "an evaluation that comes twice is one row"


def judged_in(folder: Path) -> int:
    """Programs that fakes have judged in the folders of tasks which run now."""
    return sum(len(path.read_text().split()) for path in folder.glob("qimeng_task_*/calls"))


@pytest.mark.slow
def test_ctrl_c_ends_in_seconds_and_keeps_what_was_judged(nodes: Nodes, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), nodes.address, str(tmp_path), "1", "0.7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    limit = time.monotonic() + LONG_S
    while judged_in(nodes.folder) < 3 and time.monotonic() < limit:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.stdout.close()
    assert read_log(tmp_path / LOG) == (), "no spec was finished"
    assert content(tmp_path)["evaluations"] >= 2


@pytest.mark.slow
@full_scale
def test_a_planner_is_trained_on_what_a_cluster_says(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qimeng.cluster.judging.judge_of", fake_judge_of)
    config, out = tmp_path / "tiny.toml", tmp_path / "planner"
    config.write_text(TRAINED)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--cluster", nodes.address, "--generation", "B200", "--config", str(config), "--out", str(out)])
    assert ended.value.code in (0, None)
    report = json.loads((out / "report.json").read_text())
    assert is_planner(out) and report["curve"][-1]["steps"] == 6 and report["times"].startswith("h100, ESTIMATED")
    with Store(out / "store.sqlite") as store:
        rows = list(store.evaluations())
    assert len(rows) >= report["evaluations"] >= 2, "each program is judged once; alternatives have rows of their own"
    assert any(evaluation.ok for *_, evaluation in rows)
    assert {dict(conditions.versions)["evaluator"].split()[0] for conditions, *_ in rows} == {"EstimatingEvaluator"}
