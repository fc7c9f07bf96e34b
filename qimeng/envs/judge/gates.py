"""One evaluation: a program, or the alternatives of a patch, through the gates.

Deals in the order of the gates, the choice of alternatives, and the text of refusals. Other modules compile kernels,
compare outputs and measure times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from qimeng.backend.resources import largest, refusal
from qimeng.envs.cost.time_bounds import SHARE, above_peak
from qimeng.envs.judge.judge_clock import NOT_TIMED
from qimeng.envs.judge.kernel_renaming import with_secret_names
from qimeng.envs.judge.ranking import preferred
from qimeng.envs.judge.region_reference import RegionReference
from qimeng.envs.judge.throttle import POWER_CAP, Watch
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.judge.trials import Trial
from qimeng.envs.judge.verdicts import RUNS, RUNS_OVERLAPPING
from qimeng.envs.screening.origin import is_sweep, known, printed
from qimeng.envs.screening.static_pass import gravity
from qimeng.envs.workers.compile import Compilers, launches_nothing
from qimeng.envs.workers.forkserver import Process, WorkerFailed
from qimeng.envs.workers.kernel_launches import LEAST, Launch, busy_ms, own_kernels, own_share
from qimeng.envs.workers.stopwatch import Effort, Samples
from qimeng.envs.workers.worker_reports import amount_of, entry_of, samples_of, times_of
from qimeng.graph.region import Region
from qimeng.interfaces import LASTING, Evaluation, Gate, Patch, Resources, Timing
from qimeng.program.program import Program, torch_implementation

if TYPE_CHECKING:
    from qimeng.envs.judge.gpu_evaluator import GpuEvaluator

T = TypeVar("T")

KEEPS_LINES = "evict_last"
"""What stands in a Triton kernel that asks for it."""
SWEEP = Effort(min_ms=3.0, min_calls=7, limit_s=0.2, warmup=2, error=0.006)
"""How long alternatives of a region are timed to choose among them."""
CLOSE = 0.03
"""Alternatives within this share of the fastest go on as well, up to `FINALISTS`."""
FINALISTS = 2
PROFILE_ROUNDS = 3
CLOCK_ROUNDS = 3
"""Times that a program is timed before it is believed that its times and the judge's clock disagree (a host that has
become busy delays both), or that the GPU stays throttled."""
PROFILER_S = 60.0
"""Seconds that listing the kernels of a call may take."""
OVERLAPS = (
    "{}: a product reads its left operand from registers while the next step writes the next operand; CUDA before "
    "13.3 may use the same registers for both (it was right in {} runs)"
)
UNNAMEABLE = "its kernels were given other names, and it failed: name a kernel only where it is defined and launched"
UNPROVEN = "the profiler showed no kernels: the generated share comes from the regions' own labels"
BUSY_SHARE, BUSY_MS = 1.3, 0.005
"""The profiler's kernels of a call may take this many times the events' time, plus this many milliseconds."""
COOL_S = 2.0
"""Seconds of rest before a GPU that was held back is timed again."""


@dataclass(frozen=True)
class Refusal:
    """Why an alternative does not go on."""

    gate: Gate
    failure: str
    error: str


@dataclass
class Run:
    """One evaluation on its way.

    Attributes:
        owner: the evaluator, which has the parts.
        program: what is judged.
        patch: applied to it; None for the program as it is.
        cache: Triton's cache folder.
        trials: makes the trials that the whole program has to pass.
        clock: time spent by part.
        thorough: whether checks run that are too slow for a search.
        worker: the process at hand.
        refused: number of a candidate to why it does not go on.
        resources: number of a candidate to what its kernels need.
        kernels: number of a candidate to its own kernels (`qimeng.envs.workers.kernel_launches.own_kernels`).
        overlapping: number of a candidate to those of its kernels that may be wrong now and then, if any
            (`qimeng.backend.facts.overlapping_reads`).
        times: number of a candidate to milliseconds of the region alone.
        gate: the gate that the program at hand has reached.
        compilers: compile what is generated into the cache.
    """

    owner: GpuEvaluator
    program: Program
    patch: Patch | None
    cache: str
    trials: Callable[[], Iterable[Trial]]
    clock: Clock
    thorough: bool = False
    worker: Process | None = None
    refused: dict[int, Refusal] = field(default_factory=dict)
    resources: dict[int, Resources] = field(default_factory=dict)
    kernels: dict[int, dict[str, int | None]] = field(default_factory=dict)
    overlapping: dict[int, list[str]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    gate: Gate = Gate.WRITE
    compilers: Compilers | None = None

    def __post_init__(self) -> None:
        """Apply the patch, once for each alternative."""
        count = len(self.patch.alternatives) if self.patch is not None else 0
        if self.patch is None:
            self.candidates = [self.program]
        else:
            self.candidates = [self.patch.apply(self.program, i) for i in range(max(count, 1))]

    # -- gates, in order

    def compile(self, compilers: Compilers) -> None:
        """Compile what is generated into the cache; refuse what fails or does not fit the device.

        If only the code around the kernels failed, because it needs real tensors, the first launch decides.
        """
        self.compilers = compilers
        for i, candidate in enumerate(self.candidates):
            if told := self.owner.forbids(candidate):
                self.refused[i] = Refusal(Gate.COMPILE, *told)
        left = [i for i in range(len(self.candidates)) if i not in self.refused]
        for i, table in zip(left, compilers.programs([self.candidates[i] for i in left]), strict=True):
            kernels = [k for found in table.values() for k in found.kernels]
            failed = next((found for found in table.values() if found.error and not found.host), None)
            if failed is not None:
                self.refused[i] = Refusal(Gate.COMPILE, failed.failure or "compile", failed.error or "")
            elif idle := launches_nothing(self.candidates[i], table):
                self.refused[i] = Refusal(Gate.COMPILE, "not-a-kernel", idle)
            elif too_much := refusal(kernels, self.owner.device):
                self.refused[i] = Refusal(Gate.RESOURCES, "resources", too_much)
            if table:
                self.resources[i] = largest(kernels)
                if overlapping := sorted({k.name for k in kernels if k.overlaps}):
                    self.overlapping[i] = overlapping
                candidate = self.candidates[i]
                parts = [(candidate.implementation(r), table.get(r.signature)) for r in candidate.regions]
                self.kernels[i] = own_kernels((m, c) for m, c in parts if m.generated)

    def regions(self) -> list[int]:
        """Time the alternatives of the patch's target alone and check the fastest; those that go on, in this order.

        A single alternative for a program of one region skips this gate, because the whole program's check includes it.
        Alternatives that are not among the fastest right ones come last, unchecked. Suspicious texts are checked last
        (`qimeng.envs.screening.static_pass`).
        """
        left = [i for i in range(len(self.candidates)) if i not in self.refused]
        left.sort(key=lambda i: gravity(self.candidates[i]))
        if self.patch is None or self.patch.target is None or not self.patch.alternatives or not left:
            return left
        target = self.candidates[0].region(self.patch.target)
        plain = torch_implementation(target).source
        if len(left) == 1 and (
            self.patch.alternatives[left[0]].source == plain or len(self.candidates[0].regions) == 1
        ):
            return left
        with self.owner.turn("check", self.clock):
            reference = RegionReference(self.owner.references, self.candidates[0], target, str(self.owner.folder))
            if len(left) > 1 and self.is_sweep:  # others would get another process for being timed
                left = [i for i in left if self._is_warmed(reference, i)]
        if len(left) > 1:
            with self.owner.turn("time", self.clock, alone=True):
                timed = {i: self._alone(self._time_alternative, reference, i) for i in left}
            self.times = {i: t for i, t in timed.items() if t is not None}
            left = sorted(self.times, key=lambda i: self.times[i])
        right: list[int] = []
        with self.owner.turn("check", self.clock):
            while left and self._may_be_first(left[0], right):
                self.owner.step_aside(self.clock)
                i = left.pop(0)
                if self._alone(self._region_is_right, reference, i):
                    right.append(i)
        return right + left

    def _may_be_first(self, i: int, before: Sequence[int]) -> bool:
        """Whether candidate `i` is to be judged although those `before` it are right."""
        if not before:
            return True
        close = self.times.get(i, 0.0) <= self.times.get(before[0], 0.0) * (1 + CLOSE)
        return len(before) < FINALISTS and close

    def whole(self, order: Sequence[int], rounds: Callable[[Process], tuple[Samples, Samples]]) -> Evaluation:
        """Check and time whole programs; the evaluation of the fastest that is right.

        The first of `order` is judged, the second too where its region was nearly as fast; the others only as long as
        none was right.

        Args:
            order: numbers of the candidates, the most promising first.
            rounds: times the program that a worker has loaded, and eager.
        """
        best: Evaluation | None = None
        for place, i in enumerate(order):
            if best is not None and not self._may_be_first(i, order[:place]):
                break
            self.gate = Gate.PROGRAM
            try:
                found = self._alone(self._whole, i, rounds)
            except WorkerFailed as failed:
                self.drop_worker()
                self.refused[i] = Refusal(self.gate, failed.kind, str(failed))
                continue
            if found is not None and preferred(found, best):
                best = found
        return best or self.refusal()

    def refusal(self) -> Evaluation:
        """The evaluation where nothing passed: the refusal of what came farthest.

        If an accident may have stopped an alternative, that is reported, since the question is then open.
        """
        order = list(Gate)
        number, worst = max(
            self.refused.items(),
            key=lambda item: (item[1].failure not in LASTING, order.index(item[1].gate), -item[0]),
        )
        more = f" ({len(self.refused)} alternatives were refused)" if len(self.refused) > 1 else ""
        return Evaluation(
            worst.gate,
            worst.error + more,
            worst.failure,
            chosen=number if self.patch is not None and self.patch.alternatives else 0,
            resources=self.resources.get(number),
        )

    # -- the worker

    def running(self) -> Process:
        """A worker that is ready; a new one where the last one is gone."""
        if self.worker is None or not self.worker.alive:
            with self.clock.part("start"):
                self.worker = self.owner.start_worker(self.cache)
                self.worker.await_ready()
        return self.worker

    @cached_property
    def is_sweep(self) -> bool:
        """Whether all alternatives may meet one worker: templates and PyTorch wrote them."""
        return self.patch is not None and is_sweep(self.candidates[0], self.patch)

    @property
    def may_share(self) -> bool:
        """Whether a worker may serve this evaluation and others: in a search, of what templates printed."""
        return not self.thorough and all(printed(candidate) for candidate in self.candidates)

    @property
    def resets(self) -> bool:
        """Whether a kernel may ask the L2 cache to keep lines, so that they have to be given up (`Effort.resets`)."""
        return not self.may_share or any(KEEPS_LINES in candidate.source for candidate in self.candidates)

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong where a worker ran it."""
        return any(r.gate not in (Gate.COMPILE, Gate.RESOURCES) for r in self.refused.values())

    def drop_worker(self) -> None:
        """End the worker; the evaluator waits for its end before the next one gets to work."""
        if self.worker is not None:
            self.owner.let_go(self.worker)
            self.worker = None

    # -- parts

    def _alone(self, part: Callable[..., T], *arguments: Any) -> T:
        """What `part` finds out about one alternative.

        The sweep of one template shares a worker. Any other alternative gets a new worker.
        """
        if self.patch is not None and not self.is_sweep and len(self.patch.alternatives) > 1:
            self.drop_worker()
        return part(*arguments)

    def _region_is_right(self, reference: RegionReference, i: int) -> bool:
        assert self.patch is not None
        implementation = self.patch.alternatives[i]
        try:
            answer = self._with_region(reference).call(
                "alternative",
                self.owner.limit_s,
                number=i,
                implementation=implementation,
                expected_bytes=reference.output_bytes,
            )
            judge, expected = self.owner.judge, reference.expected
            error = judge.compare(answer, reference.facts, expected, reference.tally, reference.look_again).error
            self.running().call("release", self.owner.limit_s)
        except WorkerFailed as failed:
            if failed.kind != "error":
                self.drop_worker()
            self._refuse_region(i, failed)
            return False
        if error is not None:
            self.refused[i] = Refusal(
                Gate.REGION,
                "wrong",
                f"region {reference.region.label()} on inputs {reference.draw.distribution!r}: {error}",
            )
        return error is None

    def _with_region(self, reference: RegionReference) -> Process:
        """A worker that holds the region's inputs."""
        worker = self.running()
        if reference.held_by is not worker:
            worker.call(
                "capture",
                self.owner.limit_s,
                source=reference.source,
                draw=reference.draw,
                entries=reference.entries,
                number=reference.number,
            )
            reference.held_by = worker
        return worker

    def _is_warmed(self, reference: RegionReference, i: int) -> bool:
        self.owner.step_aside(self.clock)
        return self._region_runs("warm_alternative", reference, i) is not None

    def _time_alternative(self, reference: RegionReference, i: int) -> float | None:
        answer = self._region_runs("time_alternative", reference, i, effort=replace(SWEEP, resets=self.resets))
        return None if answer is None else median(samples_of(answer[0]).device_ms)

    def _region_runs(self, command: str, reference: RegionReference, i: int, **options: Any) -> Any:
        """The worker's answer to a command about one alternative; None where that failed, and so is refused."""
        assert self.patch is not None
        implementation = self.patch.alternatives[i]
        try:
            return self._with_region(reference).call(
                command, self.owner.limit_s, implementation=implementation, **options
            )
        except WorkerFailed as failed:
            self.drop_worker()
            self._refuse_region(i, failed)
            return None

    def _refuse_region(self, i: int, failed: WorkerFailed) -> None:
        self.refused[i] = Refusal(Gate.REGION, "wrong" if failed.kind == "mutated" else failed.kind, str(failed))

    def _whole(self, i: int, rounds: Callable[[Process], tuple[Samples, Samples]]) -> Evaluation | None:
        owner, candidate = self.owner, self.candidates[i]
        worker = self.running()
        with owner.turn("check", self.clock):
            worker.call("forget_region", owner.limit_s)
            made = [c.digest for c in map(candidate.implementation, candidate.regions) if c.generated]
            worker.call("load", owner.limit_s, source="" if candidate.fallback else candidate.source, digests=made)
            runs = RUNS_OVERLAPPING if i in self.overlapping else RUNS
            verdict = owner.judge.check(worker, self.trials(), lambda: owner.step_aside(self.clock), runs)
            if verdict.ok and self.thorough and not candidate.fallback:
                later = owner.judge.check_guards(worker)
                later = owner.judge.check_repeats(worker) if later.ok else later
                notes = tuple(dict.fromkeys((*verdict.notes, *later.notes)))
                verdict = replace(later, accuracy=verdict.accuracy, notes=notes)
            if verdict.failure is not None:
                self.refused[i] = Refusal(Gate.PROGRAM, verdict.failure, verdict.error or "")
                return None
            self.gate = Gate.TIMING
            owner.begin_timing()
            peak_bytes = amount_of(worker.call("peak", owner.limit_s, seed=owner.draw_seed())[0])
            eager_peak_bytes = owner.baselines_process.peak()
        with self.clock.part("start"):
            owner.settle()
        with owner.turn("time", self.clock, alone=True):
            for attempt in range(CLOCK_ROUNDS):
                with Watch(owner.throttle) as watch:
                    samples, eager = rounds(worker)
                timing = samples.timing()
                if watch.slowed:
                    owner.forget_eager()
                if watch.slowed and attempt + 1 < CLOCK_ROUNDS:
                    time.sleep(COOL_S)
                    continue
                problem = self._implausible(worker, timing, eager.timing())
                if problem is None or problem.failure not in ("clock", NOT_TIMED):
                    break
            if problem is not None:
                self.refused[i] = problem
                return None
            found = Evaluation(
                Gate.PASSED,
                timing=timing,
                eager=eager.timing(),
                chosen=i if self.patch is not None else 0,
                accuracy=verdict.accuracy,
                resources=self.resources.get(i),
                peak_bytes=None if peak_bytes is None else int(peak_bytes),
                eager_peak_bytes=eager_peak_bytes,
                notes=(*verdict.notes, *self._remarks(timing), *self._on_clocks(watch), *self._on_overlaps(i)),
            )
            found = self._profiled(worker, candidate, found)
        if self.may_share:
            with owner.turn("check", self.clock):
                verdict = owner.check_timed(worker)
            if verdict.failure is not None:
                self.refused[i] = Refusal(Gate.TIMING, verdict.failure, verdict.error or "")
                return None
        return self._proven(worker, i, found)

    def _implausible(self, worker: Process, timing: Timing, eager: Timing) -> Refusal | None:
        """Why the times cannot be believed.

        The datasheet's limit applies on a GPU only. The judge's own clock decides on every reported time. Template
        programs are checked with it in the final verification only.
        """
        owner = self.owner
        if owner.torch_device.type == "cuda" and timing.device_ms < SHARE * owner.least_ms:
            text = (
                f"{timing.device_ms:.4f} ms is less than reading the inputs and writing the outputs takes at "
                f"{owner.device.bandwidth_gbs:g} GB/s ({owner.least_ms:.4f} ms)"
            )
            return Refusal(Gate.TIMING, "too-fast", text)
        if self.may_share:
            return None
        if slowed := owner.baselines_process.slowed(eager.device_ms):
            return Refusal(Gate.TIMING, NOT_TIMED, f"not timed: {slowed}")
        verdict = owner.outer_clock.check(worker, timing.device_ms, eager.device_ms)
        return None if verdict.failure is None else Refusal(Gate.TIMING, verdict.failure, verdict.error or "")

    def _remarks(self, timing: Timing) -> tuple[str, ...]:
        """Remarks on accepted times."""
        owner = self.owner
        remarks = owner.references.remarks
        if owner.graph is None:
            return remarks
        note = above_peak(owner.graph, timing.device_ms, owner.device, owner.spec.mode)
        return remarks if note is None else (*remarks, note)

    def _on_overlaps(self, i: int) -> tuple[str, ...]:
        """Remarks on kernels that a bug of the assembler may affect."""
        return tuple(OVERLAPS.format(name, RUNS_OVERLAPPING) for name in self.overlapping.get(i, ()))

    def _on_clocks(self, watch: Watch) -> tuple[str, ...]:
        """Remarks on the GPU's clocks during the measurement."""
        owner = self.owner
        if owner.torch_device.type != "cuda" and owner.throttle is None:
            return ()
        if owner.throttle is None:
            return (f"GPU throttling was not monitored during this measurement: {owner.unwatched}",)
        if watch.slowed:
            return (f"the GPU was throttled in every measurement: {watch.slowed}",)
        return ("the GPU reached its power limit during this measurement",) if watch.seen & POWER_CAP else ()

    def _profiled(self, worker: Process, candidate: Program, found: Evaluation) -> Evaluation:
        """`found` with the time of each region."""
        owner = self.owner
        implementations = [candidate.implementation(r) for r in candidate.called]
        entries = [] if candidate.fallback else [m.entry for m in implementations]
        data, _ = worker.call("profile", owner.limit_s, seed=owner.draw_seed(), entries=entries, repeats=PROFILE_ROUNDS)
        found = replace(found, prepare_ms=amount_of(entry_of(data, "prepare_ms")))
        told = entry_of(data, "regions")
        rounds = [times_of(r) for r in told] if isinstance(told, list) else []
        if not rounds or any(len(r) != len(entries) for r in rounds):
            return found
        times = [median(r[k] for r in rounds) for k in range(len(entries))]
        total = sum(times)
        own = sum(t for t, m in zip(times, implementations, strict=True) if m.generated)
        shares = {region.id: t for region, t in zip(candidate.called, times, strict=True)}
        return replace(found, region_ms=shares, generated_share=own / total if total else None)

    def _proven(self, worker: Process, i: int, found: Evaluation) -> Evaluation | None:
        """`found` with the share of the program's own kernels; None where the profiler contradicts what was told.

        Other kernels may do the work of generated regions, or kernels may take longer than the events say. Both are
        measured again alone on the device before they count, since checks of other runs make kernels slower. The
        profiler takes seconds. It is used in a final verification, and for kernels that no template printed.
        """
        owner, candidate, claimed, told = self.owner, self.candidates[i], found.generated_share, found.ms
        if not any(self._is_asked(candidate, r) for r in candidate.regions):
            return found
        try:
            own = self._named(worker, i) if claimed else {}
            with owner.turn("check", self.clock):
                launches = self._launches(worker)
            if told is not None and _is_longer(launches, told):
                with owner.turn("time", self.clock, alone=True):
                    launches = self._launches(worker)
            if told is not None and _is_longer(launches, told):
                text = f"events say {told:.3f} ms a call, the profiler's kernels take {busy_ms(launches):.3f} ms"
                raise _Refused(Refusal(Gate.TIMING, "clock", text))
            if not claimed:
                return found
            share = own_share(launches, own)
            if share is not None and share < LEAST * claimed:
                with owner.turn("time", self.clock, alone=True):
                    share = max(share, own_share(self._launches(worker), own) or 0.0)
        except _Refused as refused:
            self.refused[i] = refused.refusal
            return None
        if share is None:
            return replace(found, notes=(*found.notes, UNPROVEN))
        if share < LEAST * claimed:
            text = (
                f"generated regions take {claimed:.0%} of the time, but their own kernels only {share:.1%} of all "
                "kernels' time: PyTorch, a library or another compiler does the work"
            )
            self.refused[i] = Refusal(Gate.TIMING, "not-a-kernel", text)
            return None
        return replace(found, generated_share=share)

    def _named(self, worker: Process, i: int) -> dict[str, int | None]:
        """Names of the candidate's own kernels.

        In a final verification of an untrusted program, the worker gets the program with secret kernel names from here
        on, because names in the text prove nothing.
        """
        candidate = self.candidates[i]
        if not self.thorough or printed(candidate) or self.compilers is None:
            return self.kernels.get(i, {})
        program, own = with_secret_names(candidate)
        with self.clock.part("compile"):
            made = self.compilers.programs([program])[0]
        failed = next((c.error for c in made.values() if c.error and not c.host), None)
        if failed is not None:
            raise _Refused(Refusal(Gate.TIMING, "not-a-kernel", f"{UNNAMEABLE}: {failed}"))
        digests = [c.digest for c in map(program.implementation, program.regions) if c.generated]
        try:
            worker.call("load", self.owner.limit_s, source=program.source, digests=digests)
        except WorkerFailed as error:
            if error.kind != "error":
                raise
            raise _Refused(Refusal(Gate.TIMING, "not-a-kernel", f"{UNNAMEABLE}: {error}")) from error
        return own

    def _launches(self, worker: Process) -> list[Launch]:
        """The kernels of a call, as the profiler sees them; what the call returned has to be right."""
        launches, verdict = self.owner.judge.profiled(worker, max(self.owner.limit_s, PROFILER_S))
        if verdict.failure is not None:
            raise _Refused(Refusal(Gate.TIMING, verdict.failure, verdict.error or ""))
        return launches

    def _is_asked(self, program: Program, region: Region) -> bool:
        """Whether the profiler has to look at what computes `region`."""
        written = program.implementation(region)
        if self.thorough:
            return written.generated or written.source != torch_implementation(region).source
        return written.generated and not known(region, written)


class _Refused(Exception):
    """Ends the profiling of a candidate."""

    def __init__(self, refusal: Refusal):
        super().__init__(refusal.error)
        self.refusal = refusal


def _is_longer(launches: Sequence[Launch], told_ms: float) -> bool:
    """Whether the profiler's kernels take longer than the events have told."""
    return busy_ms(launches) > BUSY_SHARE * told_ms + BUSY_MS


__all__ = ["Refusal", "Run"]
