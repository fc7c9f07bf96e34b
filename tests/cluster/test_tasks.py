"""Whole tasks on a cluster: the face of the pool of this machine, and nothing lost where nodes leave."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qimeng.bench.pool import Outcome
from qimeng.cluster.fleet import Fleet
from qimeng.cluster.gpus import ClusterError
from qimeng.cluster.supervisor import TASK_FOLDER
from qimeng.cluster.tasks import ClusterTasks
from tests.cluster.conftest import Nodes


def square(n: int) -> tuple[int, str]:
    time.sleep(0.1)
    return n * n, os.environ.get("CUDA_VISIBLE_DEVICES", "none")


def results(outcomes: Iterator[Outcome[Any, Any]], each: Callable[[int], None] = lambda n: None) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for outcome in outcomes:
        assert outcome.task not in found, "counted twice"
        found[outcome.task] = outcome.failure or outcome.result[0]
        each(len(found))
    return found


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_tasks_of_nodes_that_are_killed_are_done_elsewhere(nodes: Nodes, kills: int) -> None:
    rng, count = random.Random(11), 25 * kills
    alive = [nodes.add(1), nodes.add(1)]
    at = sorted(rng.sample(range(1, count - 5), kills))

    def kill(done: int) -> None:
        if at and done >= at[0]:
            at.pop(0)
            busy = {call.gpu.node for call in pool._begun}
            alive.remove(victim := rng.choice([node for node in alive if node.node_id in busy] or alive))
            nodes.remove(victim)
            alive.append(nodes.add(1))

    with ClusterTasks(Fleet(nodes.address, "H100"), slots=2) as pool:
        assert results(pool.run(range(count), square, 60.0), kill) == {n: n * n for n in range(count)}
        assert not at and sum(pool.again.values()) > 0
    for node in alive:
        nodes.remove(node)


def misbehave(what: str) -> str:
    if what == "raise":
        raise ValueError("no")
    if what == "die":
        os._exit(3)
    (Path(os.environ[TASK_FOLDER]) / what).write_text("was here")
    if what == "sleep":
        time.sleep(60)
    return what


def test_what_a_task_does_is_its_outcome_and_a_death_is_tried_elsewhere(nodes: Nodes) -> None:
    node = nodes.add(2)
    files: list[str] = []
    with ClusterTasks(Fleet(nodes.address, "H100"), on_files=files.extend) as pool:
        began = time.monotonic()
        found = {o.task: o for o in pool.run(["raise", "die", "sleep", "fine"], misbehave, 5.0)}
        assert time.monotonic() - began < 40
        assert found["fine"].result == "fine" and found["raise"].failure == "ValueError: no"
        assert found["sleep"].failure == "took longer than 5 s"
        assert found["die"].failure == "the worker process died: exit code 3 (tried 3 times)"
        assert len(pool.again) == 2 and sum(pool.again.values()) == 2, "each GPU once before the last try"
        assert pool.ask(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) in ("0", "1")
        assert sorted(files) == ["fine", "sleep"], "what is ended leaves its files as well"
        cut = list(pool.run(["sleep"] * 3, misbehave, 60.0, stop_at=time.monotonic() + 1.0))
        assert [o.interrupted for o in cut] == [True] * 2, "the third was not begun"
        assert sorted(files) == ["fine", "sleep"] + ["sleep"] * 2
    nodes.remove(node)


def test_tasks_wait_for_a_gpu_and_give_up_after_a_while(nodes: Nodes) -> None:
    node = nodes.add(1)
    fleet = Fleet(nodes.address, "H100", patience=1.0)
    nodes.remove(node)
    while fleet.gpus:
        time.sleep(0.2)
        fleet.look()
    with ClusterTasks(fleet) as pool, pytest.raises(ClusterError, match="no GPU of generation 'H100' is left"):
        list(pool.run([1], square, 60.0))
