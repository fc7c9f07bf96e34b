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
from qimeng.envs.workers.compile_elsewhere import OffloadingCompilers
from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import Asked, Coder, Evaluation, EvaluationRequest, Gate, SerialEvaluator
from qimeng.program.program import Program
from qimeng.spec import KernelSpec


class EstimatingEvaluator(SerialEvaluator):
    """Judges programs for one specification on a machine that does not have the device.

    All alternatives of a patch are compiled and estimated; the one with the least estimated time that is right is kept.

    Args:
        spec: what is computed.
        device: the row of the table that kernels are compiled and timed for.
        coder: prints programs for a reduced size (`qimeng.interfaces.Reprints`).
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
        self._compilers = OffloadingCompilers(shared_server(), device, cache_dir, processes, sandbox=sandbox)
        self._interpreter = Interpreter(spec, coder, sandbox=sandbox)
        self._checked: dict[str, Checked] = {}
        self._interpreter.start()

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """Judge a program, or the best of a patch's alternatives.

        A final verification takes a fresh process and tries every distribution. It says what a machine with the device
        would have checked.

        Raises:
            RequestError: the request is for another specification, device or mode.
        """
        request.fits(self.spec.digest, self.device.name, self.spec.mode)
        if request.asked is not Asked.FINAL:
            return self._judged(request, self._checked, thorough=False)
        tools = check_tools(request.options.sanitize)
        found = self._judged(request, {}, thorough=True)
        return replace(found, notes=(*found.notes, *(f"compute-sanitizer {t} needs a GPU: not run" for t in tools)))

    def _judged(self, request: EvaluationRequest, known: dict[str, Checked], thorough: bool) -> Evaluation:
        """The evaluation of a request.

        Args:
            request: what is asked.
            known: programs that were interpreted before.
            thorough: whether the interpreter tries every distribution.
        """

        def interpret(program: Program, kernels: Sequence[KernelFacts]) -> Checked:
            if program.digest not in known:
                known[program.digest] = self._interpreter.check(program, kernels, thorough)
            return known[program.digest]

        run = EstimateRun(
            program=request.program,
            patch=request.patch,
            compilers=self._compilers,
            device=self.device,
            sandbox=self.sandbox,
            any_text=self.any_text,
            clock=Clock(),
            mode=self.spec.mode,
            interpret=interpret,
        )
        if run.candidates[0].program.fallback:
            text = "the computation could not be captured as a graph, so its time cannot be estimated without a GPU"
            return Evaluation(Gate.TIMING, text, "unsupported")
        found = ESTIMATE_GATES.judge(run)
        found = advised(found, run.candidates[found.chosen].program)
        count, seconds = len(run.candidates), run.clock.seconds
        return replace(found, configurations=count, seconds=seconds, sandbox=self._interpreter.layers)

    def close(self) -> None:
        """Forget what was checked; no process outlives an evaluation."""
        self._checked.clear()


__all__ = ["EstimatingEvaluator"]
