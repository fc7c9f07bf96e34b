"""What the keeper of a GPU makes of how its processes end; without Ray, which only calls its methods."""

from __future__ import annotations

import asyncio

import cloudpickle
import pytest
import torch

from qimeng.cluster.supervisor import Reply, Supervisor, _called
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


def at_a_keeper(work: object, task: str, limit_s: float | None = None, times: int = 1) -> list[Reply]:
    """What a keeper answers to calls one after the other in one lane."""

    async def calls() -> list[Reply]:
        keeper = Supervisor("gpu", "H100")
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
