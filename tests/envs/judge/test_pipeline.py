"""The gate pipeline: one driver and one screening for both judges, which differ only in their lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from qimeng.backend.compiled import Compiled
from qimeng.backend.facts import KernelFacts
from qimeng.device import DEVICES
from qimeng.envs.estimate.estimate_gates import ESTIMATE_GATES
from qimeng.envs.judge.gates.pipeline import Candidate, Contest, GateCheck, Pipeline, Refusal, Run
from qimeng.envs.judge.gates.screening import ALLOWED_TEXT, LAUNCHES_KERNELS, Compiles, FitsDevice
from qimeng.envs.judge.gpu_gates import CHECK_GATES, FINAL_GATES, SEARCH_GATES
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.interfaces import Evaluation, Gate, Patch, Timing
from qimeng.program.program import Program
from qimeng.testing import FakeClock, fake_kernel, sample_graph


def test_both_judges_run_one_pipeline_and_begin_with_the_same_gates() -> None:
    lists = (CHECK_GATES, SEARCH_GATES, FINAL_GATES, ESTIMATE_GATES)
    assert all(type(gates) is Pipeline for gates in lists)
    for gates in lists:
        first, compiles, launches, fits = gates.screening[:4]
        assert first is ALLOWED_TEXT and launches is LAUNCHES_KERNELS
        assert type(compiles) is Compiles and type(fits) is FitsDevice
    screening = ("allowed text", "compiles", "launches kernels", "fits the device")
    timed = ("credible time", "right when timed", "own kernels")
    assert CHECK_GATES.names == (*screening, "library code", "region", "right outputs")
    assert SEARCH_GATES.names == (*CHECK_GATES.names, *timed)
    assert FINAL_GATES.names == (*CHECK_GATES.names, "guards and repeated calls", *timed)
    assert ESTIMATE_GATES.names == (*screening, "model times", "right when interpreted")


class Says(GateCheck[Run]):
    """Refuses the alternatives that it is told to; loses the worker at others."""

    def __init__(self, gate: Gate, refuses: dict[int, str] | None = None, loses: Sequence[int] = ()):
        self.name, self.gate, self.refuses, self.loses = gate.value, gate, refuses or {}, loses
        self.asked: list[int] = []

    def check(self, run: Run, candidate: Candidate) -> Refusal | None:
        self.asked.append(candidate.number)
        if candidate.number in self.loses:
            raise WorkerFailed("crash", "killed by signal 11")
        failure = self.refuses.get(candidate.number)
        return Refusal(self.gate, failure, f"alternative {candidate.number}") if failure else None


class Times(Says):
    """Alternative n takes n ms more than 1."""

    def check(self, run: Run, candidate: Candidate) -> Refusal | None:
        candidate.found = Evaluation(Gate.PASSED, timing=Timing(1.0 + candidate.number), chosen=candidate.number)
        return super().check(run, candidate)


class Reversed(Contest[Run]):
    """The last alternative is the most promising one, the next `close` come close."""

    name = "reversed"

    def __init__(self, close: int = 0):
        self.close = close

    def rank(self, run: Run, candidates: list[Candidate]) -> list[Candidate]:
        return candidates[::-1]

    def is_close(self, candidate: Candidate, before: Sequence[Candidate]) -> bool:
        return len(before) <= self.close


def run_of(count: int) -> Run:
    program = Program.start(sample_graph())
    region = program.regions[1]
    patch = Patch(None, region.id, tuple(fake_kernel(region, None, n) for n in range(count)))
    compilers: Any = None
    return Run(program, patch, compilers, DEVICES["h200"], "off", True, Clock(FakeClock()))


def test_the_first_candidate_that_passes_every_gate_is_kept() -> None:
    screen, right, times = Says(Gate.COMPILE, {3: "compile"}), Says(Gate.PROGRAM, {2: "wrong"}), Times(Gate.TIMING)
    found = Pipeline((screen,), Reversed(), (right, times)).judge(run_of(4))
    assert found.ok and found.chosen == 1
    assert (screen.asked, right.asked, times.asked) == ([0, 1, 2, 3], [2, 1], [1])


def test_one_that_comes_close_is_judged_as_well_and_the_faster_is_kept() -> None:
    times = Times(Gate.TIMING)
    found = Pipeline((), Reversed(close=1), (times,)).judge(run_of(4))
    assert (found.chosen, times.asked) == (2, [3, 2])


def test_what_came_farthest_is_reported_and_an_accident_before_all() -> None:
    refusing = Says(Gate.PROGRAM, {0: "wrong", 1: "wrong"})
    found = Pipeline((Says(Gate.COMPILE, {2: "compile"}),), Reversed(), (refusing,)).judge(run_of(3))
    assert (found.gate, found.failure, found.chosen) == (Gate.PROGRAM, "wrong", 0)
    assert found.error == "alternative 0 (3 alternatives were refused)"
    lost = Says(Gate.TIMING, {0: "wrong"}, loses=(1,))
    run, ended = run_of(2), []
    run.lost = lambda: ended.append(1)  # type: ignore[method-assign]
    found = Pipeline((), Reversed(), (lost,)).judge(run)
    assert (found.gate, found.failure, found.chosen, ended) == (Gate.TIMING, "crash", 1, [1]) and not found.lasting


def test_nothing_is_run_where_the_screening_refuses_all() -> None:
    run, begun = run_of(2), []
    run.begin = lambda: begun.append(1)  # type: ignore[method-assign]
    found = Pipeline((Says(Gate.COMPILE, {0: "forbidden", 1: "compile"}),), Reversed(), (Says(Gate.PROGRAM),)).judge(
        run
    )
    assert (found.gate, found.failure, found.chosen, begun) == (Gate.COMPILE, "forbidden", 0, [])


@pytest.mark.parametrize(("first_launch", "failure"), [(True, None), (False, "unsupported")])
def test_host_code_that_needs_real_tensors_waits_for_the_first_launch_where_there_is_one(first_launch, failure) -> None:
    run = run_of(1)
    run.candidates[0].compiled = {"a": Compiled(error="needs values", failure="meta")}
    found = Compiles(first_launch).check(run, run.candidates[0])
    assert (found.failure if found else None) == failure


def test_only_the_model_minds_spills() -> None:
    run = run_of(1)
    kernel = KernelFacts("k", False, (1, 1, 1), 1, 4, 128, 1, 0, 32, 4096, 0)
    run.candidates[0].compiled = {"a": Compiled((kernel,))}
    assert FitsDevice(few_spills=False).check(run, run.candidates[0]) is None
    found = FitsDevice(few_spills=True).check(run, run.candidates[0])
    assert found is not None and "spills 4096 B" in found.error
