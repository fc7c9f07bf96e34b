"""The gates that time a whole program, and decide whether the time can be believed.

Deals in the worker that has a right program loaded. Other modules take the times and rule on clocks.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from qimeng.envs.cost.time_bounds import SHARE, above_peak
from qimeng.envs.judge.gates.gpu_run import GpuRun
from qimeng.envs.judge.gates.pipeline import Candidate, GateCheck, Refusal
from qimeng.envs.judge.gates.program import refused
from qimeng.envs.judge.judge_clock import NOT_TIMED
from qimeng.envs.judge.throttle import POWER_CAP, Watch
from qimeng.envs.judge.verdicts import RUNS_OVERLAPPING
from qimeng.envs.workers.forkserver import Process
from qimeng.envs.workers.stopwatch import Samples
from qimeng.envs.workers.worker_reports import amount_of, entry_of, times_of
from qimeng.interfaces import Evaluation, Gate, Timing
from qimeng.library import LANGUAGE
from qimeng.program.program import Program

PROFILE_ROUNDS = 3
CLOCK_ROUNDS = 3
"""Times that a program is timed before it is believed that its times and the judge's clock disagree (a host that has
become busy delays both), or that the GPU stays throttled."""
BUSY_ROUNDS, BUSY_S = 4, 5.0
"""Further times in the final verification where the judge's clock cannot tell, and seconds of rest before each: what is
launched faster than a busy host can waits for the host."""
COOL_S = 2.0
"""Seconds of rest before a GPU that was held back is timed again."""
SLOWED = "PyTorch took {:.4g} ms in turns with the program and {:.4g} ms before: the shorter time counts"
OVERLAPS = (
    "{}: a product reads its left operand from registers while the next step writes the next operand; CUDA before "
    "13.3 may use the same registers for both (it was right in {} runs)"
)


class CredibleTime(GateCheck[GpuRun]):
    """The program has a time that can be believed.

    The datasheet's limit applies on a GPU only. The judge's own clock decides on every reported time. Template programs
    are checked with it in the final verification only.
    """

    name, gate = "credible time", Gate.TIMING

    def check(self, run: GpuRun, candidate: Candidate) -> Refusal | None:
        """Time the program beside PyTorch, as often as a busy machine needs; fill in `candidate.found`.

        Where PyTorch stays slower than it was before, its shorter time counts: what keeps the device or the host busy
        may be the candidate's, and must not make it look fast.
        """
        parts, worker = run.parts, run.holder()
        with parts.turns.turn("check", run.clock):
            parts.times.begin()
            peak_bytes = amount_of(worker.call("peak", parts.limit_s, seed=parts.references.draw_seed())[0])
            eager_peak_bytes = parts.baselines.peak()
        with run.clock.part("start"):
            parts.workers.settle()
        with ExitStack() as turn:
            turn.enter_context(parts.turns.turn("time", run.clock, alone=True))
            for attempt in range(CLOCK_ROUNDS + (BUSY_ROUNDS if run.thorough else 0)):
                if attempt >= CLOCK_ROUNDS:
                    turn.close()  # others measure meanwhile, which keeps the device busy but not the host
                    with run.clock.part("time"):
                        time.sleep(BUSY_S)
                    turn.enter_context(parts.turns.turn("time", run.clock, alone=True))
                with Watch(parts.throttle) as watch:
                    samples, eager = run.rounds(worker, run.clock, run.resets)
                timing = samples.timing()
                if watch.slowed:
                    parts.times.forget_eager()
                if watch.slowed and attempt + 1 < CLOCK_ROUNDS:
                    time.sleep(COOL_S)
                    continue
                beside = eager.timing()
                before = None if run.may_share else parts.baselines.faster_before(beside)
                if before is not None and attempt + 1 < CLOCK_ROUNDS:
                    continue
                problem = _implausible(run, worker, timing, eager)
                if problem is None or problem.failure not in ("clock", NOT_TIMED):
                    break
                if problem.failure == "clock" and attempt + 1 >= CLOCK_ROUNDS:
                    break
            if problem is not None:
                return problem
            parts.times.believe(timing)
            found = Evaluation(
                Gate.PASSED,
                timing=timing,
                eager=before or beside,
                chosen=candidate.number,
                accuracy=candidate.verdict.accuracy,
                resources=candidate.resources,
                peak_bytes=None if peak_bytes is None else int(peak_bytes),
                eager_peak_bytes=eager_peak_bytes,
                notes=(
                    *candidate.verdict.notes,
                    *_remarks(run, timing),
                    *_on_clocks(run, watch),
                    *([SLOWED.format(beside.device_ms, before.device_ms)] if before else []),
                    *(OVERLAPS.format(name, RUNS_OVERLAPPING) for name in candidate.overlapping),
                ),
            )
            candidate.found = _profiled(run, worker, candidate.program, found)
        return None


class RightWhenTimed(GateCheck[GpuRun]):
    """A timed call was right; where the judge's own clock timed the program, that has looked at its calls already."""

    name, gate = "right when timed", Gate.TIMING

    def check(self, run: GpuRun, candidate: Candidate) -> Refusal | None:
        """Look at the output of one timed call."""
        if not run.may_share:
            return None
        worker = run.holder()
        with run.parts.turns.turn("check", run.clock):
            return refused(Gate.TIMING, run.parts.times.check_timed(worker))


