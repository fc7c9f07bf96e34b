"""Compiles the CUDA C++ of an implementation for a named device, in this process, which need not have one.

Deals in launches (`qimeng.backend.cuda_runtime.CudaKernel`), each of which becomes a compilation by NVRTC, and in what
its binary says about registers and memory. `compile_here` replaces the launch for good: it is called in a process of
its own, which `qimeng.envs.workers.compile` starts.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from qimeng.backend import cuda_runtime
from qimeng.backend.compiled import Compiled
from qimeng.backend.dry_run import CompileFailure, Recorder, dry_run
from qimeng.backend.facts import KernelFacts, Usage, dot_types, instructions_of, tensor_bytes, usage_of
from qimeng.backend.load import load_kernels
from qimeng.device import Device
from qimeng.graph.opgraph import Meta
from qimeng.program.implementation import Implementation

_PLACE = re.compile(r"kernel\.cu\((\d+)\): (?:catastrophic )?error")
_STATIC_LIMIT = re.compile(r"uses too much shared data")

RESERVED, RESERVED_SINCE = 1024, 90
"""Bytes of shared memory that CUDA keeps of a block for itself, and the first compute capability for which `cuobjdump`
counts them with a kernel's own (seen with CUDA 13; `Device.shared_per_block` does not count them)."""


def compile_here(
    implementation: Implementation,
    header: str,
    inputs: Sequence[Meta | None],
    device: Device,
    folder: str | None = None,
) -> Compiled:
    """Compile all kernels that `implementation` launches; kernels compile for `device` from then on in this process.

    Args:
        implementation: whose kernels.
        header: text that its own text needs above it.
        inputs: shape, strides and dtype of each input; None for a Python number.
        device: what to compile for.
        folder: where to write the text; a new temporary folder by default.
    """
    recorder = _Recorder(device)
    return dry_run(implementation, inputs, recorder, lambda: load_kernels(header + implementation.source, folder))


class _Recorder(Recorder):
    """Turns every launch in this process into a compilation for `device`, and keeps what was compiled."""

    def __init__(self, device: Device):
        self.prepares = False
        self._found: list[KernelFacts] = []
        self._refused: tuple[str, Exception] | None = None
        self._compiled: dict[tuple[str, str], tuple[Usage, str]] = {}
        self._device = device
        self._reserved = RESERVED if int(device.arch) >= RESERVED_SINCE else 0

        def launch(kernel: Any, grid: Any, block: Any, *arguments: Any, shared: int = 0) -> None:
            self._found.append(self._facts(kernel, grid, block, arguments, shared))

        cuda_runtime.CudaKernel.launch = launch  # type: ignore[method-assign]

    def _facts(self, kernel: Any, grid: Any, block: Any, arguments: Sequence[Any], shared: int) -> KernelFacts:
        kernel.bind(arguments)
        usage, ptx = self._compile(kernel)
        threads = prod(block)
        return KernelFacts(
            name=kernel.name.partition("<")[0],
            prepares=self.prepares,
            grid=grid,
            launches=1,
            warps=-(-threads // self._device.warp_size),
            threads=threads,
            stages=0,
            shared_bytes=max(usage.shared - self._reserved, 0) + shared,
            registers=usage.registers,
            spills=usage.spills,
            tensor_bytes=tensor_bytes(arguments),
            dots=dot_types(ptx),
            warpgroup="wgmma.mma_async" in ptx or "tcgen05.mma" in ptx,
            instructions=instructions_of(ptx),
        )

    def _compile(self, kernel: Any) -> tuple[Usage, str]:
        key = kernel.source, kernel.name
        if key not in self._compiled:
            try:
                binary, ptx, names = cuda_runtime.cuda_compile(*key[:1], (kernel.name,), self._device.target)
            except cuda_runtime.CudaError as error:
                self._refused = kernel.name, error
                raise
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                Path(file.name).write_bytes(binary)
                usage = usage_of(file.name).get(names[kernel.name], Usage())
            self._compiled[key] = usage, _entry_text(ptx, names[kernel.name])
        return self._compiled[key]

    def refused(self, error: Exception) -> CompileFailure | None:
        """NVRTC's message, with the line and its text."""
        kernel, raised = self._refused or ("", None)
        if raised is not error:
            return None
        text = str(error)
        place = _PLACE.search(text)
        line = int(place[1]) if place else None
        where = f"kernel {kernel}" + (f", line {line} of the CUDA text" if line else "")
        failure = "resources" if _STATIC_LIMIT.search(text) else "compile"
        return CompileFailure(kernel, f"{where}: {text}"[:2000], line, failure)

    def facts(self) -> tuple[KernelFacts, ...]:
        """What was launched, in order; equal launches that follow each other are counted together."""
        out: list[KernelFacts] = []
        for facts in self._found:
            if out and facts == replace(out[-1], launches=1):
                out[-1] = replace(out[-1], launches=out[-1].launches + 1)
            else:
                out.append(facts)
        return tuple(out)


def _entry_text(ptx: str, name: str) -> str:
    """The part of the PTX that is the kernel called `name`."""
    start = re.search(rf"\.entry\s+{re.escape(name)}\b", ptx)
    if start is None:
        return ptx
    following = re.compile(r"\.entry\s").search(ptx, start.end())
    return ptx[start.start() : following.start() if following else len(ptx)]


__all__ = ["compile_here"]
