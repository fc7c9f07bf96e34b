"""Compiles many implementations at once, each in a fresh process with a time limit.

Deals in jobs, processes and remembered results. Knows nothing about how a kernel is compiled
(`qimeng.envs.crosscompile` does that in the child).
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from qimeng.device import Device
from qimeng.envs.channel import Channel
from qimeng.envs.crosscompile import Compiled, CompileFailure, KernelFacts, KernelJob, compile_here
from qimeng.envs.forkserver import ForkServer, Process, WorkerFailed
from qimeng.envs.kernels import implementation_source
from qimeng.envs.service import serve
from qimeng.graph.region import Region
from qimeng.program.program import Program

COMPILE_SECONDS = 60.0
"""After this a compilation counts as hung."""

PRELOAD = ("torch", __name__, "qimeng.envs.crosscompile:warm_up")
"""What a fork server should have imported for a compilation to start at once."""


def job_of(program: Program, region: Region) -> KernelJob | None:
    """The job that compiles what implements `region`; None where that is no Triton kernel."""
    implementation, graph = program.implementation(region), program.graph
    if implementation.language != "triton":
        return None
    inputs = tuple(0.5 if graph.nodes[v.node].kind == "scalar" else graph.meta(v) for v in region.inputs)
    source = implementation_source(implementation)
    return KernelJob(source, implementation.entry, inputs, implementation.prepare, implementation.prepare_inputs)


def jobs_of(program: Program) -> tuple[KernelJob, ...]:
    """The different jobs of a program."""
    found = (job_of(program, r) for r in program.regions)
    return tuple(dict.fromkeys(j for j in found if j is not None))


def compile_program(
    program: Program, device: Device, cache_dir: str | None = None, server: ForkServer | None = None
) -> Compiled:
    """Compile all kernels of `program` for `device`, each implementation in a process of its own.

    Args:
        program: whose kernels.
        device: what to compile for.
        cache_dir: Triton's cache folder; None for its own default.
        server: a warm fork server (see `PRELOAD`); one is started for the call where None.

    Raises:
        CompileFailure: what went wrong, and where.
    """
    with Compilers(device, cache_dir, server=server) as compilers:
        found = compilers.compile(jobs_of(program))
    for result in found:
        if isinstance(result, CompileFailure):
            raise result
    return tuple(k for result in found if not isinstance(result, CompileFailure) for k in result)


class Compilers:
    """Compiles in parallel, each job in a fresh process; remembers what it compiled.

    Args:
        device: what to compile for.
        cache_dir: Triton's cache folder; None for its own default.
        processes: compilations at once; the number of cores by default.
        server: a warm fork server (see `PRELOAD`); one is started, and closed with this object, where None.
    """

    def __init__(
        self,
        device: Device,
        cache_dir: str | None = None,
        processes: int | None = None,
        server: ForkServer | None = None,
    ):
        self.device, self._cache_dir = device, cache_dir
        self._processes = processes or os.cpu_count() or 1
        self._server, self._owns_server = server, server is None
        self._known: dict[KernelJob, Compiled | CompileFailure] = {}

    def compile(self, jobs: Sequence[KernelJob], timeout_s: float = COMPILE_SECONDS) -> list[Compiled | CompileFailure]:
        """The kernels of each job, or why they could not be compiled, in order."""
        new = list(dict.fromkeys(j for j in jobs if j not in self._known))
        if new:
            self._known.update(zip(new, self._run(new, timeout_s), strict=True))
        return [self._known[j] for j in jobs]

    def start(self) -> ForkServer:
        """Start the fork server, so that its imports run while something else does."""
        if self._server is None:
            self._server = ForkServer(PRELOAD)
        return self._server

    def close(self) -> None:
        """End the fork server, where it is this object's own."""
        if self._server is not None and self._owns_server:
            self._server.close()
            self._server = None

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _run(self, jobs: list[KernelJob], timeout_s: float) -> list[Compiled | CompileFailure]:
        server = self.start()
        environment = {"TRITON_CACHE_DIR": self._cache_dir} if self._cache_dir else {}
        found: list[Compiled | CompileFailure] = [CompileFailure("crash", "never started")] * len(jobs)
        waiting = list(enumerate(jobs))
        running: dict[int, tuple[int, Process, float]] = {}
        while waiting or running:
            while waiting and len(running) < self._processes:
                index, job = waiting.pop(0)
                try:
                    process = server.start(f"{__name__}:compile_service", environment=environment)
                    process.send("compile", job=job, device=self.device)
                except WorkerFailed as error:
                    found[index] = CompileFailure("crash", str(error))
                    continue
                running[process.channel_fd] = (index, process, time.monotonic() + timeout_s)
            if not running:
                continue
            nearest = min(deadline for _, _, deadline in running.values())
            ready = set(select.select(list(running), [], [], max(0.0, nearest - time.monotonic()))[0])
            for fd, (index, process, deadline) in list(running.items()):
                if fd in ready or time.monotonic() >= deadline:
                    del running[fd]
                    found[index] = _answer(process, max(0.0, deadline - time.monotonic()), timeout_s)
        return found


def _answer(process: Process, left_s: float, limit_s: float) -> Compiled | CompileFailure:
    try:
        data, _ = process.answer(left_s)
    except WorkerFailed as error:
        if error.kind == "timeout":
            return CompileFailure("timeout", f"compiling took more than {limit_s:g} s")
        if error.kind == "crash":
            return CompileFailure("crash", f"the compiler died: {error}")
        process.kill()
        return CompileFailure("error", str(error))
    log = process.log().strip()
    process.kill()
    if "failed" in data:
        message = data["message"] + (f"\n{log[-800:]}" if log and data["failed"] == "compile" else "")
        return CompileFailure(data["failed"], message, data["kernel"], data["line"])
    return tuple(KernelFacts.from_data(k) for k in data["kernels"])


def compile_service(channel: Channel) -> None:
    """What a compiling process runs: it answers ``compile`` with plain data."""

    def command(job: KernelJob, device: Device) -> dict[str, Any]:
        try:
            return {"kernels": [asdict(k) for k in compile_here(job, device)]}
        except CompileFailure as failure:
            return {"failed": failure.kind, "message": str(failure), "kernel": failure.kernel, "line": failure.line}

    serve(channel, {"compile": command})


__all__ = ["COMPILE_SECONDS", "PRELOAD", "Compilers", "compile_program", "compile_service", "job_of", "jobs_of"]
