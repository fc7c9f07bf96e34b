"""One evaluation through a list of gates: which candidate goes on, and what is said where none does.

Deals in candidates, gates in order, and refusals. Every judge of programs uses this; they differ only in their lists
(`qimeng.envs.judge.gpu_gates`, `qimeng.envs.estimate.estimate_gates`). Knows nothing about how a gate finds out what it
says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from qimeng.backend.compiled import Compiled
from qimeng.backend.facts import KernelFacts
from qimeng.device import Device
from qimeng.envs.judge.ranking import preferred
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.judge.verdicts import Verdict
from qimeng.envs.screening.origin import is_sweep
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.interfaces import LASTING, Accuracy, Evaluation, Gate, Patch, Resources
from qimeng.program.program import Program


@dataclass(frozen=True)
class Refusal:
    """Why a candidate does not go on.

    Attributes:
        gate: where it was refused.
        failure: class of the failure (`Evaluation.failure`).
        error: why, in words.
        accuracy: its errors, where they were measured.
        notes: further remarks.
    """

    gate: Gate
    failure: str
    error: str
    accuracy: Accuracy | None = None
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class Candidate:
    """One program on its way: the program that was sent, or one alternative of a patch.

    Attributes:
        number: of the alternative.
        program: with the patch applied.
        compiled: signature of each region with a generated kernel to what came of compiling it.
        resources: what its kernels need; None before they are compiled, or where there are none.
        own: names of its own kernels (`qimeng.envs.workers.kernel_launches.own_kernels`).
        overlapping: kernels that a bug of the assembler may affect (`qimeng.backend.facts.overlapping_reads`).
        ms: milliseconds of the patch's region alone, or of the program by a model; None where not known.
        region_ms: region id to milliseconds, by a model.
        verdict: what comparing its outputs found.
        refusal: why it does not go on; None as long as it does.
        found: its evaluation, once it was timed.
    """

    number: int
    program: Program
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    resources: Resources | None = None
    own: Mapping[str, int | None] = field(default_factory=dict)
    overlapping: Sequence[str] = ()
    ms: float | None = None
    region_ms: Mapping[str, float] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    refusal: Refusal | None = None
    found: Evaluation | None = None

    @property
    def kernels(self) -> list[KernelFacts]:
        """Every compiled kernel."""
        return [kernel for found in self.compiled.values() for kernel in found.kernels]

    def evaluation(self) -> Evaluation:
        """What is known of it once it has passed every gate; without times where no gate took any."""
        if self.found is not None:
            return self.found
        accuracy, notes = self.verdict.accuracy, self.verdict.notes
        return Evaluation(Gate.PASSED, chosen=self.number, accuracy=accuracy, resources=self.resources, notes=notes)


@dataclass(eq=False)
class Run:
    """One evaluation on its way.

    Attributes:
        program: what is judged.
        patch: applied to it; None for the program as it is.
        compilers: compile what is generated.
        device: the device that kernels are made for.
        sandbox: level of the sandbox that candidates run in.
        any_text: whether untrusted texts may use forbidden constructs.
        clock: time spent by part.
        candidates: the program, or one for each alternative of the patch.
    """

    program: Program
    patch: Patch | None
    compilers: Compilers
    device: Device
    sandbox: str
    any_text: bool
    clock: Clock
    candidates: list[Candidate] = field(init=False)

    def __post_init__(self) -> None:
        """Apply the patch, once for each alternative."""
        count = max(1, len(self.patch.alternatives)) if self.patch is not None else 1
        programs = [self.patch.apply(self.program, i) if self.patch is not None else self.program for i in range(count)]
        self.candidates = [Candidate(i, program) for i, program in enumerate(programs)]

    @property
    def left(self) -> list[Candidate]:
        """The candidates that were not refused."""
        return [c for c in self.candidates if c.refusal is None]

    @cached_property
    def is_sweep(self) -> bool:
        """Whether all alternatives may meet one worker: templates and PyTorch wrote them."""
        return self.patch is not None and is_sweep(self.candidates[0].program, self.patch)

    def begin(self) -> None:
        """Get what running the candidates needs; called once some have passed the screening."""

    def turn_to(self, candidate: Candidate) -> None:
        """Called before something is run of `candidate`."""

    def lost(self) -> None:
        """Called when the process that ran a candidate has failed."""

    def checked(self, gate: GateCheck[Any], candidate: Candidate) -> Refusal | None:
        """The ruling of a gate for whole programs."""
        return gate.check(self, candidate)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why candidates were refused, a line each."""
        refusals = [(c.number, c.refusal) for c in self.candidates if c.refusal is not None]
        return tuple(f"alternative {number}, gate {r.gate.value}: {r.error}" for number, r in refusals)

    def refusal(self) -> Evaluation:
        """The evaluation where nothing passed: the refusal of what came farthest.

        If an accident may have stopped a candidate, that is reported, since the question is then open.
        """
        order = list(Gate)
        refused = [(c, c.refusal) for c in self.candidates if c.refusal is not None]
        candidate, worst = max(
            refused, key=lambda pair: (pair[1].failure not in LASTING, order.index(pair[1].gate), -pair[0].number)
        )
        more = f" ({len(refused)} alternatives were refused)" if len(refused) > 1 else ""
        return Evaluation(
            worst.gate,
            worst.error + more,
            worst.failure,
            chosen=candidate.number,
            accuracy=worst.accuracy,
            resources=candidate.resources,
            notes=worst.notes,
        )


