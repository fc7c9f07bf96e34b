"""The list of gates of the estimating judge, and those that it alone has: a model's times, and the interpreter.

Deals in candidates that were compiled. Knows nothing about how kernels are modelled or interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qimeng.backend.facts import KernelFacts
from qimeng.backend.registry import backend_named
from qimeng.envs.cost.kernel_time import program_ms
from qimeng.envs.cost.roofline import eager_ms
from qimeng.envs.cost.time_bounds import above_peak
from qimeng.envs.estimate.interpret import Checked
from qimeng.envs.judge.gates.pipeline import Candidate, Contest, GateCheck, Pipeline, Refusal, Run
from qimeng.envs.judge.gates.screening import ALLOWED_TEXT, LAUNCHES_KERNELS, Compiles, FitsDevice
from qimeng.envs.judge.verdicts import Verdict
from qimeng.envs.screening.origin import foreign
from qimeng.envs.screening.resources import largest
from qimeng.interfaces import Evaluation, Gate, Timing
from qimeng.library import LANGUAGE
from qimeng.program.program import Program


@dataclass(eq=False)
class EstimateRun(Run):
    """One evaluation on its way.

    Attributes:
        mode: precision mode.
        interpret: checks a program with these kernels, as far as that can be done here.
    """

    mode: str
    interpret: Callable[[Program, Sequence[KernelFacts]], Checked]


class ModelTimes(Contest[EstimateRun]):
    """Orders candidates by their estimated time."""

    name = "model times"

    def rank(self, run: EstimateRun, candidates: list[Candidate]) -> list[Candidate]:
        """All of them, the fastest first."""
        with run.clock.part("time"):
            for candidate in candidates:
                kernels = {signature: found.kernels for signature, found in candidate.compiled.items()}
                candidate.region_ms = program_ms(candidate.program, kernels, run.device, run.mode)
                candidate.ms = sum(candidate.region_ms.values())
        return sorted(candidates, key=lambda c: (c.ms or 0.0, c.number))


class RightWhenInterpreted(GateCheck[EstimateRun]):
    """The program is right in Triton's interpreter, or nobody but a template printed what could not be checked."""

    name, gate = "right when interpreted", Gate.PROGRAM

    def check(self, run: EstimateRun, candidate: Candidate) -> Refusal | None:
        """Interpret the program, and fill in `candidate.found`."""
        candidate.resources = largest(candidate.kernels)
        with run.clock.part("check"):
            checked = run.interpret(candidate.program, candidate.kernels)
        verdict = checked.verdict
        if (verdict is None or verdict.ok) and _has_unseen_text(candidate.program, verdict is not None):
            verdict = Verdict(failure="unsupported", error=f"no template printed it, and it is {checked.note}")
        if verdict is not None and verdict.failure is not None:
            return Refusal(Gate.PROGRAM, verdict.failure, verdict.error or "", verdict.accuracy, (checked.note,))
        candidate.found = _passed(run, candidate, checked)
        return None


def _passed(run: EstimateRun, candidate: Candidate, checked: Checked) -> Evaluation:
    program, times = candidate.program, candidate.region_ms
    total = sum(times.values())
    own = sum(times[r.id] for r in program.called if program.implementation(r).generated)
    library = sum(times[r.id] for r in program.called if program.implementation(r).language == LANGUAGE)
    remark = above_peak(program.start_graph, total, run.device, run.mode)
    return Evaluation(
        Gate.PASSED,
        timing=Timing(total, estimated=True),
        eager=Timing(eager_ms(program.start_graph, run.device, run.mode), estimated=True),
        chosen=candidate.number,
        accuracy=checked.verdict.accuracy if checked.verdict is not None else None,
        resources=candidate.resources,
        region_ms=times,
        generated_share=own / total if total else 0.0,
        library_share=library / total if total else 0.0,
        notes=(checked.note,) if remark is None else (checked.note, remark),
        unchecked=checked.unchecked,
    )


def _has_unseen_text(program: Program, interpreted: bool) -> bool:
    """Whether nothing speaks for a kernel of `program`: no template printed it, and no interpreter ran it.

    Args:
        program: what was judged.
        interpreted: whether it was run, but for kernels in languages without an interpreter.
    """
    free = [i for i in foreign(program) if i.generated]
    return any(not interpreted or not backend_named(i.language).capabilities.interpreter for i in free)


ESTIMATE_GATES: Pipeline[EstimateRun] = Pipeline(
    (ALLOWED_TEXT, Compiles(first_launch=False), LAUNCHES_KERNELS, FitsDevice(few_spills=True)),
    ModelTimes(),
    (RightWhenInterpreted(),),
)
"""What a program passes where its device is not there: the judge's own screening, then the model and the interpreter.
A final verification has the same gates, and the interpreter then tries every distribution."""

__all__ = ["ESTIMATE_GATES", "EstimateRun", "ModelTimes", "RightWhenInterpreted"]
