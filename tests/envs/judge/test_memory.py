"""The judge goes on with less memory where the device's runs out in its own process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from qimeng.envs.cost import memory_plan
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.interfaces import Asked, EvaluationRequest
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


@pytest.fixture
def evaluator() -> Iterator[GpuEvaluator]:
    spec = KernelSpec.from_module(torch.nn.ReLU(), (torch.randn(64, 64),))
    made = GpuEvaluator(spec, capture_spec(spec), torch_device="cpu")
    yield made
    made.close()


def checked(evaluator: GpuEvaluator) -> EvaluationRequest:
    assert evaluator.graph is not None
    program, spec = Program.start(evaluator.graph), evaluator.spec
    return EvaluationRequest(program, None, Asked.CHECK, spec.digest, evaluator.device.name, spec.mode)


@pytest.mark.parametrize("times", [1, 2])
def test_a_plan_of_less_memory_is_taken_as_often_as_needed(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    made, left = evaluator.references.make, times
    plans = [evaluator.references.plan]

    def short(draw: object) -> object:
        nonlocal left
        if left:
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")
        plans.append(evaluator.references.plan)
        return made(draw)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluator.references, "make", short)
    assert evaluator.answer(checked(evaluator)).ok
    before, after = plans[0], plans[-1]
    assert (before.way, before.tidy, after.tidy, after.pool_bytes) == ("device", False, True, 0)
    assert after.way == ("device" if times == 1 else "slices")


def test_what_a_plan_took_that_was_too_large_counts_as_time_of_the_judge(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(evaluator.report.seconds)

    def slow(draw: object) -> object:
        time.sleep(0.25)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(evaluator.references, "make", slow)
    began = time.perf_counter()
    found = evaluator.answer(checked(evaluator))
    wall, after = time.perf_counter() - began, evaluator.report.seconds
    assert found.failure == "judge" and found.seconds["check"] >= 0.25 * len(memory_plan.WAYS)
    assert wall - 0.1 < sum(found.seconds.values()) <= wall
    assert after["check"] - before.get("check", 0.0) == pytest.approx(found.seconds["check"])


def test_where_no_plan_is_left_the_program_is_not_judged_and_the_message_says_so(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(draw: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(evaluator.references, "make", short)
    found = evaluator.answer(checked(evaluator))
    assert found.failure == "judge" and "ran out" in (found.error or "")
    assert evaluator.references.plan.way == "none" and evaluator.references.kind == "eager-highest"
