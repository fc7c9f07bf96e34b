"""Takes the times of a program beside PyTorch's: in a search, or in turns with every baseline in a final verification.

Deals in rounds of timing, and in which inputs the timed calls had. Knows nothing about whether times are believed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qimeng.envs.judge.baseline import EAGER, Baseline
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.judge.torch_compile import TorchCompile, compiled_name
from qimeng.envs.judge.verdicts import Judge, Verdict
from qimeng.envs.workers.forkserver import Process, WorkerFailed
from qimeng.envs.workers.sampled_output import call_seed
from qimeng.envs.workers.stopwatch import Effort, Samples, is_behind
from qimeng.envs.workers.worker_reports import samples_of
from qimeng.envs.workers.worker_setup import Draw
from qimeng.interfaces import Timing

SEARCH = Effort(min_ms=10.0, min_calls=5, limit_s=0.2, warmup=2, error=0.004)
"""Effort of one round of timing a program during a search."""
SEARCH_EAGER = Effort(min_ms=3.0, min_calls=5, limit_s=0.15, warmup=2, error=0.004, resets=False)
"""The same of eager."""
SEARCH_ROUNDS = 2
"""Each round gets other memory from the driver, which is most of the noise where memory binds. Eager is timed once for
each program: its earlier rounds are as good."""
BEHIND = 1.5
"""Times as long as PyTorch, or as the fastest program so far, from which on a program is clearly behind: it gets one
round of few calls, since it can be neither the best nor returned."""
FINAL = Effort(min_ms=3.0, min_calls=5, limit_s=0.15, warmup=2)
"""Effort of one round of the final timing; candidate and baselines take turns."""
FINAL_ROUNDS, FEWEST, FINAL_S = 5, 3, 6.0
"""Rounds of the final timing; after so many seconds and the fewest rounds, no other is begun. A call with thousands of
kernels needs seconds a round."""


class ProgramTimes:
    """Times programs for one specification.

    Args:
        references: makes seeds, and knows which buffers a call updates.
        judge: checks what a timed call returned.
        baselines: the process in which eager runs.
        compiled: torch.compile's programs.
        limit: tells how many seconds a command may take.

    Attributes:
        turns: times of the last final verification: ``"candidate"``, ``"eager"`` and torch.compile's modes, in turns.
            Where turns were repeated, because the machine was busy, a baseline's shortest.
    """

    def __init__(
        self,
        references: References,
        judge: Judge,
        baselines: Baseline,
        compiled: TorchCompile,
        limit: Callable[[], float],
    ):
        self._references, self._judge, self._baselines = references, judge, baselines
        self._compiled, self._limit = compiled, limit
        self._eager: deque[Samples] = deque(maxlen=SEARCH_ROUNDS)
        self._calls = _TimedCalls()
        self._fastest_ms = math.inf
        self._ends_early = references.device.type == "cuda"  # a CPU's times are too unsteady for it
        self.turns: dict[str, Timing] = {}

    def begin(self) -> None:
        """Start timing a program that a worker has just loaded, with new secret parameters."""
        self._calls = _TimedCalls(self._references.timed_parameter_seed())
        self.turns = {}

    def search(self, worker: Process, clock: Clock, resets: bool) -> tuple[Samples, Samples]:
        """Times of the program that `worker` has loaded, and of eager, as a search takes them.

        Args:
            worker: with the program loaded.
            clock: of the evaluation.
            resets: whether cache lines that a kernel may keep have to be given up (`Effort.resets`).
        """
        found: dict[str, Samples] = {}
        for number in range(SEARCH_ROUNDS):
            if number == 0 or len(self._eager) < SEARCH_ROUNDS:
                with worker.paused():
                    self._eager.append(self._baselines.time(SEARCH_EAGER))
            behind_ms = BEHIND * min(self._fastest_ms, *(s.timing().device_ms for s in self._eager))
            effort = replace(SEARCH, resets=resets, behind_ms=behind_ms if self._ends_early else 0.0)
            samples = self._time(worker, effort)
            _add(found, "candidate", samples)
            if is_behind(samples.device_ms, effort):
                break
        for samples in self._eager:
            _add(found, EAGER, samples)
        return found["candidate"], found[EAGER]

    def final(self, worker: Process, clock: Clock, resets: bool) -> tuple[Samples, Samples]:
        """The same in turns with every baseline, as a final verification takes them."""
        found: dict[str, Samples] = {}
        end = time.monotonic() + FINAL_S
        for number in range(FINAL_ROUNDS):
            if number >= FEWEST and time.monotonic() > end:
                break
            with worker.paused():
                _add(found, EAGER, self._baselines.time(FINAL))
                with clock.part("baselines"):
                    self._time_compiled(found)
            _add(found, "candidate", self._time(worker, FINAL))
        now = {name: samples.timing() for name, samples in found.items()}
        shorter = {n: min(now.get(n, t), t, key=lambda timing: timing.device_ms) for n, t in self.turns.items()}
        self.turns = {**now, **shorter, "candidate": now["candidate"]}
        return found["candidate"], found[EAGER]

    def believe(self, timing: Timing) -> None:
        """Hold later programs against this time as well, which passed every check."""
        self._fastest_ms = min(self._fastest_ms, timing.device_ms)

    def check_timed(self, worker: Process) -> Verdict:
        """Whether the output of a timed call of the program is right; the program is still loaded."""
        return self._judge.check_timed(worker, self._calls.draw) if self._calls.rounds else Verdict()

    def forget_eager(self) -> None:
        """Drop eager's times, because the GPU was throttled during their measurement."""
        self._eager.clear()

    def _time_compiled(self, found: dict[str, Samples]) -> None:
        """Time each mode of torch.compile once; one that fails is given up."""
        for mode in tuple(self._compiled.ready):
            try:
                _add(found, compiled_name(mode), self._compiled.time(mode, FINAL))
            except WorkerFailed as failed:
                self._compiled.give_up(mode, str(failed))
                found.pop(compiled_name(mode), None)

    def _time(self, worker: Process, effort: Effort) -> Samples:
        seed = self._references.draw_seed()
        data, _ = worker.call(
            "time",
            self._limit(),
            seed=seed,
            effort=effort,
            parameter_seed=self._calls.parameter_seed,
            mutated=self._references.mutated,
        )
        samples = samples_of(data)
        self._calls.rounds.append((seed, effort.most_calls))
        return samples


@dataclass
class _TimedCalls:
    """Which inputs the timed calls of a program had.

    Attributes:
        parameter_seed: of the change to the parameters.
        rounds: seed and most calls, warm-up included, of each measurement so far.
    """

    parameter_seed: int | None = None
    rounds: list[tuple[int, int]] = field(default_factory=list)

    def draw(self, number: int, call: int) -> Draw:
        """Inputs and parameters of a call in measurement `number`; a ValueError for one that there was not."""
        if not 0 <= number < len(self.rounds) or not 0 <= call < self.rounds[number][1]:
            raise ValueError(f"call {call} of round {number}")
        return Draw(call_seed(self.rounds[number][0], call), "given", self.parameter_seed)


def _add(table: dict[str, Samples], name: str, samples: Samples) -> None:
    table[name] = table[name] + samples if name in table else samples


__all__ = ["BEHIND", "FINAL", "FINAL_ROUNDS", "SEARCH", "SEARCH_ROUNDS", "ProgramTimes"]
