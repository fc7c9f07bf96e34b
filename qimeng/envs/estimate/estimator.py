"""The evaluator for a machine without the device: it cross-compiles, checks in an interpreter, and times by a model.

Deals in putting the parts together. Every time it gives says `estimated`. Other modules compile, interpret and model
kernels; its gates are listed in `qimeng.envs.estimate.estimate_gates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qimeng.backend.facts import KernelFacts
from qimeng.device import Device
from qimeng.envs.estimate.estimate_gates import ESTIMATE_GATES, EstimateRun
from qimeng.envs.estimate.interpret import Checked, Interpreter
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.sandbox import DEFAULT
from qimeng.envs.screening.sanitizer import check_tools
from qimeng.envs.screening.static_pass import advised
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import Coder, Evaluation, Evaluator, Gate, Patch
from qimeng.program.program import Program
from qimeng.spec import KernelSpec


class EstimatingEvaluator(Evaluator):
    """Judges programs for one specification on a machine that does not have the device.

    All alternatives of a patch are compiled and estimated; the one with the least estimated time that is right is kept.

    Args:
        spec: what is computed.
        device: the row of the table that kernels are compiled and timed for.
        coder: prints programs for a reduced size (`qimeng.envs.estimate.interpret.Reprints`).
        cache_dir: Triton's cache folder; None for its own default.
        processes: compilations at once; one a core by default.
        sandbox: level of the processes' sandbox; see `ForkServer.start`.
        any_text: as for `qimeng.envs.judge.gpu_evaluator.GpuEvaluator`.

    Attributes:
        version: part of the key under which evaluations are stored.
        estimated: True: times are the model's.
    """

    version = 10
    estimated = True

    def __init__(
        self,
        spec: KernelSpec,
        device: Device,
        coder: Coder | None = None,
        cache_dir: str | None = None,
        processes: int | None = None,
        sandbox: str = DEFAULT,
        any_text: bool = False,
    ):
        self.sandbox, self.any_text = sandbox, any_text
        self.spec, self.device = spec, device
        if cache_dir is not None:
            Path(cache_dir).mkdir(parents=True, exist_ok=True)
        self._compilers = Compilers(shared_server(), device, cache_dir, processes, sandbox=sandbox)
        self._interpreter = Interpreter(spec, coder, sandbox=sandbox)
        self._checked: dict[str, Checked] = {}
        self._tools: tuple[str, ...] = ()
        self._thorough = False
        self._interpreter.start()

    def evaluate(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """Judge `program` with `patch` applied (the best of its alternatives), or `program` itself."""
        run = EstimateRun(
            program,
            patch,
            self._compilers,
            self.device,
            self.sandbox,
            self.any_text,
            Clock(),
            self.spec.mode,
            self._check,
        )
        if run.candidates[0].program.fallback:
            text = "the computation could not be captured as a graph, so its time cannot be estimated without a GPU"
            return Evaluation(Gate.TIMING, text, "unsupported")
        found = ESTIMATE_GATES.judge(run)
        found = advised(found, run.candidates[found.chosen].program)
        count, seconds = len(run.candidates), run.clock.seconds
        return replace(found, configurations=count, seconds=seconds, sandbox=self._interpreter.layers)

    def final(self, program: Program) -> Evaluation:
        """Judge `program` again, in a fresh process and on every distribution.

        It says what a machine with the device would have checked.
        """
        self._checked.clear()
        self._thorough = True
        try:
            found = self.evaluate(program)
        finally:
            self._checked.clear()
            self._thorough = False
        return replace(
            found, notes=(*found.notes, *(f"compute-sanitizer {t} needs a GPU: not run" for t in self._tools))
        )

    def sanitize_with(self, tools: Sequence[str]) -> None:
        """Say of each tool that it was not run: no kernel runs here."""
        self._tools = check_tools(tools)

    def close(self) -> None:
        """Forget what was checked; no process outlives an evaluation."""
        self._checked.clear()

    def _check(self, program: Program, kernels: Sequence[KernelFacts]) -> Checked:
        """Whether `program` is right, as far as can be told here."""
        if program.digest not in self._checked:
            self._checked[program.digest] = self._interpreter.check(program, kernels, self._thorough)
        return self._checked[program.digest]


__all__ = ["EstimatingEvaluator"]
