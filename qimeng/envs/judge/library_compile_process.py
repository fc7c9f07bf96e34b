"""Compiles a region by torch.compile in a process of its own, for other processes to take over.

Deals in one implementation by TorchInductor: its text, its inputs, and the file that PyTorch's caches are saved to
(`torch.compiler.save_cache_artifacts`). A process that has loaded the file finds there what it would compile. Knows
nothing about who asks (`qimeng.envs.judge.library_compilers`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qimeng.backend.load import load_kernels
from qimeng.backend.registry import implementation_source
from qimeng.device_lock import DeviceLock
from qimeng.envs.judge.torch_compile_process import measure_alone
from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.compile import Job
from qimeng.envs.workers.service import serve
from qimeng.envs.workers.worker_setup import open_device
from qimeng.graph.opgraph import Meta
from qimeng.library import REGION
from qimeng.spec.modes import set_mode


def main(channel: Channel, mode: str, device: str) -> None:
    """Answer `ready` and `compile`, at low priority, so that measurements are not disturbed."""
    os.nice(10)
    set_mode(mode)
    open_device(torch.device(device))

    def compile(
        job: Job, parameters: Sequence[int], options: Mapping[str, Any], threads: int, lock: str, path: str
    ) -> bool:
        inputs = inputs_like(job.inputs, parameters, torch.device(device))
        return compile_region(job, inputs, options, threads, lock, Path(path))

    with torch.no_grad():
        serve(channel, {"ready": os.getpid, "compile": compile})


def compile_region(
    job: Job, inputs: Sequence[torch.Tensor], options: Mapping[str, Any], threads: int, lock: str, path: Path
) -> bool:
    """Call what torch.compile makes of a region once, and save what it compiled to `path`.

    Args:
        job: the implementation.
        inputs: like those that it will get.
        options: of torch.compile.
        threads: compiler processes.
        lock: path of the device's lock, held while TorchInductor measures its own candidates; empty without one.
        path: of the file.

    Returns:
        Whether there is such a file; without, whoever calls the implementation compiles it.
    """
    import torch._inductor.config

    torch._inductor.config.compile_threads = threads
    if lock:
        measure_alone(DeviceLock(lock))
    module = load_kernels(implementation_source(job.implementation), os.getcwd())
    region = getattr(module, job.implementation.entry + REGION)
    torch.compile(region, **options)(*inputs)
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(saved[0])
    part.rename(path)
    return True


def inputs_like(metas: Sequence[Meta | None], parameters: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Zeros with these shapes, strides and dtypes, parameters where a module's program passes its own.

    PyTorch's caches tell parameters from other tensors.

    Raises:
        ValueError: an input is a number.
    """
    made: list[torch.Tensor] = []
    for number, meta in enumerate(metas):
        if meta is None:
            raise ValueError("a region that takes numbers is compiled for each of them")
        x = torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype), device=device).zero_()
        made.append(torch.nn.Parameter(x, requires_grad=False) if number in parameters else x)
    return made


__all__ = ["compile_region", "inputs_like", "main"]
