"""Compiling implementations ahead of time, in parallel, in processes that never touch a GPU.

Deals in jobs, processes and results. Each implementation is compiled in a fresh process, so a hang or crash of the
compiler becomes a typed failure. Where the device is in this machine, the kernels land in Triton's cache, where workers
find them. Knows nothing about how a kernel is compiled (a backend does that in the process, `qimeng.backend`), or about
whether it is right or fast.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

from qimeng.backend.compiled import Compiled
from qimeng.backend.registry import backend_named
from qimeng.device import Device
from qimeng.envs.sandbox import DEFAULT
from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.forkserver import ForkServer, Process, WorkerFailed
from qimeng.envs.workers.plain_data import record_of
from qimeng.envs.workers.preload import adopt_warm
from qimeng.envs.workers.service import serve
from qimeng.graph.opgraph import Meta
from qimeng.graph.region import Region
from qimeng.interfaces import LASTING
from qimeng.program.program import Implementation, Program

ENDED = "not compiled: the judge was closed"
COMPILE_SECONDS = 60.0
"""After this a compilation counts as hung."""


@dataclass(frozen=True)
class Job:
    """One implementation to compile.

    Attributes:
        implementation: its text and entry.
        inputs: shape, strides and dtype of each input of the region; None for a Python number.
    """

    implementation: Implementation
    inputs: tuple[Meta | None, ...]


def job_of(region: Region, implementation: Implementation) -> Job:
    """The job for one implementation of `region`."""
    graph = region.graph
    metas = tuple(None if graph.nodes[v.node].kind == "scalar" else graph.meta(v) for v in region.inputs)
    return Job(implementation.text_alone, metas)


class Compilers:
    """Compiles the generated kernels of programs for one device, and caches results.

    Args:
        server: starts the processes.
        device: the device that is meant.
        cache: Triton's cache folder, which exists; None for one of the server's, or Triton's own without a full
            sandbox. In a full sandbox each implementation is compiled into a folder of its own in it
            (`qimeng.envs.workers.compiled_cache`).
        threads: processes at a time; the number of cores by default.
        timeout_s: seconds that one job may take.
        sandbox: level of the processes' sandbox; see `ForkServer.start`.
        forgiving: whether what was refused by accident, such as for lack of time, is compiled again when asked again.
    """

    def __init__(
        self,
        server: ForkServer,
        device: Device,
        cache: str | None = None,
        threads: int | None = None,
        timeout_s: float = COMPILE_SECONDS,
        sandbox: str = DEFAULT,
        forgiving: bool = True,
    ):
        self.sandbox, self._forgiving = sandbox, forgiving
        if cache is None and sandbox == "full":  # as long as the server lives, its evaluators need not compile again
            cache = str(server.folder / "compiled")
        self.server, self.device, self.cache, self.timeout_s = server, device, cache, timeout_s
        self.threads = threads or os.cpu_count() or 1
        self._known: dict[tuple[str, str], Compiled] = {}
        self._coming: dict[tuple[str, str], Future[Compiled]] = {}
        self._processes: set[Process] = set()
        self._closed = False

    def programs(self, programs: Sequence[Program]) -> list[dict[str, Compiled]]:
        """For each program, signature of each region with a generated kernel to what came of compiling it."""
        jobs, tables = self._jobs(programs)
        here = {key: job for key, job in jobs.items() if key not in self._coming}
        made = dict(zip(here, self.compile(list(here.values())), strict=True))
        made |= {key: self._coming.pop(key).result() for key in jobs if key in self._coming}
        found = self._known | made
        known = {k: c for k, c in made.items() if not self._forgiving or c.failure is None or c.failure in LASTING}
        self._known |= known
        return [{signature: found[key] for signature, key in table.items()} for table in tables]

    def begin(self, programs: Sequence[Program]) -> None:
        """Compile in the background what `programs` need and was not compiled yet; `programs` finds it there."""
        jobs = {key: job for key, job in self._jobs(programs)[0].items() if key not in self._coming}
        coming: dict[tuple[str, str], Future[Compiled]] = {key: Future() for key in jobs}
        if jobs and not self._closed:
            self._coming |= coming
            threading.Thread(
                target=self._behind, args=(list(jobs.values()), list(coming.values())), daemon=True
            ).start()

    def close(self) -> None:
        """End what is compiled in the background."""
        self._closed = True
        for process in list(self._processes):
            process.kill(wait=False)

    def _behind(self, jobs: Sequence[Job], coming: Sequence[Future[Compiled]]) -> None:
        try:
            found = self.compile(jobs)
        except Exception as error:  # noqa: BLE001  (whoever asks for the results gets it)
            for future in coming:
                future.set_exception(error)
            return
        for future, compiled in zip(coming, found, strict=True):
            future.set_result(compiled)

    def _jobs(self, programs: Sequence[Program]) -> tuple[dict[tuple[str, str], Job], list[dict[str, tuple[str, str]]]]:
        """What has to be compiled for `programs`, and for each of them the key of each region's implementation."""
        jobs: dict[tuple[str, str], Job] = {}
        tables: list[dict[str, tuple[str, str]]] = []
        for program in programs:
            tables.append({})
            for region in program.regions:
                implementation = program.implementation(region)
                if implementation.generated:
                    key = (region.signature, implementation.digest)
                    tables[-1][region.signature] = key
                    if key not in self._known:
                        jobs.setdefault(key, job_of(region, implementation))
        return jobs, tables

    def compile(self, jobs: Sequence[Job]) -> list[Compiled]:
        """Compile `jobs`, each in a process of its own; results in the order of the jobs."""
        results: list[Compiled | None] = [None] * len(jobs)
        waiting = list(range(len(jobs)))
        running: dict[int, tuple[Process, float]] = {}
        while waiting or running:
            while self._closed and waiting:  # nobody waits for the rest
                results[waiting.pop()] = Compiled(error=ENDED, failure="timeout")
            while waiting and len(running) < self.threads:
                number = waiting.pop(0)
                process = self._start(jobs[number])
                self._processes.add(process)
                process.send("build", job=jobs[number])
                if self._closed:
                    process.kill(wait=False)
                running[number] = (process, time.monotonic() + self.timeout_s)
            first = min((deadline for _, deadline in running.values()), default=0.0)
            poll = select.poll()
            for process, _ in running.values():
                poll.register(process.channel_fd, select.POLLIN)
                poll.register(process.status_fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(max(first - time.monotonic(), 0) * 1000)}
            for number, (process, deadline) in list(running.items()):
                if {process.channel_fd, process.status_fd} & ready or time.monotonic() >= deadline:
                    results[number] = _finish(process, deadline, self.timeout_s)
                    self._processes.discard(process)
                    del running[number]
        return [r for r in results if r is not None]

    def _start(self, job: Job) -> Process:
        cache = self.cache
        if cache is not None and self.sandbox == "full":
            cache = os.path.join(cache, job.implementation.digest)
            os.makedirs(cache, exist_ok=True)
        return self.server.start(
            "qimeng.envs.workers.compile:main",
            self.device,
            environment={"TRITON_CACHE_DIR": cache} if cache is not None else {},
            sandbox=self.sandbox,
            writable=[cache] if cache is not None else [],
        )