def _implausible(run: GpuRun, worker: Process, timing: Timing, eager: Samples) -> Refusal | None:
    """Why the times cannot be believed."""
    parts = run.parts
    if parts.torch_device.type == "cuda" and timing.device_ms < SHARE * parts.least_ms:
        text = (
            f"{timing.device_ms:.4f} ms is less than reading the inputs and writing the outputs takes at "
            f"{run.device.bandwidth_gbs:g} GB/s ({parts.least_ms:.4f} ms)"
        )
        return Refusal(Gate.TIMING, "too-fast", text)
    if run.may_share:
        return None
    eager_ms = eager.timing().device_ms
    return refused(Gate.TIMING, parts.outer_clock.check(worker, timing.device_ms, eager_ms, eager.usual_late_ms))


def _remarks(run: GpuRun, timing: Timing) -> tuple[str, ...]:
    """Remarks on the specification, and on accepted times."""
    parts = run.parts
    remarks = parts.references.remarks
    if parts.graph is None:
        return remarks
    note = above_peak(parts.graph, timing.device_ms, run.device, parts.references.spec.mode)
    return remarks if note is None else (*remarks, note)


def _on_clocks(run: GpuRun, watch: Watch) -> tuple[str, ...]:
    """Remarks on the GPU's clocks during the measurement."""
    parts = run.parts
    if parts.torch_device.type != "cuda" and parts.throttle is None:
        return ()
    if parts.throttle is None:
        return (f"GPU throttling was not monitored during this measurement: {parts.unwatched}",)
    if watch.slowed:
        return (f"the GPU was throttled in every measurement: {watch.slowed}",)
    return ("the GPU reached its power limit during this measurement",) if watch.seen & POWER_CAP else ()


def _profiled(run: GpuRun, worker: Process, program: Program, found: Evaluation) -> Evaluation:
    """`found` with the time of each region."""
    parts = run.parts
    implementations = [program.implementation(r) for r in program.called]
    entries = [] if program.fallback else [m.entry for m in implementations]
    seed = parts.references.draw_seed()
    data, _ = worker.call("profile", parts.limit_s, seed=seed, entries=entries, repeats=PROFILE_ROUNDS)
    found = replace(found, prepare_ms=amount_of(entry_of(data, "prepare_ms")))
    measured = entry_of(data, "regions")
    rounds = [times_of(r) for r in measured] if isinstance(measured, list) else []
    if not rounds or any(len(r) != len(entries) for r in rounds):
        return found
    times = [median(r[k] for r in rounds) for k in range(len(entries))]
    total = sum(times)
    own = sum(t for t, m in zip(times, implementations, strict=True) if m.generated)
    shares = {region.id: t for region, t in zip(program.called, times, strict=True)}
    if not total:
        return replace(found, region_ms=shares)
    library = sum(t for t, m in zip(times, implementations, strict=True) if m.language == LANGUAGE)
    return replace(found, region_ms=shares, generated_share=own / total, library_share=library / total)


CREDIBLE_TIME, RIGHT_WHEN_TIMED = CredibleTime(), RightWhenTimed()

__all__ = ["CREDIBLE_TIME", "RIGHT_WHEN_TIMED", "CredibleTime", "RightWhenTimed"]
