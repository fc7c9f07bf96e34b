"""The judge goes on with less memory where the device's runs out in its own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from qimeng.envs.cost import memory_plan
from qimeng.envs.judge import gpu_evaluator
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.verdicts import Verdict
from qimeng.envs.workers.worker_setup import Draw
from qimeng.interfaces import Asked, Evaluation, EvaluationRequest, Fault, Gate
from qimeng.program.program import Program
from qimeng.testing import FakeClock


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


def test_what_has_passed_before_the_memory_ran_out_stays(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = evaluator.references.make
    tried, left = list[str](), [1]

    def counted(draw: Draw) -> object:
        tried.append(draw.distribution)
        return made(draw)

    def short(*unused: Any) -> Verdict:
        if left and left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")
        return Verdict()  # no time is tested, and this machine may be busy

    monkeypatch.setattr(evaluator.references, "make", counted)
    monkeypatch.setattr(evaluator.outer_clock, "check", short)
    found = evaluator.answer(replace(checked(evaluator), asked=Asked.FINAL))
    assert found.ok and not left, found.error
    assert tried.count("examples") == 1 and evaluator.references.plan.tidy


def test_what_a_plan_took_that_was_too_large_counts_as_time_of_the_judge(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, now = dict(evaluator.report.seconds), FakeClock()
    monkeypatch.setattr(evaluator, "clock", now)

    def slow(draw: object) -> object:
        now.now += 0.25
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(evaluator.references, "make", slow)
    found = evaluator.answer(checked(evaluator))
    after = evaluator.report.seconds
    assert found.failure == "machine" and found.seconds["reference"] >= 0.25 * len(memory_plan.WAYS)
    assert sum(found.seconds.values()) == pytest.approx(now.now), "all of it, and no more"
    assert after["reference"] - before.get("reference", 0.0) == pytest.approx(found.seconds["reference"])


def test_where_no_plan_is_left_the_program_is_not_judged_and_the_message_says_so(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(draw: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(evaluator.references, "make", short)
    found = evaluator.answer(checked(evaluator))
    assert found.fault is Fault.MACHINE and "ran out" in (found.error or "")
    assert evaluator.references.plan.way == "none" and evaluator.references.kind == "eager-highest"


def test_a_worker_that_runs_out_with_pytorchs_own_code_gets_a_smaller_plan(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, plans = evaluator._judged, []
    short = Evaluation(Gate.PROGRAM, "OutOfMemoryError: CUDA out of memory", "memory")

    def first_short(run: Any, gates: Any) -> Evaluation:
        plans.append(evaluator.references.plan)
        return short if len(plans) < 3 else judged(run, gates)

    monkeypatch.setattr(evaluator, "_judged", first_short)
    assert evaluator.answer(checked(evaluator)).ok
    assert [(p.way, p.tidy) for p in plans] == [("device", False), ("device", True), ("slices", True)]
    monkeypatch.setattr(evaluator, "_judged", lambda run, gates: short)
    assert evaluator.answer(checked(evaluator)).failure == "memory", "where no smaller plan is left, it is an answer"
    assert evaluator.references.kind == "float64"


GIB = 1 << 30


def others_leave(monkeypatch: pytest.MonkeyPatch, free: Callable[[], int]) -> None:
    monkeypatch.setattr("qimeng.envs.judge.eager_reference.free_bytes", lambda device: free())


def large(evaluator: GpuEvaluator) -> None:
    """Let it plan as for 4 GiB of inputs and 8 GiB of outputs on a device of 80 GiB."""
    evaluator.references._sizes = memory_plan.Sizes(4 * GIB, 0, 8 * GIB, flop=0.0, rows=64)
    evaluator.references._room = 80 * GIB


@pytest.mark.parametrize(("free", "way", "copies"), [(70, "device", True), (45, "slices", True), (33, "slices", False)])
def test_a_plan_that_fits_what_others_leave_is_taken_before_the_first_trial(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch, free: int, way: str, copies: bool
) -> None:
    large(evaluator)
    others_leave(monkeypatch, lambda: free * GIB)
    found = evaluator.answer(checked(evaluator))
    assert found.ok and found.accuracy is not None and found.accuracy.reference == "float64"
    assert (evaluator.references.plan.way, evaluator.references.plan.copies) == (way, copies)
    others_leave(monkeypatch, lambda: 80 * GIB)
    assert evaluator.answer(checked(evaluator)).ok and evaluator.references.plan.way == "device"


def test_memory_that_others_hold_is_waited_for(evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    large(evaluator)
    left = iter([10, 10, 10])
    others_leave(monkeypatch, lambda: next(left, 80) * GIB)
    found = evaluator.answer(checked(evaluator))
    assert found.ok and found.seconds["wait"] >= 3 * gpu_evaluator.LOOK_EVERY_S
    assert evaluator.references.plan.way == "device"


def test_nobody_waits_for_ever(evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_evaluator, "MEMORY_WAIT_S", 0.6)
    large(evaluator)
    others_leave(monkeypatch, lambda: 10 * GIB)
    found = evaluator.answer(checked(evaluator))
    assert found.ok and 0.6 <= found.seconds["wait"] < 30
    assert found.accuracy is not None and found.accuracy.reference == "float64", "what others hold weakens nothing"


def test_a_plan_is_tried_again_where_others_took_the_memory_meanwhile(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    large(evaluator)
    made, free = evaluator.references.make, [80, 10, 10]
    others_leave(monkeypatch, lambda: (free.pop(0) if free else 80) * GIB)

    def short(draw: object) -> object:
        if free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(draw)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluator.references, "make", short)
    found = evaluator.answer(checked(evaluator))
    assert found.ok and evaluator.references.plan.way == "device" and found.seconds["wait"] > 0


def test_free_memory_is_what_nobody_holds_and_what_this_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    assert memory_plan.free_bytes(torch.device("cuda", 0)) == 35 * GIB
    assert memory_plan.free_bytes(torch.device("cpu")) is None
