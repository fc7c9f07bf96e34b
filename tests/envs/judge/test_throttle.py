"""A GPU that is held back is noticed, timed again, and said where that does not help."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from qimeng.device_lock import DeviceLock
from qimeng.envs.judge import throttle
from qimeng.envs.judge.gates import timing
from qimeng.envs.judge.gates.pipeline import Refusal
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.judge_clock import NOT_TIMED
from qimeng.envs.judge.throttle import POWER_CAP, Watch, reader_for
from qimeng.interfaces import Asked, Gate
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


def test_a_watch_sees_what_was_set_in_any_reading():
    asked = threading.Event()
    readings = iter([0x1, 0x40])

    def read() -> int:
        bits = next(readings, 0)
        if not bits:
            asked.set()
        return bits

    with Watch(read, period_s=0.001) as watch:
        assert asked.wait(60)
    assert watch.seen == 0x41 and watch.slowed == "heat (hardware)"
    with Watch(None) as watch:
        pass
    assert watch.seen == 0 and watch.slowed == ""


def test_a_driver_that_takes_long_to_answer_delays_no_measurement():
    answered = threading.Event()

    def read() -> int:
        answered.wait(60)
        return 0x40

    before = time.monotonic()
    with Watch(read):
        pass
    took = time.monotonic() - before
    answered.set()
    assert took < 30


class Library:
    """Stands for libnvidia-ml.so.1."""

    def __init__(self, found: int = 0):
        self.found = found

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:  # noqa: N802
        assert uuid == b"GPU-1234"
        return self.found

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object, bits: object) -> int:  # noqa: N802
        ctypes.cast(bits, ctypes.POINTER(ctypes.c_ulonglong))[0] = 0x24
        return 0


def test_reasons_are_read_from_nvml_under_its_old_name_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(throttle.ctypes, "CDLL", lambda name: Library())
    read = reader_for(torch.device("cuda", 0))
    assert callable(read) and read() == 0x24
    monkeypatch.setattr(throttle.ctypes, "CDLL", lambda name: Library(found=6))
    assert reader_for(torch.device("cuda", 0)) == "NVML answers with error 6"
    monkeypatch.setattr(throttle.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert reader_for(torch.device("cuda", 0)) == "an NVML or PyTorch that is too old"

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(throttle.ctypes, "CDLL", missing)
    assert reader_for(torch.device("cuda", 0)) == "no NVML"


@pytest.mark.parametrize(
    ("bits", "rounds", "words"),
    [
        ([0x40, 0], 2, None),
        ([0x40, 0x40, 0x08], 3, "throttled in every measurement: hardware slowdown"),
        ([POWER_CAP], 1, "reached its power limit"),
    ],
)
def test_what_was_timed_while_the_gpu_was_held_back_is_timed_again(bits, rounds, words, monkeypatch):
    monkeypatch.setattr(timing, "COOL_S", 0.0)
    spec = KernelSpec.from_function(torch.relu, (torch.randn(8, 8),))
    graph = capture_spec(spec)
    timed: list[int] = []
    judge = GpuEvaluator(spec, graph, torch_device="cpu", throttle=lambda: bits[len(timed) - 1] if timed else 0)
    plain = judge.times.search

    def counted(worker, clock, resets):
        timed.append(1)
        return plain(worker, clock, resets)

    monkeypatch.setattr(judge.times, "search", counted)
    try:
        found = judge.evaluate(Program.start(graph))
    finally:
        judge.close()
    assert found.ok and len(timed) == rounds, found.error
    assert len(found.notes) == (words is not None) and (words is None or words in found.notes[0])


@pytest.mark.parametrize("asked", [Asked.TIMING, Asked.FINAL], ids=["search", "final"])
def test_only_a_final_verification_waits_for_a_busy_machine(evaluator, monkeypatch, asked, tmp_path):
    """Others may measure meanwhile."""
    evaluator.turns.lock, other = DeviceLock(str(tmp_path / "lock")), DeviceLock(str(tmp_path / "lock"))
    held = list[bool]()
    monkeypatch.setattr(timing, "time", SimpleNamespace(sleep=lambda seconds: held.append(other.wanted)))
    busy = [Refusal(Gate.TIMING, NOT_TIMED, "not timed: PyTorch is slower than before")] * (timing.CLOCK_ROUNDS + 1)
    monkeypatch.setattr(timing, "_implausible", lambda *a: busy.pop() if busy else None)
    found = evaluator.evaluate(Program.start(evaluator.graph), asked=asked)
    assert found.ok is (asked is Asked.FINAL) and bool(busy) is not found.ok
    assert bool(held) is found.ok and not any(held)
    other.close()
