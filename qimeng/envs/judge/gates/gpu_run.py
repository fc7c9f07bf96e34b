"""One evaluation on a device in this machine: the judge's parts that its gates use, and the worker at hand.

Deals in processes and turns on the device. Knows nothing about what a gate checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from qimeng.envs.judge.baseline import Baseline
from qimeng.envs.judge.device_turns import DeviceTurns
from qimeng.envs.judge.gates.pipeline import Candidate, GateCheck, Refusal, Run
from qimeng.envs.judge.judge_clock import OuterClock
from qimeng.envs.judge.library_compilers import LibraryCompilers
from qimeng.envs.judge.program_times import ProgramTimes
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.throttle import Reader
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.judge.trials import Trial
from qimeng.envs.judge.verdicts import Judge
from qimeng.envs.judge.worker_supply import WorkerSupply
from qimeng.envs.screening.origin import printed
from qimeng.envs.workers.forkserver import Process
from qimeng.envs.workers.stopwatch import Samples
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Gate
from qimeng.library import COMPILE_S

KEEPS_LINES = "evict_last"
"""What stands in a Triton kernel that asks the L2 cache to keep lines."""

TAKEN_OVER_S = 15.0
"""Seconds that the first call may take at least of what was compiled ahead: it is traced once more, and loaded."""

Rounds = Callable[[Process, Clock, bool], tuple[Samples, Samples]]
"""Times a program that a worker has loaded, and eager (`ProgramTimes.search`, `ProgramTimes.final`)."""


@dataclass
class Equipment:
    """What the gates of one evaluator use.

    Attributes:
        graph: of the specification, where it could be captured.
        torch_device: PyTorch's name of the device that programs run on.
        references: the expected results.
        judge: compares outputs with them.
        baselines: the process in which eager runs.
        outer_clock: the judge's own clock.
        times: takes the programs' times.
        workers: the processes that candidates run in.
        libraries: compile what TorchInductor compiles.
        turns: on the device.
        folder: of the evaluator.
        least_ms: what reading the inputs and writing the outputs takes; 0 where it is not known.
        limit: tells how many seconds a command of a worker may take.
        throttle: reads why the GPU is throttled, where that can be told.
        unwatched: why it cannot.
    """

    graph: OpGraph | None
    torch_device: torch.device
    references: References
    judge: Judge
    baselines: Baseline
    outer_clock: OuterClock
    times: ProgramTimes
    workers: WorkerSupply
    libraries: LibraryCompilers
    turns: DeviceTurns
    folder: Path
    least_ms: float
    limit: Callable[[], float]
    throttle: Reader | None = None
    unwatched: str = ""

    @property
    def limit_s(self) -> float:
        """Seconds that a command of a worker may take."""
        return self.limit()


@dataclass(eq=False)
class GpuRun(Run):
    """One evaluation on its way.

    Attributes:
        parts: of the judge.
        cache: Triton's cache folder.
        trials: makes the trials that a whole program has to pass.
        rounds: takes its times.
        economize: makes the judge's own process take less memory; False where it cannot.
        thorough: whether this is a final verification.
        worker: the process at hand.
        library_s: seconds that a library may take to compile what is new.
        files: what was compiled ahead for the candidates, which every worker takes over.
        loaded: the process that the program at hand was loaded into. Gates after that ask it alone: another process
            would run something else.
    """

    parts: Equipment
    cache: str
    trials: Callable[[], Iterable[Trial]]
    rounds: Rounds
    economize: Callable[[], bool] = lambda: False
    thorough: bool = False
    library_s: float = COMPILE_S
    worker: Process | None = None
    loaded: Process | None = None
    files: list[str] = field(default_factory=list)
    _equipped: Process | None = None
    _library_end: float = field(init=False)

    def __post_init__(self) -> None:
        """The seconds of a library begin."""
        super().__post_init__()
        self._library_end = time.monotonic() + self.library_s

    def begin(self) -> None:
        """Take a worker, and start the one after it while this one is checked."""
        self.files = [f for c in self.left for f in self.parts.libraries.files(c.program)]
        with self.clock.part("start"):
            self.worker = self.parts.workers.take(self.may_share)
            if not self.may_share:
                self.parts.workers.prefetch()
            self.parts.baselines.wait()

    def turn_to(self, candidate: Candidate) -> None:
        """The sweep of one template shares a worker; any other alternative gets a new one."""
        if self.patch is not None and not self.is_sweep and len(self.patch.alternatives) > 1:
            self.lost()

    def lost(self) -> None:
        """End the worker; its end is waited for before the next one gets to work."""
        if self.worker is not None:
            self.parts.workers.let_go(self.worker)
            self.worker = None

    def checked(self, gate: GateCheck[Any], candidate: Candidate) -> Refusal | None:
        """The ruling of a gate, again where the judge's own process ran out of memory: what has passed before stays.

        Raises:
            OutOfMemoryError: it cannot take less.
        """
        while True:
            try:
                return super().checked(gate, candidate)
            except torch.OutOfMemoryError as error:
                problem = error.with_traceback(None)  # whose frames hold memory
            if not self.economize():
                raise problem
            if self.loaded is not None and self.loaded.alive:
                self.loaded.call("release", self.parts.limit_s, tidy=True)

    def finish(self, passed: bool) -> None:
        """Keep the worker for the next evaluation where all went well in it, or end it.

        Args:
            passed: whether a candidate passed every gate.
        """
        worker = self.worker
        if passed and self.may_share and not self.has_failed and worker is not None and self.parts.workers.keep(worker):
            self.worker = None
        self.lost()

    def running(self) -> Process:
        """A worker that is ready; a new one where the last one is gone."""
        if self.worker is None or not self.worker.alive:
            with self.clock.part("start"):
                self.worker = self.parts.workers.start(self.cache)
                self.worker.await_ready()
        if self.files and self._equipped is not self.worker:
            self.worker.call("take_over", self.parts.limit_s, files=self.files)
            self._equipped = self.worker
        return self.worker

    def holder(self) -> Process:
        """The worker that holds the program at hand, dead or alive."""
        assert self.loaded is not None
        return self.loaded

    @property
    def library_left_s(self) -> float:
        """Seconds of `library_s` that are left."""
        return max(0.0, self._library_end - time.monotonic())

    @property
    def first_call_s(self) -> float:
        """Seconds that the first call of what a library compiles may take; the device is held meanwhile."""
        return max(min(self.library_left_s, COMPILE_S), TAKEN_OVER_S if self.files else 0.0)

    @cached_property
    def may_share(self) -> bool:
        """Whether a worker may serve this evaluation and others: in a search, of what templates printed."""
        return not self.thorough and all(printed(candidate.program) for candidate in self.candidates)

    @property
    def resets(self) -> bool:
        """Whether a kernel may ask the L2 cache to keep lines, so that they have to be given up (`Effort.resets`)."""
        return not self.may_share or any(KEEPS_LINES in candidate.program.source for candidate in self.candidates)

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong where a worker ran it."""
        refusals = (c.refusal for c in self.candidates)
        return any(r.gate not in (Gate.COMPILE, Gate.RESOURCES) for r in refusals if r is not None)


__all__ = ["Equipment", "GpuRun", "Rounds"]
