"""The cheap gates, asked before a GPU is: what a text may contain, whether it compiles and launches kernels that fit.

Deals in programs and patches. The gates are those that every judge begins with (`qimeng.envs.judge.gates.screening`).
Nothing is run. Knows nothing about models, inputs or times.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.device import Device
from qimeng.envs.judge.gates.pipeline import Run
from qimeng.envs.judge.gates.screening import ALLOWED_TEXT, LAUNCHES_KERNELS, Compiles, FitsDevice
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.sandbox import DEFAULT
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import Evaluation, Patch
from qimeng.program.program import Program

GATES = (ALLOWED_TEXT, Compiles(first_launch=True), LAUNCHES_KERNELS, FitsDevice(few_spills=False))


COMPILE_S = 30.0
"""Seconds of a compilation. A kernel of usual length takes a few; what a model writes may not end within minutes."""


class Screens:
    """Asks the gates that need no GPU, of many patches together. What takes too long to compile is refused for good.

    Args:
        device: what kernels are compiled for.
        processes: compilations at once; one a core by default.
        sandbox: level of the compiling processes' sandbox.
    """

    def __init__(self, device: Device, processes: int | None = None, sandbox: str = DEFAULT):
        self.device, self.sandbox = device, sandbox
        self._compilers = Compilers(
            shared_server(), device, None, processes, COMPILE_S, sandbox=sandbox, forgiving=False
        )

    def refusals(self, some: Sequence[tuple[Program, Patch]]) -> list[Evaluation | None]:
        """For each program and patch the refusal of the first gate that no alternative passes; None where one passes.

        Kernels of all of them are compiled at once.
        """
        runs = [
            Run(
                program=program,
                patch=patch,
                compilers=self._compilers,
                device=self.device,
                sandbox=self.sandbox,
                any_text=False,
                clock=Clock(),
            )
            for program, patch in some
        ]
        for gate in GATES:
            if isinstance(gate, Compiles):  # which are known afterwards
                self._compilers.programs([c.program for run in runs for c in run.left])
            for run in runs:
                gate.prepare(run, run.left)
                for candidate in run.left:
                    candidate.refusal = gate.check(run, candidate)
        return [None if run.left else run.refusal() for run in runs]


__all__ = ["Screens"]