R = TypeVar("R", bound=Run, contravariant=True)


class GateCheck(ABC, Generic[R]):
    """One gate.

    Attributes:
        name: what it is called in lists.
        gate: what an evaluation says that was refused here, or whose process failed here.
    """

    name: str
    gate: Gate

    def prepare(self, run: R, candidates: Sequence[Candidate]) -> None:
        """Do at once what is done for all `candidates`, before each is checked."""

    @abstractmethod
    def check(self, run: R, candidate: Candidate) -> Refusal | None:
        """Why `candidate` does not go on, or None.

        Raises:
            WorkerFailed: the process that ran it failed.
        """


class Contest(ABC, Generic[R]):
    """Orders the candidates that passed the screening, so that as few as possible are checked and timed as a whole.

    Attributes:
        name: what it is called in lists.
    """

    name: str

    @abstractmethod
    def rank(self, run: R, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates that go on, the most promising first; those that do not have a refusal."""

    def is_close(self, candidate: Candidate, before: Sequence[Candidate]) -> bool:
        """Whether `candidate` is to be judged as a whole although one of those `before` it is right."""
        return False


@dataclass(frozen=True)
class Pipeline(Generic[R]):
    """A judge's gates in order.

    Attributes:
        screening: gates that every candidate meets before anything runs.
        contest: orders those that are left.
        whole: gates that candidates meet one at a time, in that order, until one has passed them all and none that is
            left comes close to it.
    """

    screening: tuple[GateCheck[R], ...]
    contest: Contest[R]
    whole: tuple[GateCheck[R], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What each gate is called, in order."""
        screening, whole = (tuple(gate.name for gate in gates) for gates in (self.screening, self.whole))
        return (*screening, self.contest.name, *whole)

    def judge(self, run: R) -> Evaluation:
        """The evaluation of the best candidate of `run` that passes every gate, or what refused them."""
        with run.clock.part("compile"):
            for gate in self.screening:
                gate.prepare(run, run.left)
                for candidate in run.left:
                    candidate.refusal = gate.check(run, candidate)
        if not run.left:
            return run.refusal()
        run.begin()
        order = self.contest.rank(run, run.left)
        best: Evaluation | None = None
        for place, candidate in enumerate(order):
            if best is not None and not self.contest.is_close(candidate, order[:place]):
                break
            run.turn_to(candidate)
            candidate.refusal = self._refused(run, candidate)
            if candidate.refusal is None:
                found = candidate.evaluation()
                best = found if best is None or preferred(found, best) else best
        return run.refusal() if best is None else replace(best, refused=run.refused)

    def _refused(self, run: R, candidate: Candidate) -> Refusal | None:
        """Why `candidate` does not pass the gates for whole programs; None where it does."""
        for gate in self.whole:
            try:
                refusal = run.checked(gate, candidate)
            except WorkerFailed as failed:
                run.lost()
                refusal = Refusal(gate.gate, failed.kind, str(failed))
            if refusal is not None:
                return refusal
        return None


__all__ = ["Candidate", "Contest", "GateCheck", "Pipeline", "Refusal", "Run"]
