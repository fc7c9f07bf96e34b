"""The gates that compare a whole program with the reference.

Deals in trials and in the worker that has the program loaded. Knows nothing about times.
"""

from __future__ import annotations

from dataclasses import replace

from qimeng.envs.judge.gates.first_call import first_call_s, warms_up
from qimeng.envs.judge.gates.gpu_run import GpuRun
from qimeng.envs.judge.gates.library_code import failure_of_call
from qimeng.envs.judge.gates.pipeline import Candidate, GateCheck, Refusal
from qimeng.envs.judge.verdicts import RUNS, RUNS_OVERLAPPING, Verdict
from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.interfaces import Gate


class RightOutputs(GateCheck[GpuRun]):
    """The program's outputs are right on every trial; it is loaded into the worker here."""

    name, gate = "right outputs", Gate.PROGRAM

    def check(self, run: GpuRun, candidate: Candidate) -> Refusal | None:
        """Load the program and try it."""
        parts, program = run.parts, candidate.program
        run.loaded = worker = run.running()
        with parts.turns.turn("check", run.clock):
            worker.call("forget_region", parts.limit_s)
            made = [c.digest for c in map(program.implementation, program.regions) if c.generated]
            worker.call("load", parts.limit_s, source="" if program.fallback else program.source, digests=made)
            if warms_up(program):
                seed, called = parts.references.draw_seed(), [program.implementation(r) for r in program.called]
                try:
                    with run.clock.part("compile"):
                        worker.call("warm", first_call_s(called, parts.limit_s, run.first_call_s), seed=seed)
                except WorkerFailed as failed:
                    raise failure_of_call(run, called, failed) from None
            runs = RUNS_OVERLAPPING if candidate.overlapping else RUNS
            step_aside = lambda: parts.turns.step_aside(run.clock)  # noqa: E731
            candidate.verdict = parts.judge.check(worker, run.clock.each("reference", run.trials()), step_aside, runs)
        return refused(Gate.PROGRAM, candidate.verdict)


class GuardsAndRepeats(GateCheck[GpuRun]):
    """The program refuses inputs that it was not made for, and is right call after call; too slow for a search."""

    name, gate = "guards and repeated calls", Gate.PROGRAM

    def check(self, run: GpuRun, candidate: Candidate) -> Refusal | None:
        """Try what a single call does not show; the reference itself needs no such check."""
        if candidate.program.fallback:
            return None
        parts, worker, verdict = run.parts, run.holder(), candidate.verdict
        with parts.turns.turn("check", run.clock):
            later = parts.judge.check_guards(worker)
            later = parts.judge.check_repeats(worker) if later.ok else later
        notes = tuple(dict.fromkeys((*verdict.notes, *later.notes)))
        candidate.verdict = replace(later, accuracy=verdict.accuracy, notes=notes)
        return refused(Gate.PROGRAM, later)


def refused(gate: Gate, verdict: Verdict) -> Refusal | None:
    """The refusal that a verdict is; None where everything is right."""
    return None if verdict.failure is None else Refusal(gate, verdict.failure, verdict.error or "")


RIGHT_OUTPUTS, GUARDS_AND_REPEATS = RightOutputs(), GuardsAndRepeats()

__all__ = ["GUARDS_AND_REPEATS", "RIGHT_OUTPUTS", "GuardsAndRepeats", "RightOutputs", "refused"]
