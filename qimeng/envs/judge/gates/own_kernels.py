"""The gate that finds out whose kernels do the work, and how long they take.

Deals in names and times of kernels, as the profiler tells them. Knows nothing about outputs, but those of the profiled
call are checked as well, and kernels of untrusted texts are made idle to see whether outputs need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qimeng.envs.judge.gates.gpu_run import GpuRun
from qimeng.envs.judge.gates.pipeline import Candidate, GateCheck, Refusal
from qimeng.envs.judge.idle_kernels import with_idle_kernels
from qimeng.envs.judge.kernel_renaming import with_secret_names
from qimeng.envs.screening.origin import known, printed
from qimeng.envs.workers.forkserver import Process, WorkerFailed
from qimeng.envs.workers.kernel_launches import LEAST, Launch, busy_ms, own_share
from qimeng.envs.workers.worker_setup import Draw
from qimeng.graph.region import Region
from qimeng.interfaces import Gate
from qimeng.program.program import Program, torch_implementation

PROFILER_S = 60.0
"""Seconds that listing the kernels of a call may take."""
UNNAMEABLE = "its kernels were given other names, and it failed: name a kernel only where it is defined and launched"
NEEDLESS = (
    "the result is as right where the program's own kernels do nothing: PyTorch, a library or another compiler does "
    "the work"
)
UNPROVEN = "the profiler showed no kernels: the generated share comes from the regions' own labels"
BUSY_SHARE, BUSY_MS = 1.3, 0.005
"""The profiler's kernels of a call may take this many times the events' time, plus this many milliseconds."""
LOOKS = 8
"""Inputs on which the kernels are looked at alone on the device before they count as longer than the events say. The
events tell the median of many calls. On some inputs a right program takes a slower, exact way: an image of 30 million
random numbers may have one that scaled planes of fp16 lose. A program whose work the events do not see takes longer on
all inputs; one that hides work in some calls must not get more draws, so texts of others are looked at once."""


class OwnKernels(GateCheck[GpuRun]):
    """The program's own kernels do the work of its generated regions, in the time that the events say.

    Other kernels may do the work of generated regions, or kernels may take longer than the events say. Both are
    measured again alone on the device before they count, since checks of other runs make kernels slower; the second on
    several inputs (`LOOKS`). The profiler takes seconds. It is used in a final verification, and for kernels that no
    template printed. In a final verification the result must also need the kernels of each untrusted text: one that is
    launched for its name alone may take as long as the work of others.
    """

    name, gate = "own kernels", Gate.TIMING

    def check(self, run: GpuRun, candidate: Candidate) -> Refusal | None:
        """Put the share of the program's own kernels into `candidate.found`, or refuse it."""
        found, program = candidate.found, candidate.program
        assert found is not None
        if not any(is_asked(run, program, region) for region in program.regions):
            return None
        try:
            return self._refused(run, candidate, run.holder())
        except _Refused as refused:
            return refused.refusal

    def _refused(self, run: GpuRun, candidate: Candidate, worker: Process) -> Refusal | None:
        found, program = candidate.found, candidate.program
        assert found is not None
        claimed, event_ms, turns = found.generated_share, found.ms, run.parts.turns
        own = _named(run, worker, candidate) if claimed else {}
        with turns.turn("check", run.clock):
            launches = _launches(run, worker)
        if event_ms is not None and _is_longer(launches, event_ms):
            launches = _looked_at_again(run, worker, LOOKS if printed(program) else 1, event_ms)
        if event_ms is not None and _is_longer(launches, event_ms):
            text = f"events say {event_ms:.3f} ms a call, the profiler's kernels take {busy_ms(launches):.3f} ms"
            return Refusal(Gate.TIMING, "clock", text)
        if not claimed:
            return None
        share = own_share(launches, own)
        if share is not None and share < LEAST * claimed:
            with turns.turn("time", run.clock, alone=True):
                share = max(share, own_share(_launches(run, worker), own) or 0.0)
        if share is not None and share < LEAST * claimed:
            text = (
                f"generated regions take {claimed:.0%} of the time, but their own kernels only {share:.1%} of all "
                "kernels' time: PyTorch, a library or another compiler does the work"
            )
            return Refusal(Gate.TIMING, "not-a-kernel", text)
        if run.thorough and _has_needless_kernels(run, program):
            return Refusal(Gate.TIMING, "not-a-kernel", NEEDLESS)
        if share is None:
            candidate.found = replace(found, notes=(*found.notes, UNPROVEN))
        else:
            candidate.found = replace(found, generated_share=share)
        return None


