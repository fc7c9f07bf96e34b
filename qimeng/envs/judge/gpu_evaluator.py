"""The evaluator for a device in this machine: every program is checked against float64 and timed.

Deals in the parts of the judge put together: references, workers, baselines, the device's lock. The gates are listed in
`qimeng.envs.judge.gpu_gates`. Knows nothing about actions, coders or planners.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from qimeng.device import Device, current_card, target_device
from qimeng.device_lock import DeviceLock, lock_path
from qimeng.envs.cost.time_bounds import least_ms
from qimeng.envs.errors.accuracy import is_float
from qimeng.envs.judge.baseline import Baseline
from qimeng.envs.judge.device_memory import DeviceMemory
from qimeng.envs.judge.device_turns import DeviceTurns
from qimeng.envs.judge.gates.gpu_run import Equipment, GpuRun
from qimeng.envs.judge.gates.library_code import waited_for
from qimeng.envs.judge.gates.pipeline import Pipeline
from qimeng.envs.judge.gpu_gates import CHECK_GATES, FINAL_GATES, SEARCH_GATES
from qimeng.envs.judge.judge_clock import OuterClock
from qimeng.envs.judge.library_compilers import LibraryCompilers
from qimeng.envs.judge.program_times import ProgramTimes
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.sanitized import sanitized
from qimeng.envs.judge.throttle import Reader, reader_for
from qimeng.envs.judge.time_spent import Clock, now_seconds
from qimeng.envs.judge.torch_compile import TorchCompile, compiled_name
from qimeng.envs.judge.trials import SEARCH_TRIALS
from qimeng.envs.judge.verdicts import Judge
from qimeng.envs.judge.worker_supply import WorkerSupply
from qimeng.envs.sandbox import DEFAULT
from qimeng.envs.screening.origin import printed
from qimeng.envs.screening.sanitizer import check_tools
from qimeng.envs.screening.static_pass import advised
from qimeng.envs.workers.answering import no_verdict
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.compile_elsewhere import OffloadingCompilers
from qimeng.envs.workers.foreign_folders import remove_folder
from qimeng.envs.workers.forkserver import ForkServer, WorkerFailed
from qimeng.envs.workers.model_libraries import library_modules
from qimeng.envs.workers.shared_server import shared_server
from qimeng.envs.workers.worker_setup import Setup
from qimeng.errors import DeviceError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import (
    Asked,
    EngineReport,
    Evaluation,
    EvaluationRequest,
    Gate,
    ReferenceFacts,
    SerialEvaluator,
    Ticket,
)
from qimeng.interfaces.faults import MACHINE_FAILED
from qimeng.library import COMPILE_S, compiles
from qimeng.spec import KernelSpec

TIMEOUT_S = 60.0
"""Seconds that a call, or compiling one implementation, may take."""
SPARE_CORES = 8
"""Cores from which on kernels of a step to come are compiled beside what is judged now."""
MEMORY_WAIT_S, LOOK_EVERY_S = 60.0, 0.25
"""Seconds that an evaluation waits at most for memory that others hold on the device, and between two looks."""


_draw_seed = partial(random.SystemRandom().getrandbits, 62)
"""Secret seeds."""


def _setup_of(spec: KernelSpec, device: torch.device) -> Setup:
    """What processes that run `spec` begin with."""
    spec.domains  # noqa: B018  inferred once, here, to travel with the spec: a worker would take half a second
    return Setup(spec.to_bytes(), spec.mode, str(device))


def begin_compiled(spec: KernelSpec, modes: Sequence[str], limit_s: float) -> TorchCompile:
    """torch.compile's programs of `spec` on this machine's GPU, compiled from now on; the caller closes them.

    Args:
        spec: what is computed.
        modes: of torch.compile, in this order.
        limit_s: seconds that one mode may take.

    Raises:
        ValueError: torch.compile has no such mode.
    """
    device = torch.device("cuda", 0)
    threads, lock = torch.get_num_threads(), lock_path(device)
    made = TorchCompile(_setup_of(spec, device), _draw_seed, TIMEOUT_S, threads, lock, spec.is_long)
    made.begin(modes, limit_s)
    return made


class GpuEvaluator(SerialEvaluator):
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
        throttle: reads why the GPU is throttled (see `qimeng.envs.judge.throttle`); by default NVML, if available.
        clock: wall seconds, for `Evaluation.seconds`.
        beside: judges like this one that are open at a time; they share the memory that is for trials.
        compiled: torch.compile's programs, where some were begun before (`begin_compiled`); it is closed with this.
        libraries: of another judge on this device, which closes them: what that has compiled is there.
        compilers: likewise, of kernels.

    Raises:
        DeviceError: PyTorch's own run of the specification needs more memory than is free on the device.

    Attributes:
        version: part of the key under which evaluations are stored.
        estimated: False: times are measured.
        card: the GPU, as it calls itself; None on the CPU.
        references: the expected results.
        compiled: torch.compile's programs, which the final verification times where they were begun.
        times: takes the programs' times.
        turns: on the device.
        compilers: of kernels for a search.
        memory: turns on its memory: a program that ran out of it beside others is judged again without them.
        workers: the processes that candidates run in.
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
        timeout_s: float = TIMEOUT_S,
        trials: int = SEARCH_TRIALS,
        server: ForkServer | None = None,
        sandbox: str = DEFAULT,
        any_text: bool = False,
        throttle: Reader | None = None,
        clock: Callable[[], float] = now_seconds,
        beside: int = 1,
        compiled: TorchCompile | None = None,
        libraries: LibraryCompilers | None = None,
        compilers: Compilers | None = None,
    ):
        self.spec = spec
        self.graph, self.clock, self.timeout_s, self.trials = graph, clock, timeout_s, trials
        self.torch_device = torch.device(torch_device, 0) if torch_device == "cuda" else torch.device(torch_device)
        self.device = device or target_device()
        self.compile_threads = compile_threads or torch.get_num_threads()
        self.server = server or shared_server()
        self.server.prepare(library_modules(spec))
        self.sandbox, self.any_text = sandbox, any_text
        self.card = current_card() if self.torch_device.type == "cuda" else None
        unwatched = ""
        if throttle is None and self.torch_device.type == "cuda":
            reader = reader_for(self.torch_device)
            throttle, unwatched = (None, reader) if isinstance(reader, str) else (reader, "")
        self.draw_seed = _draw_seed
        self.folder = Path(tempfile.mkdtemp(prefix="qimeng_judge_"))
        cuda = self.torch_device.type == "cuda"
        self.turns = DeviceTurns(DeviceLock(lock_path(self.torch_device)) if cuda else None)
        self.memory = DeviceMemory(self.turns.path)
        self._setup = _setup_of(spec, self.torch_device)
        self.baselines_process = Baseline(self.server, self._setup, self.draw_seed, timeout_s)
        self.compiled = compiled or TorchCompile(
            self._setup, self.draw_seed, timeout_s, self.compile_threads, self.turns.path, spec.is_long
        )
        self._owns_libraries = libraries is None
        self.libraries = libraries or LibraryCompilers(
            spec.mode, str(self.torch_device), self.folder / "libraries", self.compile_threads, self.turns.path
        )
        self._owns_compilers = compilers is None
        self._cache = (compilers and compilers.cache) or self._new_cache()
        self.compilers = compilers or OffloadingCompilers(*self._compiling(self._cache))
        self._anew: tuple[str, Compilers] | None = None
        self.workers = WorkerSupply(
            self.server, self._setup, sandbox, self._cache, lambda: self.limit_s, [str(self.libraries.folder)]
        )
        self.workers.prefetch()
        opening = Clock(clock)
        try:
            found = self.memory.use(partial(self._opened, opening), lambda f: isinstance(f, Exception), opening)
        except BaseException:
            self._end()
            raise
        if isinstance(found, Exception):
            self._end()
            raise DeviceError(f"{spec.name} does not fit the free memory of {self.torch_device}: {found}")
        self.references = found
        if beside > 1:
            plan = self.references.plan
            self.references.plan = replace(plan, pool_bytes=plan.pool_bytes // beside)
        self.spent = dict(opening.seconds)
        self.judge = Judge(self.references, lambda: self.limit_s)
        captured = graph is not None and bool(graph.nodes)
        operators = sum(1 for _ in graph.ops()) if graph is not None and captured else None
        self.outer_clock = OuterClock(self.judge, self.baselines_process, operators)
        self.times = ProgramTimes(
            self.references, self.judge, self.baselines_process, self.compiled, lambda: self.limit_s
        )
        self._parts = Equipment(
            graph=graph,
            torch_device=self.torch_device,
            references=self.references,
            judge=self.judge,
            baselines=self.baselines_process,
            outer_clock=self.outer_clock,
            times=self.times,
            workers=self.workers,
            libraries=self.libraries,
            turns=self.turns,
            folder=self.folder,
            least_ms=least_ms(graph, self.device) if graph is not None and captured else 0.0,
            limit=lambda: self.limit_s,
            throttle=throttle,
            unwatched=unwatched,
        )

    @property
    def limit_s(self) -> float:
        """Seconds that one command of a worker may take: that of 200 calls of eager and 10 more, or `timeout_s`."""
        eager = self.baselines_process.eager_ms
        return self.timeout_s if eager is None else min(self.timeout_s, 10.0 + 0.2 * eager)

    @property
    def report(self) -> EngineReport:
        """Wall seconds by part, and what the reference says of the specification."""
        known = self.references
        facts = ReferenceFacts(known.degenerate, known.eager_agrees, known.exact_agrees)
        return EngineReport(dict(self.spent), reference=facts)

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Take a request; it is answered when it is gathered, and what takes TorchInductor long is begun now."""
        if request.patch is None or any(map(compiles, request.patch.alternatives)):
            self.libraries.begin(request.candidates)
        return super().submit(request)

    @property
    def prepares(self) -> bool:
        """Where cores are left for it."""
        return self.compile_threads >= SPARE_CORES

    def prepare(self, request: EvaluationRequest) -> None:
        """Compile in the background what templates wrote for the request; anew, for a final verification."""
        if not self.prepares or not all(map(printed, request.candidates)):
            return
        if request.asked is Asked.FINAL:
            self._compiled_anew(request)
        else:
            self.compilers.begin(request.candidates)

    def left_aside(self, request: EvaluationRequest) -> Evaluation | None:
        """Wait for TorchInductor, as long as the request allows; see `Evaluator.left_aside`."""
        clock, limit_s = Clock(self.clock), request.library_seconds
        with clock.part("library"):
            end = time.monotonic() + (COMPILE_S if limit_s is None else limit_s)
            each = (waited_for(self.libraries, c, max(0.0, end - time.monotonic())) for c in request.candidates)
            refused = next(filter(None, each), None)
        self._count(clock)
        if refused is None:
            return None
        return Evaluation(refused.gate, refused.error, refused.failure, seconds=dict(clock.seconds))

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """Judge a program, or the best of a patch's alternatives: the gates in order, the first refusal ends it.

        Programs of torch.compile that the final verification will want are made ready in the background from the first
        request on that names them.

        Raises:
            RequestError: the request is for another specification, device or mode.
        """
        request.fits(self.spec.digest, self.device.name, self.spec.mode)
        options = request.options
        new = [mode for mode in options.compile_modes if mode not in self.compiled.begun]
        if new:
            self.compiled.begin(new, options.compile_seconds)
        clock = Clock(self.clock)
        try:
            with clock.part("judge"):
                evaluate = partial(self._with_some_plan, request, clock)
                found = self.memory.use(evaluate, lambda f: f.failure == "memory", clock)
        finally:
            if self.memory.wanted:
                self.references.release()
            self._count(clock)
        return replace(found, seconds=dict(clock.seconds), card=self.card)

    def close(self) -> None:
        """End the processes of this evaluator, remove its folder, give its memory back."""
        self._end()
        self.references.release()

    # -- parts

    def _count(self, clock: Clock) -> None:
        for part, seconds in clock.seconds.items():
            self.spent[part] = self.spent.get(part, 0.0) + seconds

    def _opened(self, clock: Clock) -> References | torch.OutOfMemoryError:
        """The reference; what PyTorch says where its own run does not fit the free memory."""
        try:
            with self.turns.turn("reference", clock):
                return References(
                    self.spec,
                    self.graph,
                    self.torch_device,
                    self.draw_seed,
                    between=lambda: self.turns.step_aside(clock),
                )
        except torch.OutOfMemoryError as error:
            return error

    def _with_some_plan(self, request: EvaluationRequest, clock: Clock) -> Evaluation:
        """The answer, with as little memory as it takes; what others hold is waited for."""
        end = self.clock() + MEMORY_WAIT_S
        economize = partial(self._economize, clock, end)
        self._fits(clock, end)
        while (found := self._in_memory(request, clock, economize)) is None:
            if not economize():
                text = f"not judged: the memory of {self.torch_device} ran out in the judge's own process; free some"
                return Evaluation(Gate.PROGRAM, text, MACHINE_FAILED)
        return found

    def _economize(self, clock: Clock, end: float) -> bool:
        """Whether the judge's own process can take less memory than it did when that ran out, or others give some."""
        self.references.release()
        plan = self.references.plan
        others = not self.references.fit()
        return (
            (others and self._fits(clock, end)) or self.references.plan.key != plan.key or self.references.economize()
        )

    def _fits(self, clock: Clock, end: float) -> bool:
        """Whether some plan fits what others leave of the device's memory, which they have until `end` to give back."""
        with clock.part("wait"):
            while not (fits := self.references.fit()) and self.clock() < end:
                self.references.release()
                time.sleep(LOOK_EVERY_S)
        return fits

    def _in_memory(self, request: EvaluationRequest, clock: Clock, economize: Callable[[], bool]) -> Evaluation | None:
        """The answer; None where the plan of memory was too large.

        It was if the judge's own process ran out of the device's memory, or a worker did with PyTorch's own code, which
        holds what the judge makes it hold.
        """
        try:
            if request.asked is Asked.FINAL:
                return self._final(request, clock, economize)
            run = self._run(request, clock, self._cache, self.compilers, economize)
            found = self._judged(run, CHECK_GATES if request.asked is Asked.CHECK else SEARCH_GATES)
        except torch.OutOfMemoryError:
            return None
        own = found.failure == "memory" and request.program.on_pytorch and request.patch is None
        return None if own and self.references.has_smaller_plan else found

    def _final(self, request: EvaluationRequest, clock: Clock, economize: Callable[[], bool]) -> Evaluation:
        """Judge in a fresh process, compiled anew on this machine, on every distribution, in turns with baselines.

        What PyTorch computes as it was written is the reference itself: a trial shows that it runs.
        """
        tools, compilers = check_tools(request.options.sanitize), self._compiled_anew(request)
        with clock.part("baselines"):
            self.compiled.wait()
        cache = str(compilers.cache)
        run = self._run(request, clock, cache, compilers, economize)
        as_written = request.program.on_pytorch and request.patch is None
        run.trials = (lambda: self.references.trials(1)) if as_written else self.references.every_distribution
        run.rounds, run.thorough = self.times.final, True
        try:
            found = self._judged(run, FINAL_GATES)
        finally:
            self._anew = None
            compilers.close()
            remove_folder(cache)
        if not found.ok:
            return found
        turns = self.times.turns
        compiled = {m: turns[compiled_name(m)] for m in self.compiled.ready if compiled_name(m) in turns}
        failed = tuple(f"torch.compile {m} is not timed: {reason}" for m, reason in self.compiled.failed.items())
        with self.turns.turn("check", clock):
            wrong = self._compiled_wrong(tuple(compiled))
        less = tuple(f"torch.compile {mode} is less accurate than a candidate may be: {w}" for mode, w in wrong.items())
        found = replace(found, compiled=compiled, compiled_wrong=wrong, notes=(*found.notes, *failed, *less))
        program = run.candidates[found.chosen].program
        return found if program.fallback else sanitized(program, found, tools, run, self._setup.spec)

    def _compiled_anew(self, request: EvaluationRequest) -> Compilers:
        """Compilers with a cache of their own, at work on the request's program; those of before, if it is the same."""
        digest, before = request.program.digest, self._anew
        if before is not None and before[0] == digest:
            return before[1]
        if before is not None:
            before[1].close()
        made = Compilers(*self._compiling(self._new_cache()))
        if all(map(printed, request.candidates)):  # other texts are screened first
            made.begin(request.candidates)
        self._anew = digest, made
        return made

    def _compiled_wrong(self, modes: Sequence[str]) -> dict[str, str]:
        """Modes of torch.compile whose error is above a candidate's budget, such as TF32 where eager has fp32."""
        refs, found = self.references, {}
        try:
            trial = next(iter(refs.trials(1)), None) if refs.is_smooth and modes else None
        except torch.OutOfMemoryError:  # the candidate passed: it is not judged again for this
            trial = None
        if trial is None:
            return {}
        allowed = [e.budget + e.error for e in trial.expected if is_float(e.value)]
        for mode in modes:
            try:
                errors = self.compiled.errors(mode, refs.mutated)
            except WorkerFailed:
                continue  # memory that others hold, say; its times stand
            for error, most in zip(errors, allowed, strict=True):
                if not error.within(most):
                    figures = zip(("max", "rms", "across", "alone"), error.figures, most.figures, strict=True)
                    name, mine, budget = max(figures, key=lambda f: f[1] / f[2] if f[2] else math.inf)
                    found[mode] = f"{name} error {mine:.3g} beside eager, allowed {budget:.3g}"
        return found

    def _run(
        self,
        request: EvaluationRequest,
        clock: Clock,
        cache: str,
        compilers: Compilers,
        economize: Callable[[], bool],
    ) -> GpuRun:
        return GpuRun(
            program=request.program,
            patch=request.patch,
            compilers=compilers,
            device=self.device,
            sandbox=self.sandbox,
            any_text=self.any_text,
            clock=clock,
            parts=self._parts,
            cache=cache,
            trials=lambda: self.references.trials(self.trials),
            rounds=self.times.search,
            economize=economize,
            library_s=COMPILE_S if request.library_seconds is None else request.library_seconds,
        )

    def _judged(self, run: GpuRun, gates: Pipeline[GpuRun]) -> Evaluation:
        found: Evaluation | None = None
        try:
            self.workers.make_ready(run.cache, run.may_share)
            self.baselines_process.start()
            found = self._told(run, gates.judge(run))
            return found
        except WorkerFailed as failed:
            return self._told(run, no_verdict(str(failed)))
        finally:
            run.finish(found is not None and found.ok)
            if not self.workers.keeps_one and not run.thorough:  # a final verification is the last one, as a rule
                self.workers.prefetch()
            self.references.tidy()

    def _told(self, run: GpuRun, found: Evaluation) -> Evaluation:
        found = advised(found, run.candidates[found.chosen].program)
        return replace(found, configurations=len(run.candidates), sandbox=self.workers.layers)

    def _end(self) -> None:
        self.workers.stop()
        self.compiled.close()
        if self._owns_compilers:
            self.compilers.close()
        if self._anew is not None:
            self._anew[1].close()
        if self._owns_libraries:
            self.libraries.close()
        self.baselines_process.close()
        self.workers.close()
        remove_folder(self.folder)
        self.turns.close()
        self.memory.close()

    def _compiling(self, cache: str) -> tuple[ForkServer, Device, str, int, float, str]:
        """Arguments of `Compilers`, to compile into this folder."""
        return self.server, self.device, cache, self.compile_threads, self.timeout_s, self.sandbox

    def _new_cache(self) -> str:
        return tempfile.mkdtemp(prefix="triton_", dir=self.folder)


__all__ = ["GpuEvaluator", "begin_compiled"]
