"""Checks a program without a GPU: its kernels run in Triton's interpreter at a reduced size.

Deals in the reduced specification, the program printed again for it, and a verdict by the same rule as on a GPU
(`qimeng.envs.judge.verdicts`). Knows nothing about compiling or timing. The interpreter cannot show, so these stay
unchecked: races, reads out of bounds, the truncated accumulators of tensor cores, masks that only the full size has.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from qimeng.backend.facts import KernelFacts
from qimeng.backend.registry import backend_named
from qimeng.envs.estimate.interpreter import ENVIRONMENT, LACKS
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.trials import Trial
from qimeng.envs.judge.verdicts import Judge, Verdict
from qimeng.envs.sandbox import DEFAULT
from qimeng.envs.screening.origin import foreign, known
from qimeng.envs.workers.forkserver import START_S, ForkServer, Process, WorkerFailed
from qimeng.envs.workers.shared_server import shared_server
from qimeng.envs.workers.worker_setup import Setup
from qimeng.errors import CoderError
from qimeng.graph.capture import CaptureError
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.ops import TF32
from qimeng.interfaces import Coder, Reprints
from qimeng.program.program import Program, torch_implementation
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.spec.dispatch import DispatchMode
from qimeng.spec.modes import precision

PRELOAD = ("torch", "qimeng.envs.workers.worker", "qimeng.envs.estimate.interpreter:ready")
"""What the fork server imports. Its Triton is one that interprets, so that it serves no other process."""

CALL_SECONDS = 30.0
"""Seconds after which a call counts as hung."""

TRIALS = 3
"""Draws of inputs and parameters that a program must pass: two, and more where that takes no longer than
`CHECK_SECONDS`."""

CHECK_SECONDS = 3.0
"""Once a check has taken this long no further trial is started."""

FINAL_SECONDS = 60.0
"""The same for a final verification, which tries every distribution."""

MOST_ELEMENTS, MOST_BLOCKS = 1 << 20, 2000
"""Largest tensor and grid of a program that is interpreted at full size, where there is no smaller version of it."""


@dataclass(frozen=True)
class Checked:
    """What the interpreter says about a program.

    Attributes:
        verdict: of the judge; None where the program was not checked.
        note: how it was checked, or why it was not, in words.
        unchecked: why it, or some of its kernels, were not checked; empty where all were.
    """

    verdict: Verdict | None
    note: str
    unchecked: str = ""

    @classmethod
    def no(cls, reason: str) -> Checked:
        """Not checked, and why."""
        return cls(None, f"not checked: {reason}", reason)


class Interpreter:
    """Checks programs for one specification.

    Args:
        spec: what is computed.
        coder: prints programs for the reduced size, where it can (`Reprints`).
        trials: draws of inputs and parameters that a program must pass.
        call_s: seconds that a call may take.
        sandbox: level of the processes' sandbox; see `ForkServer.start`.

    Attributes:
        layers: of the sandbox, that the last process was in.
    """

    def __init__(
        self,
        spec: KernelSpec,
        coder: Coder | None = None,
        trials: int = TRIALS,
        call_s: float = CALL_SECONDS,
        sandbox: str = DEFAULT,
    ):
        self._sandbox = sandbox
        self.layers: tuple[str, ...] = ()
        self.spec, self._coder, self._trials, self._call_s = spec, coder, trials, call_s
        self._full: _Stage | None = None

    def start(self) -> ForkServer:
        """Start the fork server, so that its imports run while something else does."""
        return shared_server(PRELOAD)

    def check(self, program: Program, kernels: Sequence[KernelFacts] = (), thorough: bool = False) -> Checked:
        """Run `program` on the CPU, in a fresh process, and hold it against the reference.

        Args:
            program: for the full size.
            kernels: its compiled kernels, whose grids say whether the full size can be interpreted.
            thorough: whether every distribution is tried, and inputs that it was not made for, as a final verification
                does.
        """
        if program.fallback:
            return Checked(None, "the program is the reference itself")
        checkable, left_out = _on_an_interpreter(program)
        if left_out:
            return self._without(checkable, left_out, kernels, thorough)
        stage = self._reduced
        try:
            smaller = program if stage.spec is self.spec else self._reprinted(program)
        except (CoderError, CaptureError) as error:
            return self._at_full_size(program, kernels, str(error), thorough)
        if smaller is program:
            return self._at_full_size(program, kernels, "the computation has no smaller version", thorough)
        if stage.largest > MOST_ELEMENTS:
            return Checked.no(f"the smallest version has tensors of {stage.largest} elements")
        lost = _generated(program) - _generated(smaller)
        missing = (
            f"{lost} of {_generated(program)} kernels cannot be printed at that size and were not checked"
            if lost > 0
            else ""
        )
        found = self._run(stage, smaller, f"checked {stage.remark}", thorough)
        if not missing or found.unchecked:
            return found
        return replace(found, note=f"{found.note}; {missing}", unchecked=missing)

    # -- parts

    def _without(
        self, program: Program, left_out: Sequence[str], kernels: Sequence[KernelFacts], thorough: bool
    ) -> Checked:
        """The check of `program`, in which PyTorch stands for the kernels of languages without an interpreter."""
        every = _generated(program) + len(left_out)
        languages = " and ".join(sorted(set(left_out)))
        missing = f"{len(left_out)} of {every} kernels are {languages}, which runs on a GPU only: they were not checked"
        if not _generated(program):
            return Checked.no(missing)
        found = self.check(program, kernels, thorough)
        if found.verdict is not None and not found.verdict.ok:
            return found
        return replace(
            found, note=f"{found.note}; {missing}", unchecked="; ".join(filter(None, (found.unchecked, missing)))
        )

    @cached_property
    def _reduced(self) -> _Stage:
        small = self.spec.reduced()
        remark = "at full size" if small is self.spec else "at reduced size"
        return _Stage(small, remark)

    def _reprinted(self, program: Program) -> Program:
        for region in program.regions:
            implementation = program.implementation(region)
            if not known(region, implementation):  # whatever schedule it claims: its own text is to be checked
                raise CoderError(f"region {region.label()} was not printed from a schedule")
        if isinstance(self._coder, Reprints):
            return self._coder.reprint(program, self._reduced.graph)
        if _generated(program) or program.rewrites:
            raise CoderError("the coder does not print programs for other sizes")
        return Program.start(self._reduced.graph)

    def _at_full_size(self, program: Program, kernels: Sequence[KernelFacts], reason: str, thorough: bool) -> Checked:
        largest = largest_tensor(program.graph)
        blocks = max((k.blocks for k in kernels), default=0)
        written = [i for i in foreign(program) if i.generated]
        if self.spec.dtype == "bfloat16" and written:  # printed kernels compute in fp32, these may not
            return Checked.no(f"{reason}, and the interpreter's bf16 arithmetic is wrong")
        if largest > MOST_ELEMENTS or blocks > MOST_BLOCKS:
            return Checked.no(
                f"{reason}, and the full size ({largest} elements a tensor, {blocks} blocks a grid) is "
                f"too large for the interpreter (at most {MOST_ELEMENTS} and {MOST_BLOCKS})",
            )
        if self._full is None:
            self._full = self._reduced if self._reduced.spec is self.spec else _Stage(self.spec, "at full size")
        return self._run(self._full, program, f"checked {self._full.remark}", thorough)

    def _run(self, stage: _Stage, program: Program, note: str, thorough: bool) -> Checked:
        judge = Judge(stage.references, lambda: self._call_s)
        worker: Process | None = None
        try:
            worker = self.start().start(
                "qimeng.envs.estimate.interpreter:main", stage.setup, environment=ENVIRONMENT, sandbox=self._sandbox
            )
            self.layers = tuple(worker.call("ready", START_S)[0]["sandbox"])
            worker.call("load", self._call_s, source=program.source)
            left: list[str] = []
            trials = self._every(stage.references, left) if thorough else self._drawn(stage.references)
            verdict = judge.check(worker, trials)
            if thorough and verdict.ok:
                verdict = replace(judge.check_guards(worker), accuracy=verdict.accuracy, notes=verdict.notes)
            note += " in Triton's interpreter"
            note += f"; no time for the distributions {', '.join(left)}" if left else ""
            return Checked(verdict, note)
        except WorkerFailed as failed:
            if failed.kind == "error" and any(words in str(failed) for words in LACKS):
                return Checked.no(f"Triton's interpreter lacks an operation that it uses ({str(failed)[:200]})")
            return Checked(Verdict(failure=failed.kind, error=str(failed)), f"{note} in Triton's interpreter")
        finally:
            if worker is not None:
                worker.kill()

    def _drawn(self, references: References) -> Iterable[Trial]:
        """Trials while there is time, at least two: the user's own values, and others with changed parameters."""
        began = time.monotonic()
        for number, trial in enumerate(references.trials(self._trials)):
            if number > 1 and (time.monotonic() - began) * (1 + 1 / number) > CHECK_SECONDS:
                return
            yield trial

    def _every(self, references: References, left: list[str]) -> Iterable[Trial]:
        """One trial for each distribution at least; names of those there was no time for are put into `left`."""
        began, tried = time.monotonic(), set[str]()
        for trial in references.every_distribution():
            tried.add(trial.draw.distribution)
            yield trial
            if time.monotonic() - began > FINAL_SECONDS:
                left += [d for d in references.distributions if d not in tried | references.dropped]
                return


