"""What the keeper of a GPU makes of how its processes end; without Ray, which only calls its methods."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from qimeng.cluster.supervisor import Reply, Supervisor, _called
from qimeng.envs.workers.offload import Errand
from tests.cluster import light


def failing(error: Exception) -> bytes:
    def work(task: str) -> str:
        raise error

    return cloudpickle.dumps(work)


def test_a_driver_error_is_the_machines_and_all_others_are_the_tasks() -> None:
    result, broken = _called((failing(RuntimeError("CUDA error: unspecified launch failure")), "x"))
    assert result is None and broken.startswith("the GPU or its driver failed: RuntimeError: CUDA error")
    for error in (ValueError("no"), RuntimeError("no"), torch.OutOfMemoryError("CUDA out of memory"), OSError("gone")):
        with pytest.raises(type(error)):
            _called((failing(error), "x"))


class CpuTasks:
    """In place of `qimeng.cluster.cpu_tasks.CpuTasks`: it does errands in this process, or takes for ever."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds
        self.keys: list[str] = []

    def described(self) -> dict[str, int]:
        return {"cpu_tasks": len(self.keys)}

    async def run(self, errands: Sequence[Errand]) -> list[bytes | None]:
        self.keys += [errand.key for errand in errands]
        await asyncio.sleep(self.seconds)
        return [cloudpickle.dumps(cloudpickle.loads(e.work)()) if e.key != "nobody" else None for e in errands]


def at_a_keeper(
    work: object, task: str, limit_s: float | None = None, times: int = 1, cpu_tasks: Any = None
) -> list[Reply]:
    """What a keeper answers to calls one after the other in one lane."""

    async def calls() -> list[Reply]:
        keeper = Supervisor("gpu", "H100", cpu_tasks=cpu_tasks)
        try:
            return [
                await keeper.work("run", 0, cloudpickle.dumps(work), cloudpickle.dumps(task), 1, 1, limit_s)
                for _ in range(times)
            ]
        finally:
            await keeper.end("run")

    return asyncio.run(calls())


def test_a_process_works_on_and_its_files_come_back() -> None:
    first, second = at_a_keeper(light.leave_a_file, "a", times=2)
    assert first.files == second.files == {"a": b"here"}
    assert first.alive and first.result == second.result is not None, "the same process"


def test_a_process_whose_gpu_failed_is_ended_and_its_files_come_back() -> None:
    (reply,) = at_a_keeper(light.lose_the_gpu, "a")
    assert not reply.alive and not reply.late and reply.files == {"a": b"here"}
    assert (reply.failure or "").startswith("the GPU or its driver failed")


def test_what_needs_no_gpu_is_done_by_cpu_tasks_and_what_comes_to_nothing_by_the_process() -> None:
    cpu_tasks = CpuTasks()
    first, second = at_a_keeper(light.send_errands, "a", times=2, cpu_tasks=cpu_tasks)
    assert cloudpickle.loads(first.result or b"") == [os.getpid(), None], "the first one by another process"
    assert first.result == second.result and cpu_tasks.keys == ["process", "nobody"] * 2
    (alone,) = at_a_keeper(light.send_errands, "a")
    assert cloudpickle.loads(alone.result or b"") == [None, None], "a keeper without CPU tasks does none"


def test_a_process_that_waits_for_a_cpu_task_is_ended_in_time() -> None:
    (reply,) = at_a_keeper(light.send_errands, "a", limit_s=1.0, cpu_tasks=CpuTasks(600.0))
    assert reply.late and reply.failure == "took longer than 1 s"


def test_notes_are_kept_while_a_task_runs_and_nobody_hears_one_that_waits(tmp_path: Path) -> None:
    begun = str(tmp_path / "begun")

    async def scene() -> None:
        keeper = Supervisor("gpu", "H100")
        work, task = cloudpickle.dumps(light.tell), cloudpickle.dumps(begun)
        first = asyncio.ensure_future(keeper.work("run", 0, work, task, 1, 1, None))
        behind = asyncio.ensure_future(keeper.work("run", 1, work, task, 1, 1, None))
        while len(found := await keeper.notes("run", 0, 0) or []) < 2:
            await asyncio.sleep(0.02)
        assert [cloudpickle.loads(note) for note in found] == ["first", begun]
        assert await keeper.notes("run", 0, 1) == found[1:] and await keeper.notes("run", 1, 0) is None
        Path(begun).touch()
        assert (await first).failure is None and (await behind).failure is None
        assert await keeper.notes("run", 0, 0) is None
        await keeper.end("run")

    asyncio.run(scene())
