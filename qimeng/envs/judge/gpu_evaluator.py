"""The evaluator for a device in this machine: every program is checked against float64 and timed.

Deals in the parts of the judge put together: references, workers, baselines, the device's lock. The gates themselves
are in `qimeng.envs.judge.gates`. Knows nothing about actions, coders or planners.
"""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from qimeng.device import Device, target_device
from qimeng.device_lock import DeviceLock, lock_path
from qimeng.envs.cost.time_bounds import least_ms
from qimeng.envs.judge.baseline import EAGER, Baseline
from qimeng.envs.judge.gates import Run
from qimeng.envs.judge.judge_clock import OuterClock
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.throttle import Reader, reader_for
from qimeng.envs.judge.time_spent import Clock, now_seconds
from qimeng.envs.judge.torch_compile import TorchCompile, compiled_name
from qimeng.envs.judge.verdicts import Judge, Verdict
from qimeng.envs.sandbox import DEFAULT
from qimeng.envs.screening.sanitizer import check_tools, sanitize, unwatched
from qimeng.envs.screening.static_pass import advised, judged_text
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.foreign_folders import remove_folder
from qimeng.envs.workers.forkserver import (
    FEW_QUEUES,
    ForkServer,
    Process,
    WorkerFailed,
    plain_environment,
    readable_within,
)
from qimeng.envs.workers.kept_output import call_seed
from qimeng.envs.workers.shared_server import shared_server
from qimeng.envs.workers.stopwatch import Effort, Samples
from qimeng.envs.workers.worker import Draw, Setup
from qimeng.envs.workers.worker_reports import samples_of
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, Evaluator, Gate, Patch, Timing
from qimeng.program.program import Program
from qimeng.spec import KernelSpec

SEARCH = Effort(min_ms=10.0, min_calls=5, limit_s=0.2, warmup=2, error=0.004)
"""Effort of one round of timing a program during a search."""
SEARCH_EAGER = Effort(min_ms=3.0, min_calls=5, limit_s=0.15, warmup=2, error=0.004, resets=False)
"""The same of eager."""
SEARCH_ROUNDS = 2
"""Each round gets other memory from the driver, which is most of the noise where memory binds. Eager is timed once for
each program: its earlier rounds are as good."""
FINAL = Effort(min_ms=3.0, min_calls=5, limit_s=0.15, warmup=2)
"""Effort of one round of the final timing; candidate and baselines take turns."""
FINAL_ROUNDS = 5
SERVES = 32
"""Evaluations that one worker serves where templates printed all that it runs. With a CUDA context for each, 20
evaluators on four H200s came to 1.2 evaluations a second together, and each took ten times as long as alone: a machine
opens and closes contexts one at a time. (The fork server read all processes for each that ended, which was slow too.)
"""
SETTLE_S = 5.0
"""Seconds after which a worker that does not become ready is waited for no longer."""