class _Stage:
    """A specification at the size at which programs are checked, with its references.

    Args:
        spec: the specification.
        remark: how it differs from the one that is optimized, in words.
    """

    def __init__(self, spec: KernelSpec, remark: str):
        self.spec, self.remark = spec, remark

    @cached_property
    def graph(self) -> OpGraph:
        return capture_spec(self.spec, verify=False)

    @property
    def largest(self) -> int:
        return largest_tensor(self.graph)

    @cached_property
    def references(self) -> References:
        return References(self.spec, self.graph, torch.device("cpu"), arithmetic=gpu_arithmetic)

    @cached_property
    def setup(self) -> Setup:
        return Setup(self.spec.to_bytes(), self.spec.mode, "cpu")


@contextmanager
def gpu_arithmetic(mode: str) -> Iterator[None]:
    """Eager on the CPU with a GPU's precision: TF32 operands for the products that run in TF32 there in this mode."""
    with precision(mode), _RoundsOperands(TF32[mode]):
        yield


class _RoundsOperands(DispatchMode):
    def __init__(self, packets: frozenset[str]):
        super().__init__()
        self._packets = packets

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket).replace("aten.convolution_overrideable", "aten.convolution") in self._packets:
            args = tuple(round_to_tf32(a) if isinstance(a, torch.Tensor) else a for a in args)
        return func(*args, **(kwargs or {}))


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """`x` rounded to the nearest value with 10 bits of significand; other dtypes than float32 stay as they are."""
    if x.dtype is not torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isfinite(), ((bits + 0x1000) & -0x2000).view(torch.float32), x)


def largest_tensor(graph: OpGraph) -> int:
    """Elements of the largest tensor of `graph`."""
    return max((m.numel for node in graph.nodes.values() for m in node.metas if m is not None), default=0)


def _on_an_interpreter(program: Program) -> tuple[Program, list[str]]:
    """`program` with PyTorch in place of kernels that nothing here can run, and their languages' titles."""
    titles = []
    for region in program.regions:
        implementation = program.implementation(region)
        if implementation.generated:
            backend = backend_named(implementation.language)
            if not backend.capabilities.interpreter:
                titles.append(backend.title)
                program = program.with_implementation(region.id, torch_implementation(region))
    return program, titles


def _generated(program: Program) -> int:
    return sum(program.implementation(r).generated for r in program.regions)


__all__ = ["PRELOAD", "Checked", "Interpreter", "gpu_arithmetic", "largest_tensor", "round_to_tf32"]
