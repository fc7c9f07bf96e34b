"""Compiles the kernels of an implementation for a named device, in this process, which need not have one.

Deals in Triton's own launcher under a driver that only says which device it stands for: tensors are on `meta`, launches
compile and are written down, nothing runs. Arguments are specialised as in a real launch, and the cache's keys are the
real ones, so a process with the device finds the binaries ready. Knows nothing about what kernels compute or how fast
they are. `compile_here` changes Triton's global state for good: it is called in a process of its own, which
`qimeng.envs.compile` starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qimeng.device import Device
from qimeng.envs.kernel_facts import KernelFacts, facts_of, registers_of
from qimeng.envs.kernels import implementation_source, load_kernels
from qimeng.envs.no_driver import NoDriver
from qimeng.envs.plain_data import record_of
from qimeng.envs.service import explain
from qimeng.envs.triton_cache import NO_LINK
from qimeng.graph.opgraph import Meta
from qimeng.program.program import Implementation


@dataclass(frozen=True)
class Compiled:
    """What came of compiling one implementation.

    Attributes:
        kernels: those that were compiled, in the order of their launches, up to where it failed.
        error: why not all of them were; None where they were.
        failure: class of that: ``"compile"`` (the text does not load, or the compiler refuses a kernel), ``"error"``
            (the Python code around the kernels raised), ``"meta"`` (that code needs a tensor's values or a real GPU),
            or what became of the process (``"timeout"``, ``"crash"``, ``"memory"`` …).
        kernel: the kernel that the compiler refuses.
        line: line within that kernel; None where unknown.
        seconds: wall seconds it took.
    """

    kernels: tuple[KernelFacts, ...] = ()
    error: str | None = None
    failure: str | None = None
    kernel: str = ""
    line: int | None = None
    seconds: float = 0.0

    @property
    def host(self) -> bool:
        """True where the code around the kernels stopped: in a real launch, with real tensors, it may not."""
        return self.failure in ("error", "meta")

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Compiled:
        """The object that `asdict` and JSON made plain data of; a TypeError or ValueError for anything else."""
        found = record_of(cls, data)
        for kernel in found.kernels:
            kernel.check()
        return found


def compile_here(
    implementation: Implementation, inputs: Sequence[Meta | None], device: Device, folder: str | None = None
) -> Compiled:
    """Compile all kernels that `implementation` launches; this process stands for `device` from then on.

    Args:
        implementation: whose kernels.
        inputs: shape, strides and dtype of each input; None for a Python number.
        device: what to compile for.
        folder: where to write the text; a new temporary folder by default.
    """
    began = time.perf_counter()
    recorder = _Recorder(device)
    found = Compiled()
    try:
        module = load_kernels(implementation_source(implementation), folder)
        entry = getattr(module, implementation.entry)
    except Exception as error:  # noqa: BLE001  the text may raise anything
        return Compiled(error=f"the source does not load: {_short(error)}", failure="compile")
    try:
        arguments = [0.5 if x is None else _without_data(x) for x in inputs]
        with torch.no_grad():
            buffers: Sequence[Any] = ()
            if implementation.prepare:
                recorder.prepares = True
                chosen = [arguments[i] for i in implementation.prepare_inputs]
                buffers = getattr(module, implementation.prepare)(*chosen)
                recorder.prepares = False
            entry(*arguments, *buffers)
    except Exception as error:  # noqa: BLE001  so may the code around the kernels
        kernel = recorder.refused(error)
        if kernel is not None:
            message, line = _explain(kernel, error)
            found = Compiled(error=message, failure="compile", kernel=kernel, line=line)
        else:
            found = Compiled(error=_short(error), failure="meta" if _needs_values(error) else "error")
    return replace(found, kernels=recorder.facts(), seconds=time.perf_counter() - began)


def _short(error: Exception) -> str:
    """The error in words, with the line of the candidate's text that it is about."""
    if isinstance(error, SyntaxError) and error.text:
        return f"{type(error).__name__}: {error.msg}: {error.text.strip()[:200]}"
    return explain(error, 2000)


def _without_data(meta: Meta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype), device="meta")


_NEEDS_VALUES = ("meta tensor", "Meta tensor", "meta device", "not compiled with CUDA", "No CUDA GPUs", "NVIDIA driver")


def _needs_values(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _NEEDS_VALUES)


class _Recorder:
    """Turns every launch in this process into a compilation for `device`, and keeps what was compiled."""

    def __init__(self, device: Device):
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        self.prepares = False
        self._found: list[tuple[KernelFacts, Any]] = []
        self._refused: tuple[str, Exception] | None = None
        driver.set_active(NoDriver(device))
        launch = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = True, **options: Any) -> Any:
            try:
                compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
            except Exception as error:  # the compiler's errors are of many classes; an autotuner may expect some
                self._refused = kernel.__name__, error
                raise
            if compiled is not None:
                if all(compiled is not known for _, known in self._found):
                    _build_launcher(compiled, device)
                binder = kernel.device_caches[0][-1]
                bound = binder(*args, **options)[0]
                blocks = grid(bound) if callable(grid) else grid
                facts = facts_of(compiled, tuple(blocks), bound.values(), self.prepares, device.warp_size)
                self._found.append((facts, compiled))
            return compiled

        JITFunction.run = run

    def refused(self, error: Exception) -> str | None:
        """The kernel whose compilation raised `error`; None where that comes from the code around the kernels."""
        kernel, raised = self._refused or ("", None)
        return kernel if raised is error else None

    def facts(self) -> tuple[KernelFacts, ...]:
        """What was launched, in order; equal launches that follow each other are counted together."""
        sizes: dict[str, tuple[int | None, int | None]] = {}
        out: list[KernelFacts] = []
        for facts, compiled in self._found:
            if out and facts == replace(out[-1], launches=1, registers=None, spills=None):
                out[-1] = replace(out[-1], launches=out[-1].launches + 1)
                continue
            if compiled.hash not in sizes:
                sizes[compiled.hash] = registers_of(compiled)
            registers, spills = sizes[compiled.hash]
            out.append(replace(facts, registers=registers, spills=spills))
        return tuple(out)


def _explain(kernel: str, error: Exception) -> tuple[str, int | None]:
    """What the compiler refuses in `kernel`, in words, and the line."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    lines = [line for e in chain if (line := getattr(getattr(e, "node", None), "lineno", None)) is not None]
    where = f"kernel {kernel}" + (f", line {lines[-1]}" if lines else "")
    text = f"{where}: {type(chain[-1]).__name__}: {chain[-1]}" if lines else f"{where}: {_short(error)}"
    if len(chain) > 1 and lines:
        text += f"\n{next(e for e in reversed(chain) if hasattr(e, 'node'))}"
    return text[:2000], lines[-1] if lines else None


def _build_launcher(kernel: Any, device: Device) -> None:
    """Compile the C stub that launches the kernel; without a CUDA driver it cannot be linked and is left out."""
    if device.kind != "cuda":
        return
    from triton.backends.nvidia.driver import CudaLauncher

    try:
        CudaLauncher(kernel.src, kernel.metadata)
    except NO_LINK:
        return


__all__ = ["Compiled", "compile_here"]
