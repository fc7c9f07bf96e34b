"""Compiles the kernels of an implementation for a named device, in this process, which need not have one.

Deals in Triton's own launcher under a driver that only says which device it stands for: tensors are on `meta`, launches
compile and are written down, nothing runs. Arguments are specialised as in a real launch, and the cache's keys are the
real ones, so a process with the device finds the binaries ready. Knows nothing about what kernels compute or how fast
they are. `compile_here` changes Triton's global state for good: it is called in a process of its own, which
`qimeng.envs.workers.compile` starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from qimeng.backend.compiled import Compiled
from qimeng.backend.dry_run import CompileFailure, Recorder, dry_run, short
from qimeng.backend.facts import KernelFacts, facts_of, registers_of
from qimeng.backend.load import load_kernels
from qimeng.backend.triton_ahead import compile_ahead, worth_it
from qimeng.backend.triton_cache import NO_LINK
from qimeng.backend.triton_driver import NoDriver
from qimeng.device import Device
from qimeng.graph.opgraph import Meta
from qimeng.program.implementation import Implementation


def compile_here(
    implementation: Implementation,
    header: str,
    inputs: Sequence[Meta | None],
    device: Device,
    folder: str | None = None,
) -> Compiled:
    """Compile all kernels that `implementation` launches; this process stands for `device` from then on.

    Args:
        implementation: whose kernels.
        header: text that its own text needs above it.
        inputs: shape, strides and dtype of each input; None for a Python number.
        device: what to compile for.
        folder: where to write the text; a new temporary folder by default.
    """

    def load() -> ModuleType:
        return load_kernels(header + implementation.source, folder)

    recorder = _Recorder(device)
    if worth_it():
        compile_ahead(lambda: dry_run(implementation, inputs, recorder, load))
    return dry_run(implementation, inputs, recorder, load)


class _Recorder(Recorder):
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

    def refused(self, error: Exception) -> CompileFailure | None:
        """What the compiler said, where `error` comes from it."""
        kernel, raised = self._refused or ("", None)
        return _explain(kernel, error) if raised is error else None

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


def _explain(kernel: str, error: Exception) -> CompileFailure:
    """What the compiler refuses in `kernel`."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    lines = [line for e in chain if (line := getattr(getattr(e, "node", None), "lineno", None)) is not None]
    where = f"kernel {kernel}" + (f", line {lines[-1]}" if lines else "")
    text = f"{where}: {type(chain[-1]).__name__}: {chain[-1]}" if lines else f"{where}: {short(error)}"
    if len(chain) > 1 and lines:
        text += f"\n{next(e for e in reversed(chain) if hasattr(e, 'node'))}"
    return CompileFailure(kernel, text[:2000], lines[-1] if lines else None)


def _build_launcher(kernel: Any, device: Device) -> None:
    """Compile the C stub that launches the kernel; without a CUDA driver it cannot be linked and is left out."""
    if device.kind != "cuda":
        return
    from triton.backends.nvidia.driver import CudaLauncher

    try:
        CudaLauncher(kernel.src, kernel.metadata)
    except NO_LINK:
        return


__all__ = ["compile_here"]