class GpuEvaluator(Evaluator):
    """Judges programs for one specification by running them.

    Candidates run in processes of their own (see `qimeng.envs.workers.worker`); a crash, a hang, an illegal access or
    memory that runs out is an `Evaluation` that says so, and the next candidate meets a fresh process. During a search,
    programs that templates and PyTorch alone wrote (`qimeng.envs.screening.origin`) share a worker as long as all is
    well in it.

    Args:
        spec: what is computed.
        graph: its graph, where it could be captured; bounds and tolerances are derived from it.
        device: the table row that kernels are compiled for and times are held against; by default that of this machine.
        torch_device: PyTorch's name of the device that programs run on. ``"cpu"`` runs programs on PyTorch only, with
            wall-clock times: for tests of the judge itself.
        compile_threads: kernels compiled at a time; by default as many as PyTorch uses threads on the CPU.
        timeout_s: seconds that a call of a candidate, or compiling one implementation, may take.
        trials: draws of inputs and parameters that a program must pass.
        server: starts the processes; by default one that all evaluators of this process share.
        sandbox: what workers and compiling processes give up before candidates run in them: ``"full"`` (every layer
            that the machine has), ``"basic"`` (no new privileges) or ``"off"``; see `qimeng.envs.sandbox`.
        any_text: judge untrusted texts even if they use forbidden constructs (`qimeng.envs.screening.allowed_text`), to
            test the other checks.
        sanitize: tools of compute-sanitizer that the final verification runs; see
            `qimeng.envs.screening.sanitizer.TOOLS`.
        throttle: reads why the GPU is throttled (see `qimeng.envs.judge.throttle`); by default NVML, if available.
        clock: wall seconds, for `Evaluation.seconds`.

    Attributes:
        version: part of the key under which evaluations are stored.
        estimated: False: times are measured.
        references: the expected results.
        compiled: torch.compile's programs, which the final verification times where they were begun.
        turns: times of the last final verification: ``"candidate"``, ``"eager"`` and torch.compile's modes, in turns.
        spent: wall seconds by part, from the making of this on, over all evaluations.
    """

    version = 14
    estimated = False

    def __init__(
        self,
        spec: KernelSpec,
        graph: OpGraph | None = None,
        *,
        device: Device | None = None,
        torch_device: str = "cuda",
        compile_threads: int | None = None,
        timeout_s: float = 60.0,
        trials: int = 3,
        server: ForkServer | None = None,
        sandbox: str = DEFAULT,
        any_text: bool = False,
        sanitize: Sequence[str] = (),
        throttle: Reader | None = None,
        clock: Callable[[], float] = now_seconds,
    ):
        self.spec = spec
        self.graph, self.clock, self.timeout_s, self.trials = graph, clock, timeout_s, trials
        self.torch_device = torch.device(torch_device, 0) if torch_device == "cuda" else torch.device(torch_device)
        self.device = device or target_device()
        self.compile_threads = compile_threads or torch.get_num_threads()
        self.server = server or shared_server()
        self.sandbox, self.any_text = sandbox, any_text
        self.sanitize_with(sanitize)
        self._layers: tuple[str, ...] = ()
        self.throttle, self.unwatched = throttle, ""
        if throttle is None and self.torch_device.type == "cuda":
            reader = reader_for(self.torch_device)
            self.throttle, self.unwatched = (None, reader) if isinstance(reader, str) else (reader, "")
        self.turns: dict[str, Timing] = {}
        self._eager: deque[Samples] = deque(maxlen=SEARCH_ROUNDS)
        self._timed = _TimedCalls()
        self.draw_seed = partial(random.SystemRandom().getrandbits, 62)
        self.folder = Path(tempfile.mkdtemp(prefix="qimeng_judge_"))
        cuda = self.torch_device.type == "cuda"
        self._lock = DeviceLock(lock_path(self.torch_device)) if cuda else None
        spec.domains  # noqa: B018  inferred once, here, to travel with the spec: a worker would take half a second
        self._setup = Setup(spec.to_bytes(), spec.mode, str(self.torch_device))
        self.baselines_process = Baseline(self.server, self._setup, self.draw_seed, timeout_s)
        path = self._lock.path if self._lock else ""
        self.compiled = TorchCompile(self._setup, self.draw_seed, timeout_s, self.compile_threads, path)
        self._cache = self._new_cache()
        self._compilers = self._compile_into(self._cache)
        self._spare: Process | None = None
        self._ending: list[Process] = []
        self._spare_cache = ""
        self._kept: Process | None = None
        self._served = 0
        self._prefetch(self._cache)
        opening = Clock(clock)
        try:
            with self.turn("reference", opening):
                self.references = References(
                    spec, graph, self.torch_device, self.draw_seed, between=lambda: self.step_aside(opening)
                )
        except BaseException:
            self._end()
            raise
        self.spent = dict(opening.seconds)
        self.judge = Judge(self.references, lambda: self.limit_s)
        operators = sum(1 for _ in graph.ops()) if graph is not None and graph.nodes else None
        self.outer_clock = OuterClock(self.judge, self.baselines_process, operators)
        self.least_ms = least_ms(graph, self.device) if graph is not None and graph.nodes else 0.0

    @property
    def limit_s(self) -> float:
        """Seconds that one command of a worker may take: that of 200 calls of eager and 10 more, or `timeout_s`."""
        eager = self.baselines_process.eager_ms
        return self.timeout_s if eager is None else min(self.timeout_s, 10.0 + 0.2 * eager)

    def evaluate(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """Judge `program` with the best of the patch's alternatives: the gates in order, the first refusal ends it."""
        clock = Clock(self.clock)
        run = Run(self, program, patch, self._cache, lambda: self.references.trials(self.trials), clock)
        return self._through_gates(run, self._compilers, lambda w: self._search_rounds(w, run.resets))

    def final(self, program: Program) -> Evaluation:
        """Judge `program` again: in a fresh process, compiled anew, on every distribution, in turns with baselines."""
        clock = Clock(self.clock)
        with clock.part("baselines"):
            self.compiled.wait()
        cache = self._new_cache()
        run = Run(self, program, None, cache, self.references.every_distribution, clock, thorough=True)
        try:
            found = self._through_gates(run, self._compile_into(cache), lambda w: self._final_rounds(w, clock))
        finally:
            remove_folder(cache)
        if not found.ok:
            return found
        compiled = {m: self.turns[compiled_name(m)] for m in self.compiled.ready if compiled_name(m) in self.turns}
        failed = tuple(f"torch.compile {m} is not timed: {reason}" for m, reason in self.compiled.failed.items())
        found = replace(found, compiled=compiled, notes=(*found.notes, *failed))
        return found if program.fallback else self._sanitized(program, found, run.kernels.get(0, {}).keys(), clock)

    def sanitize_with(self, tools: Sequence[str]) -> None:
        """Have the final verification run these tools of compute-sanitizer."""
        self.sanitize = check_tools(tools)

    def compare_with(self, modes: Sequence[str], limit_s: float) -> None:
        """Make torch.compile's programs ready in the background; the final verification times them in turns."""
        self.compiled.begin(modes, limit_s)

    def close(self) -> None:
        """End the processes of this evaluator, remove its folder, give its memory back."""
        self._end()
        self.references.release()

    def _end(self) -> None:
        if self._spare is not None:
            self._ending.append(self._spare)
            self._spare = None
        self._drop_kept()
        for process in self._ending:
            process.kill(wait=False)
        self.compiled.close()
        self.baselines_process.close()
        while self._ending:
            self._ending.pop().kill()
        remove_folder(self.folder)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start_worker(self, cache: str) -> Process:
        """A fresh worker, with Triton's cache in folder `cache`, that answers once it is ready.

        It opens the device while others may be timed: for a few milliseconds, which medians do not see. That of this
        evaluator's own next evaluation is ready before anything is timed (`settle`). In a search it has few queues on
        the device; a final verification, which has a cache of its own, gets what PyTorch gets.
        """
        environment = FEW_QUEUES if cache == self._cache else {}
        if self.sandbox == "full":
            setup = replace(self._setup, compiled=cache)
            worker = self.server.start(
                "qimeng.envs.workers.worker:main", setup, environment=environment, sandbox="full", readable=[cache]
            )
        else:
            environment = {**environment, "TRITON_CACHE_DIR": cache}
            worker = self.server.start(
                "qimeng.envs.workers.worker:main", self._setup, environment=environment, sandbox=self.sandbox
            )
        worker.send("ready")
        return worker

    def forbids(self, program: Program) -> tuple[str, str] | None:
        """Class of the failure and why, where the text of `program` is not even run; see `judged_text`."""
        return judged_text(program, self.sandbox, self.any_text)

    def begin_timing(self) -> None:
        """Start timing a program that a worker has just loaded, with new secret parameters."""
        self._timed = _TimedCalls(self.references.parameter_seed())

    def check_timed(self, worker: Process) -> Verdict:
        """Whether the output of a timed call of the program is right; the program is still loaded."""
        return self.judge.check_timed(worker, self._timed.draw) if self._timed.rounds else Verdict()

    def forget_eager(self) -> None:
        """Drop eager's times, because the GPU was throttled during their measurement."""
        self._eager.clear()

    def settle(self) -> None:
        """Wait until the worker that was started for the next evaluation is ready, so that it disturbs no measurement.

        It has had the whole check to open the device, so that there is hardly ever anything to wait for.
        """
        if self._spare is not None and self._spare.alive:
            readable_within([self._spare.channel_fd, self._spare.status_fd], SETTLE_S)

    def let_go(self, worker: Process) -> None:
        """End a worker without waiting for its end."""
        worker.kill(wait=False)
        self._ending.append(worker)

    @contextmanager
    def turn(self, part: str, clock: Clock, alone: bool = False) -> Iterator[None]:
        """Hold the device in the block. Its seconds count as `part`, those before it as ``"wait"``.

        Args:
            part: what the block is about.
            clock: of the evaluation.
            alone: True to measure; else shared with others that do not measure.
        """
        with ExitStack() as stack:
            if self._lock is not None:
                with clock.part("wait"):
                    stack.enter_context(self._lock.alone() if alone else self._lock.beside())
            with clock.part(part):
                yield

    def step_aside(self, clock: Clock) -> None:
        """Called between two parts of a check: let runs that wait to measure on the device go first."""
        if self._lock is not None:
            with clock.part("wait"):
                self._lock.step_aside()

    # -- parts

    def _sanitized(self, program: Program, found: Evaluation, own: Collection[str], clock: Clock) -> Evaluation:
        """`found` with what compute-sanitizer says in its notes, or the refusal by one of its tools."""
        if self.sanitize and (told := unwatched(program)):
            found = replace(found, notes=(*found.notes, told))
        for tool in self.sanitize:
            with self.turn("sanitize", clock):
                report = sanitize(
                    tool,
                    program.source,
                    self._setup.spec,
                    str(self.torch_device),
                    self.folder / "sanitizer",
                    own,
                    environment=plain_environment(),
                )
            if report.refuses:
                return Evaluation(Gate.PROGRAM, report.text, "sanitizer", notes=found.notes, sandbox=found.sandbox)
            found = replace(found, notes=(*found.notes, report.text), seconds=dict(clock.seconds))
        return found

    def _through_gates(
        self, run: Run, compilers: Compilers, rounds: Callable[[Process], tuple[Samples, Samples]]
    ) -> Evaluation:
        clock, found = run.clock, None
        try:
            if not self._has_kept(run):
                self._drop_kept()  # what it holds would be missing
                self._prefetch(run.cache)
            with clock.part("compile"):
                self.baselines_process.start()
                run.compile(compilers)
            if len(run.refused) == len(run.candidates):
                return self._told(run, run.refusal())
            with clock.part("start"):
                run.worker = self._take_worker(run)
                if not run.may_share:
                    self._prefetch(self._cache)  # while this one is checked
                self.baselines_process.wait()
            order = run.regions()
            found = self._told(run, run.whole(order, rounds) if order else run.refusal())
            return found
        except WorkerFailed as failed:
            return self._told(run, Evaluation(Gate.PROGRAM, f"the judge could not go on: {failed}", "judge"))
        finally:
            self._part_with(run, found)
            if self._kept is None and not run.thorough:  # a final verification is the last one, as a rule
                self._prefetch(self._cache)
            self.references.tidy()

    def _told(self, run: Run, found: Evaluation) -> Evaluation:
        for part, seconds in run.clock.seconds.items():
            self.spent[part] = self.spent.get(part, 0.0) + seconds
        found = advised(found, run.candidates[found.chosen])
        return replace(found, configurations=len(run.candidates), seconds=dict(run.clock.seconds), sandbox=self._layers)

    def _search_rounds(self, worker: Process, resets: bool) -> tuple[Samples, Samples]:
        found: dict[str, Samples] = {}
        for number in range(SEARCH_ROUNDS):
            if number == 0 or len(self._eager) < SEARCH_ROUNDS:
                with worker.paused():
                    self._eager.append(self.baselines_process.time(SEARCH_EAGER))
            _add(found, "candidate", self._time(worker, replace(SEARCH, resets=resets)))
        for samples in self._eager:
            _add(found, EAGER, samples)
        return found["candidate"], found[EAGER]

    def _final_rounds(self, worker: Process, clock: Clock) -> tuple[Samples, Samples]:
        found: dict[str, Samples] = {}
        for _ in range(FINAL_ROUNDS):
            with worker.paused():
                _add(found, EAGER, self.baselines_process.time(FINAL))
                with clock.part("baselines"):
                    self._time_compiled(found)
            _add(found, "candidate", self._time(worker, FINAL))
        self.turns = {name: samples.timing() for name, samples in found.items()}
        return found["candidate"], found[EAGER]

    def _time_compiled(self, found: dict[str, Samples]) -> None:
        """Time each mode of torch.compile once; one that fails is given up."""
        for mode in tuple(self.compiled.ready):
            try:
                _add(found, compiled_name(mode), self.compiled.time(mode, FINAL))
            except WorkerFailed as failed:
                self.compiled.give_up(mode, str(failed))
                found.pop(compiled_name(mode), None)

    def _time(self, worker: Process, effort: Effort) -> Samples:
        seed = self.draw_seed()
        data, _ = worker.call(
            "time",
            self.limit_s,
            seed=seed,
            effort=effort,
            parameter_seed=self._timed.parameter_seed,
            mutated=self.references.mutated,
        )
        samples = samples_of(data)
        self._timed.rounds.append((seed, effort.most_calls))
        return samples

    def _has_kept(self, run: Run) -> bool:
        """Whether a worker that served before is there for `run`."""
        return run.may_share and self._kept is not None and self._kept.alive

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self.let_go(self._kept)
            self._kept = None

    def _take_worker(self, run: Run) -> Process:
        """The worker that served before, where `run` may share one; else the one started last, once it is ready."""
        while self._ending:
            self._ending.pop().kill()
        if self._has_kept(run):
            kept, self._kept = self._kept, None
            assert kept is not None
            return kept
        worker, self._spare = self._spare, None
        assert worker is not None
        self._layers = tuple(str(name) for name in worker.await_ready()["sandbox"])
        if run.may_share:
            self._served = 0
        return worker

    def _part_with(self, run: Run, found: Evaluation | None) -> None:
        """Keep the worker of `run` for the next one where all went well in it, or end it."""
        worker = run.worker
        well = found is not None and found.ok and run.may_share and not run.has_failed
        if well and worker is not None and worker.alive and self._kept is None and self._served < SERVES:
            with suppress(WorkerFailed):
                worker.call("rest", self.limit_s)
                self._kept, run.worker = worker, None
                self._served += 1
        run.drop_worker()

    def _prefetch(self, cache: str) -> None:
        """Start the next worker now, so that it is ready when it is needed."""
        if self._spare is not None and (self._spare_cache != cache or not self._spare.alive):
            self._drop_spare()
        if self._spare is None:
            self._spare, self._spare_cache = self.start_worker(cache), cache

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    def _compile_into(self, cache: str) -> Compilers:
        return Compilers(self.server, self.device, cache, self.compile_threads, self.timeout_s, self.sandbox)

    def _new_cache(self) -> str:
        return tempfile.mkdtemp(prefix="triton_", dir=self.folder)


@dataclass
class _TimedCalls:
    """Which inputs the timed calls of a program had.

    Attributes:
        parameter_seed: of the change to the parameters.
        rounds: seed and most calls, warm-up included, of each measurement so far.
    """

    parameter_seed: int | None = None
    rounds: list[tuple[int, int]] = field(default_factory=list)

    def draw(self, number: int, call: int) -> Draw:
        """Inputs and parameters of a call in measurement `number`; a ValueError for one that there was not."""
        if not 0 <= number < len(self.rounds) or not 0 <= call < self.rounds[number][1]:
            raise ValueError(f"call {call} of round {number}")
        return Draw(call_seed(self.rounds[number][0], call), "given", self.parameter_seed)


def _add(table: dict[str, Samples], name: str, samples: Samples) -> None:
    table[name] = table[name] + samples if name in table else samples


__all__ = ["GpuEvaluator"]
