"""Compiling kernels ahead of time, in parallel, in processes that never touch a GPU.

Deals in implementations of regions: each is called on tensors without data under a driver that says which GPU is meant
and launches nothing. The compiled kernels land in Triton's cache, where workers find them. Knows nothing about whether
they are right or fast.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qimeng.device import Device
from qimeng.envs.channel import Channel
from qimeng.envs.forkserver import ForkServer, Process, WorkerFailed
from qimeng.envs.kernels import implementation_source, load_kernels
from qimeng.envs.service import Refused, explain, serve
from qimeng.envs.triton_cache import NO_LINK, adopt_shared_cache, warm_up
from qimeng.graph.opgraph import Meta
from qimeng.graph.region import Region
from qimeng.interfaces import Resources
from qimeng.program.program import Implementation


@dataclass(frozen=True)
class Job:
    """One implementation to compile.

    Attributes:
        implementation: its text and entry.
        inputs: shape, strides and dtype of each input of the region; None for a Python number.
    """

    implementation: Implementation
    inputs: tuple[Meta | None, ...]


@dataclass(frozen=True)
class Kernel:
    """What the compiler says about one kernel.

    Attributes:
        name: of the kernel.
        warps: warps a block.
        shared_bytes: shared memory a block.
        registers: registers a thread; None where no tool tells.
        spills: bytes of local memory a thread, where registers did not suffice; None where no tool tells.
    """

    name: str
    warps: int
    shared_bytes: int
    registers: int | None = None
    spills: int | None = None


@dataclass(frozen=True)
class Compiled:
    """What came of a job.

    Attributes:
        kernels: those that were compiled; empty where compiling ahead did not work and is left to the first launch.
        error: why it cannot be compiled at all.
        failure: class of that: ``"compile"``, or what became of the process.
        seconds: wall seconds it took.
    """

    kernels: tuple[Kernel, ...] = ()
    error: str | None = None
    failure: str = "compile"
    seconds: float = 0.0


def job_of(region: Region, implementation: Implementation) -> Job:
    """The job for one implementation of `region`."""
    graph = region.graph
    metas = tuple(None if graph.nodes[v.node].kind == "scalar" else graph.meta(v) for v in region.inputs)
    return Job(implementation, metas)


def compile_ahead(
    server: ForkServer, jobs: Sequence[Job], device: Device, cache: str, threads: int, timeout_s: float
) -> list[Compiled]:
    """Compile `jobs`, each in a process of its own, at most `threads` at a time; results in the order of the jobs.

    Args:
        server: starts the processes.
        jobs: what to compile.
        device: the GPU that is meant.
        cache: folder of Triton's cache.
        threads: processes at a time.
        timeout_s: seconds that one job may take.
    """
    results: list[Compiled | None] = [None] * len(jobs)
    waiting = list(range(len(jobs)))
    running: dict[int, tuple[Process, float]] = {}
    while waiting or running:
        while waiting and len(running) < threads:
            number = waiting.pop(0)
            process = server.start("qimeng.envs.compile:main", device, environment={"TRITON_CACHE_DIR": cache})
            process.send("build", job=jobs[number])
            running[number] = (process, time.monotonic() + timeout_s)
        first = min(deadline for _, deadline in running.values())
        poll = select.poll()
        for process, _ in running.values():
            poll.register(process.channel_fd, select.POLLIN)
            poll.register(process.status_fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(first - time.monotonic(), 0) * 1000)}
        for number, (process, deadline) in list(running.items()):
            if {process.channel_fd, process.status_fd} & ready or time.monotonic() >= deadline:
                results[number] = _finish(process, deadline, timeout_s)
                del running[number]
    return [r for r in results if r is not None]


def _finish(process: Process, deadline: float, timeout_s: float) -> Compiled:
    try:
        data, _ = process.answer(max(deadline - time.monotonic(), 0.0))
        kernels = tuple(Kernel(**k) for k in data["kernels"])
        return Compiled(kernels, data["error"], seconds=data["seconds"])
    except WorkerFailed as failed:
        if failed.kind == "timeout":
            return Compiled(error=f"not compiled within {timeout_s:g} s", failure="timeout")
        kind = "compile" if failed.kind == "error" else failed.kind
        return Compiled(error=f"while it was compiled: {failed}", failure=kind)
    except (TypeError, KeyError) as error:
        return Compiled(error=f"the compiling process sent no result: {error}", failure="protocol")
    finally:
        process.kill()


def resources_of(results: Sequence[Compiled]) -> Resources:
    """Resources of the largest kernel among `results`."""
    kernels = [k for r in results for k in r.kernels]
    return Resources(
        max((k.registers for k in kernels if k.registers is not None), default=None),
        max((k.spills for k in kernels if k.spills is not None), default=None),
        max((k.shared_bytes for k in kernels), default=None),
        len(kernels),
    )


def over_limit(result: Compiled, device: Device) -> str | None:
    """Which limit of `device` a kernel exceeds, with the numbers; None where all fit."""
    for k in result.kernels:
        if k.shared_bytes > device.shared_per_block:
            return (
                f"kernel {k.name} needs {k.shared_bytes} B of shared memory, {device.name} allows "
                f"{device.shared_per_block} B a block"
            )
        threads = k.warps * device.warp_size
        if threads > 1024:
            return f"kernel {k.name} needs {threads} threads, {device.name} allows 1024 a block"
        if k.registers is not None and k.registers * threads > device.registers_per_sm:
            return (
                f"kernel {k.name} needs {k.registers} registers a thread, {k.registers * threads} a block; an SM of "
                f"{device.name} has {device.registers_per_sm}"
            )
    return None


# -- in the compiling process


def main(channel: Channel, device: Device) -> None:
    """Answer one command, `build`."""
    adopt_shared_cache()
    serve(channel, {"build": lambda job: _build(job, device)})


def _build(job: Job, device: Device) -> dict[str, Any]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    began = time.perf_counter()
    found: list[Any] = []
    error = None
    _compile_only(device, found)
    try:
        module = load_kernels(implementation_source(job.implementation), os.getcwd())
        entry = getattr(module, job.implementation.entry)
    except Exception as problem:
        raise Refused("error", f"the source does not load: {explain(problem)}") from problem
    try:
        with torch.no_grad():
            inputs = [_without_data(meta) for meta in job.inputs]
            prepared: Sequence[Any] = ()
            if job.implementation.prepare:
                chosen = [inputs[i] for i in job.implementation.prepare_inputs]
                prepared = getattr(module, job.implementation.prepare)(*chosen)
            entry(*inputs, *prepared)
    except (CompilationError, OutOfResources) as problem:
        error = explain(problem)
    except Exception as problem:  # noqa: BLE001  host code that needs real tensors is left to the first launch
        if _is_compiler_error(problem):
            error = explain(problem)
    return {
        "kernels": [asdict(_describe(kernel)) for kernel in found],
        "error": error,
        "seconds": time.perf_counter() - began,
    }


def _is_compiler_error(problem: BaseException) -> bool:
    """Failures of Triton's passes and of ptxas have no class of their own."""
    text = str(problem)
    return "PassManager::run failed" in text or "ptxas" in text or "error: " in text


