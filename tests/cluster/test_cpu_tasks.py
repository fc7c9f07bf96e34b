"""Which node does an errand, what is shared, and what is left to whoever asked; Ray's tasks are played."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from qimeng.cluster import cpu_tasks
from qimeng.cluster.cpu_tasks import CpuTasks, Done
from qimeng.envs.workers.offload import Errand


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In place of the module, which must not be imported before `conftest` says how."""
    module = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=type("RayError", (Exception,), {})),
        cancel=lambda task, force: task.cancel(),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a"),
    )
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


class Played(CpuTasks):
    """CPU tasks on nodes called by letters; `answer` says what becomes of a task on the first node that may do it.

    Attributes:
        begun: (work, node) of every task.
        most: that were in flight at a time.
    """

    def __init__(self, answer: Callable[[bytes, str], Done], nodes: str = "ab", at_once: int = 8, seconds: float = 0):
        super().__init__()
        self.answer, self.nodes, self.at_once, self.seconds = answer, nodes, at_once, seconds
        self.begun: list[tuple[bytes, str]] = []
        self.flying, self.most = 0, 0

    def _nodes(self) -> tuple[frozenset[str], int]:
        return frozenset(self.nodes), self.at_once

    def begin(self, work: bytes, nodes: Sequence[str]) -> Any:
        node = nodes[0]
        self.begun.append((work, node))
        return asyncio.ensure_future(self.play(work, node))

    async def play(self, work: bytes, node: str) -> Done:
        self.flying += 1
        self.most = max(self.most, self.flying)
        await asyncio.sleep(self.seconds)
        self.flying -= 1
        return self.answer(work, node)

    def asked(
        self, monkeypatch: pytest.MonkeyPatch, *keys: str, times: int = 1, limit_s: float = 60.0
    ) -> list[bytes | None]:
        async def several() -> list[bytes | None]:
            for _ in range(times):
                found = await self.run([Errand(key, key.encode(), limit_s) for key in keys])
            return found

        monkeypatch.setattr(cpu_tasks, "_begun", self.begin)
        monkeypatch.setattr(cpu_tasks, "QUEUE_S", limit_s)
        return asyncio.run(several())


def test_a_node_that_cannot_do_one_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Played(lambda work, node: Done(node, work) if node != "a" else Done(node, fit=False))
    assert tasks.asked(monkeypatch, "x", "y") == [b"x", b"y"]
    assert tasks.asked(monkeypatch, "z") == [b"z"]
    assert [node for _, node in tasks.begun] == ["a", "a", "b", "b", "b"]
    assert tasks.described() == {"cpu_tasks": 3, "done_here": 0, "why_here": ""}


def test_where_no_node_can_it_is_left_and_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Played(lambda work, node: Done(node, failure="other compilers", fit=False))
    assert tasks.asked(monkeypatch, "x") == [None] and len(tasks.begun) == 2
    assert tasks.asked(monkeypatch, "y") == [None] and len(tasks.begun) == 2, "nobody is asked in vain"
    assert tasks.described() == {"cpu_tasks": 0, "done_here": 2, "why_here": "other compilers"}


def test_equal_errands_are_done_once_and_accidents_are_shared_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Played(lambda work, node: Done(node, work, lasting=work != b"crash"))
    assert tasks.asked(monkeypatch, "x", "x", "crash", times=2) == [b"x", b"x", b"crash"]
    assert [work for work, _ in tasks.begun] == [b"x", b"crash", b"crash"]


def test_what_raises_or_takes_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Played(lambda work, node: Done(node, failure="ValueError: no"))
    assert tasks.asked(monkeypatch, "x") == [None] and tasks.why == "ValueError: no" and len(tasks.begun) == 1
    slow = Played(lambda work, node: Done(node, work), seconds=600.0)
    assert slow.asked(monkeypatch, "x", limit_s=0.1) == [None] and "took too long" in slow.why


def test_no_more_are_in_flight_than_this_gpu_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Played(lambda work, node: Done(node, work), at_once=2, seconds=0.01)
    keys = [f"{n}" for n in range(7)]
    assert tasks.asked(monkeypatch, *keys) == [key.encode() for key in keys] and tasks.most == 2


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources, "Labels": {}}


def test_a_gpu_has_its_share_of_half_of_the_cores_of_nodes_without_one(ray: SimpleNamespace) -> None:
    nodes = [node("a", CPU=32.0, GPU=4.0), node("b", CPU=96.0), node("c", GPU=4.0), node("gone", False, CPU=64.0)]
    ray.nodes = lambda: nodes
    assert CpuTasks()._nodes() == (frozenset("b"), 6)


def test_where_every_node_has_a_gpu_all_is_left_at_once(ray: SimpleNamespace) -> None:
    ray.nodes = lambda: [node("a", CPU=32.0, GPU=4.0)]
    tasks = CpuTasks()
    assert asyncio.run(tasks.run([Errand("x", b"x", 60.0)])) == [None]
    assert tasks.described() == {"cpu_tasks": 0, "done_here": 1, "why_here": "every node has a GPU"}


def test_what_is_sent_says_on_which_node_it_was_done_and_what_came_of_it() -> None:
    done = cpu_tasks._do(cloudpickle.dumps(lambda: 7))
    assert (done.node, cloudpickle.loads(done.result or b""), done.fit, done.lasting) == ("a", 7, True, True)
    failed = cpu_tasks._do(cloudpickle.dumps(lambda: 1 // 0))
    assert failed.failure.startswith("ZeroDivisionError") and failed.fit and failed.result is None
