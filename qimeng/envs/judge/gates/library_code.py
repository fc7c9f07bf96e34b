"""The gate that waits for what a library compiles ahead, for as long as the request allows.

Deals in the wait alone; who compiles is `qimeng.envs.judge.library_compilers`. No turn on the device is held here:
TorchInductor needs turns too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qimeng.envs.judge.gates.gpu_run import GpuRun
from qimeng.envs.judge.gates.pipeline import Candidate, GateCheck, Refusal
from qimeng.envs.judge.library_compilers import LibraryCompilers
from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.interfaces import Gate
from qimeng.interfaces.faults import LEFT_ASIDE
from qimeng.library import COMPILE_S, compiles
from qimeng.program.program import Implementation, Program


class LibraryCode(GateCheck[GpuRun]):
    """What a library compiles ahead for a candidate is compiled, or has failed, so that a worker compiles it."""

    name, gate = "library code", Gate.COMPILE

    def prepare(self, run: GpuRun, candidates: Sequence[Candidate]) -> None:
        """Begin them all."""
        run.parts.libraries.begin(candidate.program for candidate in candidates)

    def check(self, run: GpuRun, candidate: Candidate) -> Refusal | None:
        """Leave aside what takes longer than there is time for; it is compiled on, for when it is asked again."""
        with run.clock.part("library"):
            return waited_for(run.parts.libraries, candidate.program, run.library_left_s)


def waited_for(libraries: LibraryCompilers, program: Program, seconds: float) -> Refusal | None:
    """A refusal where what `program` needs is not compiled within `seconds` from now."""
    if libraries.wait(program, seconds):
        return None
    worked = f"TorchInductor was not done after {libraries.worked_s(program):.3g} s"
    return Refusal(Gate.COMPILE, LEFT_ASIDE, f"left aside: {worked}; give more seconds")


def failure_of_call(run: GpuRun, implementations: Iterable[Implementation], failed: WorkerFailed) -> WorkerFailed:
    """What is said of a call that failed and may compile one of `implementations`: left aside, where time ran out."""
    limited = run.library_s < COMPILE_S and any(map(compiles, implementations))
    if not limited or failed.kind != "timeout":
        return failed
    within = f"within {run.library_s:.3g} s, which is what the budget leaves for that"
    return WorkerFailed(LEFT_ASIDE, f"left aside: TorchInductor did not compile it {within}; give more seconds")


LIBRARY_CODE = LibraryCode()

__all__ = ["LIBRARY_CODE", "LibraryCode", "failure_of_call", "waited_for"]