def _compile_only(device: Device, found: list[Any]) -> None:
    """Make every launch in this process a compilation for `device` that is noted in `found`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_NoDriver(GPUTarget(device.backend, device.arch, device.warp_size), device))
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        if kernel is not None and kernel not in found:
            found.append(kernel)
            _build_launcher(kernel)
        return kernel

    JITFunction.run = run


class _NoDriver:
    """Triton's view of a GPU that is not there."""

    def __init__(self, target: Any, device: Device):
        self.target, self.device = target, device
        self.utils = self

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        return

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self.device.shared_per_block,
            "multiprocessor_count": self.device.sms,
            "max_num_regs": self.device.registers_per_sm,
            "warpSize": self.device.warp_size,
        }

    def get_benchmarker(self) -> Any:
        """Every configuration is compiled and takes as long as every other."""
        return lambda call, quantiles=(), **_: (call(), [1.0] * max(len(quantiles), 1))[1]

    def get_empty_cache_for_benchmark(self) -> None:
        return

    def clear_cache(self, cache: Any) -> None:
        return


def _build_launcher(kernel: Any) -> None:
    """Compile the C stub that launches the kernel; without a CUDA driver it cannot be linked and is left out."""
    from triton.backends.nvidia.driver import CudaLauncher

    try:
        CudaLauncher(kernel.src, kernel.metadata)
    except NO_LINK:
        return


def _without_data(meta: Meta | None) -> Any:
    if meta is None:
        return 0.5
    return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype), device="meta")


def _describe(kernel: Any) -> Kernel:
    metadata = kernel.metadata
    registers, spills = _from_binary(kernel)
    return Kernel(kernel.name, metadata.num_warps, metadata.shared, registers, spills)


def _from_binary(kernel: Any) -> tuple[int | None, int | None]:
    """Registers a thread and bytes of stack and local memory, as cuobjdump reads them from the binary."""
    from triton import knobs

    if "cubin" not in kernel.asm:
        return None, None
    try:
        tool = knobs.nvidia.cuobjdump.path
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=20).stdout
    except (OSError, RuntimeError, subprocess.TimeoutExpired, AttributeError):
        return None, None
    numbers = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    if "REG" not in numbers:
        return None, None
    return numbers["REG"], max(numbers.get("STACK", 0), numbers.get("LOCAL", 0))


__all__ = ["Compiled", "Job", "Kernel", "compile_ahead", "job_of", "over_limit", "resources_of", "warm_up"]
