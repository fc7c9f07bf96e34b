"""A collection on a cluster: the store is that of one process, and Ctrl-C keeps what was judged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from qimeng.bench.collect import LOG, STORE, collect, read_log
from qimeng.cluster.collecting import merge_files
from qimeng.cluster.fleet import Fleet
from qimeng.cluster.tasks import ClusterTasks
from qimeng.store import Store
from tests.bench import collecting
from tests.bench.inline import Inline
from tests.cluster.conftest import ROOT, Nodes
from tests.cluster.fakes import explore_there

SCRIPT = Path(__file__).with_name("interrupted.py")


def content(folder: Path) -> dict[str, int]:
    with Store(folder / STORE) as store:
        return store.counts()


def test_a_collection_on_a_cluster_is_that_of_one_process(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, away, here = nodes.add(2), tmp_path / "away", tmp_path / "here"
    pool = ClusterTasks(Fleet(nodes.address, "H100"), on_files=partial(merge_files, away / STORE))
    rows = collect(collecting.plan(2), away, explore_there, collecting.DEVICE, pool=pool)
    monkeypatch.setattr("qimeng.bench.collect.Pool", Inline)
    alone = collect(collecting.plan(2), here, partial(collecting.work, out=here), collecting.DEVICE)
    assert {(r.name, r.evaluations, r.right, r.programs, r.best_ms) for r in rows} == {
        (r.name, r.evaluations, r.right, r.programs, r.best_ms) for r in alone
    }
    assert content(away) == content(here)
    before = content(away)
    with Store(here / STORE) as store:
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    merge_files(away / STORE, {path.name: path.read_bytes() for path in here.glob(f"{STORE}*")})
    assert content(away) == before, "an evaluation that comes twice is one row"
    nodes.remove(node)


def judged_since(when: float) -> int:
    """Programs that fakes have judged in the folder of a task that began since then."""
    folders = Path(tempfile.gettempdir()).glob("qimeng_task_*/calls")
    return sum(len(path.read_text().split()) for path in folders if path.stat().st_mtime > when)


def test_ctrl_c_ends_in_seconds_and_keeps_what_was_judged(nodes: Nodes, tmp_path: Path) -> None:
    node = nodes.add(1)
    command = [sys.executable, str(SCRIPT), nodes.address, str(tmp_path), "2", "0.7"]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    began, limit = time.time(), time.monotonic() + 60
    while judged_since(began) < 3 and time.monotonic() < limit:
        time.sleep(0.1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130 and time.monotonic() - began < 10
    process.stdout.close()
    assert read_log(tmp_path / LOG) == (), "no spec was finished"
    assert content(tmp_path)["evaluations"] >= 2
    nodes.remove(node)
