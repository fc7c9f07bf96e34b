"""Memory that ran out beside others: the verdict is that of a run without them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from qimeng import KernelSpec
from qimeng.envs.judge.device_memory import DeviceMemory
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.time_spent import Clock
from qimeng.interfaces import Asked, Evaluation, EvaluationRequest, Gate
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "device.lock")


def test_users_of_a_device_know_of_each_other(path: str) -> None:
    first, second = DeviceMemory(path), DeviceMemory(path)
    assert first.others and second.others
    second.close()
    assert not first.others and not first.others


def test_nobody_shares_a_device_without_a_lock() -> None:
    memory, calls = DeviceMemory(""), []
    assert memory.use(lambda: calls.append(1) or "memory", lambda f: True, Clock()) == "memory"  # type: ignore[func-returns-value]
    assert calls == [1] and not memory.others and not memory.wanted
    memory.close()


@pytest.mark.parametrize("shared", [True, False])
def test_what_ran_out_beside_others_is_tried_again_without_them(path: str, shared: bool) -> None:
    memory, clock = DeviceMemory(path), Clock()
    other = DeviceMemory(path if shared else f"{path}.of_another_device")
    inside, go_on, calls = threading.Event(), threading.Event(), []

    def long() -> str:
        inside.set()
        assert go_on.wait(60)
        calls.append("other")
        return "passed"

    def mine() -> str:
        calls.append("mine")
        threading.Timer(0.2, go_on.set).start()
        return "memory" if calls.count("mine") == 1 else "passed"

    thread = threading.Thread(target=other.use, args=(long, lambda f: False, Clock()))
    thread.start()
    assert inside.wait(60)
    found = memory.use(mine, lambda f: f == "memory", clock)
    thread.join()
    assert found == ("passed" if shared else "memory")
    assert calls == (["mine", "other", "mine"] if shared else ["mine", "other"])
    assert (clock.seconds["wait"] > 0.1) == shared
    memory.close()
    other.close()


@pytest.mark.parametrize("shared", [True, False])
def test_a_program_that_ran_out_of_memory_beside_others_is_judged_again(
    path: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = KernelSpec.from_function(torch.relu, (torch.randn(64, 64),))
    graph = capture_spec(spec, verify=False)
    evaluator = GpuEvaluator(spec, graph, torch_device="cpu", sandbox="off")
    evaluator.memory, other = DeviceMemory(path), DeviceMemory(path if shared else f"{path}.of_another_device")
    verdicts = [Evaluation(Gate.PROGRAM, "OutOfMemoryError: CUDA out of memory", "memory"), Evaluation(Gate.PASSED)]
    monkeypatch.setattr(evaluator, "_with_some_plan", lambda request, clock: verdicts.pop(0))
    program = Program.start(graph)
    request = EvaluationRequest(program, None, Asked.TIMING, spec.digest, evaluator.device.name, spec.mode)
    try:
        found = evaluator.answer(request)
    finally:
        other.close()
        evaluator.close()
    assert found.ok == shared and len(verdicts) == (0 if shared else 1)
