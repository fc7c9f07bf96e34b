"""The evaluator for a machine without the device: it cross-compiles, checks in an interpreter, and times by a model.

Deals in the order of these gates and in which alternative is kept. Every time it gives says `estimated`. Other modules
compile, interpret and model kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qimeng.backend.compiled import Compiled
from qimeng.backend.facts import KernelFacts
from qimeng.backend.registry import backend_named
from qimeng.backend.resources import largest, refusal, too_many_spills
from qimeng.device import Device
from qimeng.envs.cost.kernel_time import program_ms
from qimeng.envs.cost.roofline import eager_ms
from qimeng.envs.cost.time_bounds import above_peak
from qimeng.envs.estimate.interpret import Checked, Interpreter
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.judge.verdicts import Verdict
from qimeng.envs.sandbox import DEFAULT
from qimeng.envs.screening.origin import foreign
from qimeng.envs.screening.sanitizer import check_tools
from qimeng.envs.screening.static_pass import advised, judged_text
from qimeng.envs.workers.compile import Compilers, launches_nothing
from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import Coder, Evaluation, Evaluator, Gate, Patch, Timing
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
        count = max(1, len(patch.alternatives)) if patch is not None else 1
        run = _Run(self, [patch.apply(program, i) if patch is not None else program for i in range(count)])
        if run.candidates[0].fallback:
            text = "the computation could not be captured as a graph, so its time cannot be estimated without a GPU"
            return Evaluation(Gate.TIMING, text, "unsupported")
        run.compile()
        found = run.best()
        found = advised(found, run.candidates[found.chosen])
        return replace(found, configurations=count, seconds=run.clock.seconds, sandbox=self._interpreter.layers)

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

    # -- parts, asked by a run

    def compile(self, candidates: list[Program]) -> list[dict[str, Compiled]]:
        """For each candidate, region signature to what came of compiling it."""
        return self._compilers.programs(candidates)

    def check(self, program: Program, kernels: Mapping[str, tuple[KernelFacts, ...]]) -> Checked:
        """Whether `program` is right, as far as can be told here."""
        if program.digest not in self._checked:
            every = [k for found in kernels.values() for k in found]
            self._checked[program.digest] = self._interpreter.check(program, every, self._thorough)
        return self._checked[program.digest]


@dataclass
class _Run:
    """One evaluation on its way."""

    owner: EstimatingEvaluator
    candidates: list[Program]
    kernels: dict[int, dict[str, tuple[KernelFacts, ...]]] = field(default_factory=dict)
    refused: dict[int, Evaluation] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)

    def compile(self) -> None:
        """Compile every candidate; refuse those that do not compile or do not fit the device."""
        owner = self.owner
        for i, candidate in enumerate(self.candidates):
            if told := judged_text(candidate, owner.sandbox, owner.any_text):
                self.refused[i] = Evaluation(Gate.COMPILE, told[1], told[0], chosen=i)
        left = [i for i in range(len(self.candidates)) if i not in self.refused]
        with self.clock.part("compile"):
            found = owner.compile([self.candidates[i] for i in left])
        for i, table in zip(left, found, strict=True):
            failed = next((c for c in table.values() if c.error), None)
            self.kernels[i] = {s: c.kernels for s, c in table.items()}
            if failed is not None:
                kind = "unsupported" if failed.failure == "meta" else failed.failure
                self.refused[i] = Evaluation(Gate.COMPILE, failed.error, kind, chosen=i)
            elif idle := launches_nothing(self.candidates[i], table):
                self.refused[i] = Evaluation(Gate.COMPILE, idle, "not-a-kernel", chosen=i)
            elif too_much := refusal(self._every(i), self.owner.device) or too_many_spills(self._every(i)):
                needed = largest(self._every(i))
                self.refused[i] = Evaluation(Gate.RESOURCES, too_much, "resources", chosen=i, resources=needed)

    def best(self) -> Evaluation:
        """The evaluation of the fastest candidate that is right, or the refusal of what came farthest."""
        owner, mode = self.owner, self.owner.spec.mode
        times: dict[int, dict[str, float]] = {}
        with self.clock.part("time"):
            for i, candidate in enumerate(self.candidates):
                if i not in self.refused:
                    times[i] = program_ms(candidate, self.kernels[i], owner.device, mode)
        for i in sorted(times, key=lambda i: (sum(times[i].values()), i)):
            with self.clock.part("check"):
                checked = owner.check(self.candidates[i], self.kernels[i])
            verdict = checked.verdict
            if (verdict is None or verdict.ok) and _has_unseen_text(self.candidates[i], verdict is not None):
                verdict = Verdict(failure="unsupported", error=f"no template printed it, and it is {checked.note}")
            if verdict is None or verdict.ok:
                return self._passed(i, times[i], checked)
            self.refused[i] = Evaluation(
                Gate.PROGRAM,
                verdict.error,
                verdict.failure,
                chosen=i,
                accuracy=verdict.accuracy,
                resources=largest(self._every(i)),
                notes=(checked.note,),
            )
        return self._refusal()

    def _passed(self, i: int, times: dict[str, float], checked: Checked) -> Evaluation:
        owner, program = self.owner, self.candidates[i]
        total = sum(times.values())
        own = sum(times[r.id] for r in program.called if program.implementation(r).generated)
        remark = above_peak(program.start_graph, total, owner.device, owner.spec.mode)
        return Evaluation(
            Gate.PASSED,
            timing=Timing(total, estimated=True),
            eager=Timing(eager_ms(program.start_graph, owner.device, owner.spec.mode), estimated=True),
            chosen=i,
            accuracy=checked.verdict.accuracy if checked.verdict is not None else None,
            resources=largest(self._every(i)),
            region_ms=times,
            generated_share=own / total if total else 0.0,
            notes=(checked.note,) if remark is None else (checked.note, remark),
            unchecked=checked.unchecked,
        )

    def _every(self, i: int) -> list[KernelFacts]:
        return [k for kernels in self.kernels[i].values() for k in kernels]

    def _refusal(self) -> Evaluation:
        order = list(Gate)
        _, worst = max(
            self.refused.items(), key=lambda item: (not item[1].lasting, order.index(item[1].gate), -item[0])
        )
        if len(self.refused) == 1:
            return worst
        return replace(worst, error=f"{worst.error} ({len(self.refused)} alternatives were refused)")


def _has_unseen_text(program: Program, interpreted: bool) -> bool:
    """Whether nothing speaks for a kernel of `program`: no template printed it, and no interpreter ran it.

    Args:
        program: what was judged.
        interpreted: whether it was run, but for kernels in languages without an interpreter.
    """
    free = [i for i in foreign(program) if i.generated]
    return any(not interpreted or not backend_named(i.language).capabilities.interpreter for i in free)


__all__ = ["EstimatingEvaluator"]