def is_asked(run: GpuRun, program: Program, region: Region) -> bool:
    """Whether the profiler has to look at what computes `region`."""
    written = program.implementation(region)
    if run.thorough:
        return written.generated or written.source != torch_implementation(region).source
    return written.generated and not known(region, written)


def _named(run: GpuRun, worker: Process, candidate: Candidate) -> Mapping[str, int | None]:
    """Names of the candidate's own kernels.

    The worker of an untrusted program gets it with secret kernel names from here on, because names in the text prove
    nothing. A search saves the time for that where it is known how often each kernel is launched.
    """
    counted = None not in candidate.own.values()
    if printed(candidate.program) or (counted and not run.thorough):
        return candidate.own
    program, own = with_secret_names(candidate.program)
    try:
        failed = _not_loaded(run, worker, program)
    except WorkerFailed as error:
        if error.kind != "error":
            raise
        failed = str(error)
    if failed is not None:
        raise _Refused(Refusal(Gate.TIMING, "not-a-kernel", f"{UNNAMEABLE}: {failed}"))
    return own


def _not_loaded(run: GpuRun, worker: Process, program: Program) -> str | None:
    """Load a changed program into `worker`; the error where it does not compile."""
    with run.clock.part("compile"):
        made = run.compilers.programs([program])[0]
    failed = next((c.error for c in made.values() if c.error and not c.host), None)
    if failed is None:
        digests = [c.digest for c in map(program.implementation, program.regions) if c.generated]
        worker.call("load", run.parts.limit_s, source=program.source, digests=digests)
    return failed


def _has_needless_kernels(run: GpuRun, program: Program) -> bool:
    """Whether the result is right on new inputs although all kernels of an untrusted text do nothing.

    What fails then needs its kernels: it compiles no more, raises, hangs, or reads where it must not.
    """
    judge = run.parts.judge
    for idle in with_idle_kernels(program):
        with run.parts.turns.turn("check", run.clock):
            try:
                worker = run.running()
                if _not_loaded(run, worker, idle) is not None:
                    continue
                verdict = judge.check(worker, judge.references.fresh(1), runs=1)
                if verdict.ok and verdict.accuracy is not None and verdict.accuracy.trials:
                    return True
            except WorkerFailed:
                run.lost()  # its device may be unusable
    return False


def _looked_at_again(run: GpuRun, worker: Process, looks: int, event_ms: float) -> list[Launch]:
    """The kernels of a call that take no longer than the events say; of the last one where no call's do.

    A call is looked at quickly first. One that agrees is made again and checked like any other.

    Args:
        run: the evaluation.
        worker: with the program loaded.
        looks: calls at most.
        event_ms: what the events say.
    """
    parts = run.parts
    with parts.turns.turn("time", run.clock, alone=True):
        for _ in range(looks):
            draw = parts.references.timed_draw()
            launches = parts.judge.launches(worker, draw, max(parts.limit_s, PROFILER_S))
            if not _is_longer(launches, event_ms):
                launches = _launches(run, worker, draw)
                if not _is_longer(launches, event_ms):
                    break
    return launches


def _launches(run: GpuRun, worker: Process, draw: Draw | None = None) -> list[Launch]:
    """The kernels of a call, as the profiler sees them; what the call returned has to be right.

    Args:
        run: the evaluation.
        worker: with the program loaded.
        draw: inputs and parameters of the call; new ones by default.
    """
    draw = draw or run.parts.references.timed_draw()
    launches, verdict = run.parts.judge.profiled(worker, draw, max(run.parts.limit_s, PROFILER_S))
    if verdict.failure is not None:
        raise _Refused(Refusal(Gate.TIMING, verdict.failure, verdict.error or ""))
    return launches


class _Refused(Exception):
    """Ends the profiling of a candidate."""

    def __init__(self, refusal: Refusal):
        super().__init__(refusal.error)
        self.refusal = refusal


def _is_longer(launches: Sequence[Launch], told_ms: float) -> bool:
    """Whether the profiler's kernels take longer than the events say."""
    return busy_ms(launches) > BUSY_SHARE * told_ms + BUSY_MS


OWN_KERNELS = OwnKernels()

__all__ = ["OWN_KERNELS", "UNPROVEN", "OwnKernels", "is_asked"]