def launches_nothing(program: Program, found: Mapping[str, Compiled]) -> str | None:
    """What is to be said where a region of `program` that is said to be generated launches no kernel at each call.

    Args:
        program: whose kernels were compiled.
        found: signature of each region with a generated kernel to what came of compiling it.
    """
    for signature, compiled in found.items():
        if compiled.error is None and all(k.prepares for k in compiled.kernels):
            title = backend_named(program.implementations[signature].language).title
            return f"region {signature} is said to be a {title} kernel, but calling it launches none"
    return None


def _finish(process: Process, deadline: float, timeout_s: float) -> Compiled:
    try:
        data, _ = process.answer(max(deadline - time.monotonic(), 0.0))
        found = record_of(Compiled, data)
        for kernel in found.kernels:
            kernel.check()
        log = process.log().strip() if found.failure == "compile" else ""
        return replace(found, error=f"{found.error}\n{log[-800:]}") if log else found
    except WorkerFailed as failed:
        if failed.kind == "timeout":
            return Compiled(error=f"not compiled within {timeout_s:g} s", failure="timeout")
        kind = "compile" if failed.kind == "error" else failed.kind
        return Compiled(error=f"while it was compiled: {failed}", failure=kind)
    except (TypeError, ValueError) as error:
        return Compiled(error=f"the compiling process sent no result: {error}", failure="protocol")
    finally:
        process.kill()


# -- in the compiling process


def main(channel: Channel, device: Device) -> None:
    """Answer one command, `build`, at low priority, so that measurements are not disturbed."""
    os.nice(10)
    adopt_warm()

    def build(job: Job) -> dict[str, Any]:
        backend = backend_named(job.implementation.language)
        if reason := backend.refusal(device):
            return asdict(Compiled(error=reason, failure="unsupported"))
        return asdict(backend.compile(job.implementation, job.inputs, device, os.getcwd()))

    serve(channel, {"build": build})


__all__ = ["COMPILE_SECONDS", "Compilers", "Job", "job_of", "launches_nothing", "main"]
