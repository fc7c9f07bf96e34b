"""The contest of a patch's alternatives: each region alone, timed against the others; the fastest are checked.

Deals in the patch's target on inputs from an eager run. Knows nothing about whole programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from qimeng.envs.judge.gates.first_call import first_call_s
from qimeng.envs.judge.gates.gpu_run import GpuRun
from qimeng.envs.judge.gates.library_code import failure_of_call
from qimeng.envs.judge.gates.pipeline import Candidate, Contest, Refusal
from qimeng.envs.judge.program_times import BEHIND
from qimeng.envs.judge.region_reference import RegionReference
from qimeng.envs.screening.static_pass import gravity
from qimeng.envs.workers.forkserver import Process, WorkerFailed
from qimeng.envs.workers.stopwatch import Effort
from qimeng.envs.workers.worker_reports import samples_of
from qimeng.interfaces import Gate
from qimeng.program.program import Implementation, torch_implementation

SWEEP = Effort(min_ms=3.0, min_calls=7, limit_s=0.2, warmup=2, error=0.006)
"""How long alternatives of a region are timed to choose among them."""
CLOSE = 0.03
"""Alternatives within this share of the fastest go on as well, up to `FINALISTS`."""
FINALISTS = 2


class RegionContest(Contest[GpuRun]):
    """Times the alternatives of the patch's target alone and checks the fastest.

    A single alternative for a program of one region skips this, because the whole program's check includes it.
    Alternatives that are not among the fastest right ones come last, unchecked. Suspicious texts are checked last
    (`qimeng.envs.screening.static_pass`).
    """

    name = "region"

    def rank(self, run: GpuRun, candidates: list[Candidate]) -> list[Candidate]:
        """The alternatives that are right on the region first, then those that were not checked."""
        left = sorted(candidates, key=lambda c: gravity(c.program))
        patch = run.patch
        if patch is None or patch.target is None or not patch.alternatives:
            return left
        target = left[0].program.region(patch.target)
        plain = torch_implementation(target).source
        if len(left) == 1 and (patch.alternatives[left[0].number].source == plain or len(left[0].program.called) == 1):
            return left
        parts = run.parts
        with parts.turns.turn("check", run.clock):
            reference = RegionReference(parts.references, run.candidates[0].program, target, str(parts.folder))
            if len(left) > 1 and run.is_sweep:  # others would get another process for being timed
                left = [c for c in left if self._is_warmed(run, reference, c)]
        if len(left) > 1:
            with parts.turns.turn("time", run.clock, alone=True):
                for candidate in left:
                    run.turn_to(candidate)
                    fastest_ms = min((c.ms for c in left if c.ms is not None), default=0.0)
                    candidate.ms = self._time(run, reference, candidate, fastest_ms)
            left = sorted((c for c in left if c.ms is not None), key=lambda c: c.ms or 0.0)
        right: list[Candidate] = []
        with parts.turns.turn("check", run.clock):
            while left and (not right or self.is_close(left[0], right)):
                parts.turns.step_aside(run.clock)
                candidate = left.pop(0)
                run.turn_to(candidate)
                candidate.refusal = self._refused(run, reference, candidate)
                if candidate.refusal is None:
                    right.append(candidate)
        return right + left

    def is_close(self, candidate: Candidate, before: Sequence[Candidate]) -> bool:
        """Whether the region of `candidate` takes nearly as short as that of the first of those `before` it."""
        close = (candidate.ms or 0.0) <= (before[0].ms or 0.0) * (1 + CLOSE)
        return len(before) < FINALISTS and close

    # -- parts

    def _refused(self, run: GpuRun, reference: RegionReference, candidate: Candidate) -> Refusal | None:
        """Why the region's outputs are wrong; None where they are right."""
        parts = run.parts
        try:
            answer = _with_region(run, reference).call(
                "alternative",
                first_call_s([_written(run, candidate)], parts.limit_s, run.first_call_s),
                number=candidate.number,
                implementation=_written(run, candidate).text_alone,
                expected_bytes=reference.output_bytes,
            )
            error = parts.judge.compare(
                answer, reference.facts, reference.expected, reference.tally, reference.look_again
            ).error
            run.running().call("release", parts.limit_s)
        except WorkerFailed as failed:
            if failed.kind != "error":
                run.lost()
            return _refusal(run, candidate, failed)
        if error is None:
            return None
        where = f"region {reference.region.label()} on inputs {reference.draw.distribution!r}"
        return Refusal(Gate.REGION, "wrong", f"{where}: {error}")

    def _is_warmed(self, run: GpuRun, reference: RegionReference, candidate: Candidate) -> bool:
        run.parts.turns.step_aside(run.clock)
        return self._run(run, "warm_alternative", reference, candidate) is not None

    def _time(self, run: GpuRun, reference: RegionReference, candidate: Candidate, fastest_ms: float) -> float | None:
        behind_ms = BEHIND * fastest_ms if run.parts.torch_device.type == "cuda" else 0.0
        effort = replace(SWEEP, resets=run.resets, behind_ms=behind_ms)
        answer = self._run(run, "time_alternative", reference, candidate, effort=effort)
        return None if answer is None else median(samples_of(answer[0]).device_ms)

    def _run(self, run: GpuRun, command: str, reference: RegionReference, candidate: Candidate, **options: Any) -> Any:
        """The worker's answer to a command about one alternative; None where that failed, and so is refused."""
        try:
            worker = _with_region(run, reference)
            written = _written(run, candidate)
            limit_s = first_call_s([written], run.parts.limit_s, run.first_call_s)
            return worker.call(command, limit_s, implementation=written.text_alone, **options)
        except WorkerFailed as failed:
            run.lost()
            candidate.refusal = _refusal(run, candidate, failed)
            return None


def _written(run: GpuRun, candidate: Candidate) -> Implementation:
    assert run.patch is not None
    return run.patch.alternatives[candidate.number]


def _with_region(run: GpuRun, reference: RegionReference) -> Process:
    """A worker that holds the region's inputs."""
    worker = run.running()
    if reference.held_by is not worker:
        worker.call(
            "capture",
            run.parts.limit_s,
            source=reference.source,
            draw=reference.draw,
            entries=reference.entries,
            number=reference.number,
        )
        reference.held_by = worker
    return worker


def _refusal(run: GpuRun, candidate: Candidate, failed: WorkerFailed) -> Refusal:
    told = failure_of_call(run, [_written(run, candidate)], failed)
    return Refusal(Gate.REGION, "wrong" if told.kind == "mutated" else told.kind, str(told))


__all__ = ["CLOSE", "FINALISTS", "SWEEP", "RegionContest"]
