"""Compiles the kernels of an implementation for a named device, in this process, which need not have one.

Deals in Triton's own launcher under a driver that only says which device it stands for: tensors are on `meta`, launches
compile and are written down, nothing runs. Arguments are specialised as in a real launch, and the cache's keys are the
real ones, so a process with the device finds the binaries ready. Knows nothing about what kernels compute or how fast
they are. `compile_here` changes Triton's global state for good: it is called in a process of its own, which
`qimeng.envs.compile` starts.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qimeng.device import Device
from qimeng.envs.kernels import implementation_source, load_kernels
from qimeng.envs.triton_cache import NO_LINK
from qimeng.graph.opgraph import Meta
from qimeng.program.program import Implementation


@dataclass(frozen=True)
class KernelFacts:
    """One compiled kernel and how an implementation launches it.

    Attributes:
        name: the kernel's function.
        prepares: launched once, when buffers are prepared from parameters, not in each call.
        grid: programs (blocks) along each axis.
        launches: launches one after the other with these facts.
        warps: warps a block.
        threads: threads a block.
        stages: depth of software pipelining asked for.
        shared_bytes: shared memory of a block in bytes.
        registers: registers a thread; None where no tool tells.
        spills: bytes of local memory (spilled registers) a thread; None where no tool tells.
        tensor_bytes: bytes of the tensors passed, each once: what a launch reads and writes if it touches all once.
        dots: operand dtypes of its tensor-core instructions (``"tf32"``, ``"bf16"``, ``"f16"``).
        warpgroup: those are the instructions of whole warp groups that Hopper and later need for their full rate.
        instructions: instructions in the PTX or AMD assembly text.
    """

    name: str
    prepares: bool
    grid: tuple[int, int, int]
    launches: int
    warps: int
    threads: int
    stages: int
    shared_bytes: int
    registers: int | None
    spills: int | None
    tensor_bytes: int
    dots: tuple[str, ...] = ()
    warpgroup: bool = False
    instructions: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of one launch."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> KernelFacts:
        """The facts that `asdict` and JSON made plain data of."""
        tuples = {k: tuple(data[k]) for k in ("grid", "dots")}
        return cls(**{**data, **tuples})


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
        """The object that `asdict` and JSON made plain data of."""
        return cls(**{**data, "kernels": tuple(KernelFacts.from_data(k) for k in data["kernels"])})


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
    return f"{type(error).__name__}: {error}"[:2000]


def _without_data(meta: Meta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype), device="meta")


_NEEDS_VALUES = ("meta tensor", "Meta tensor", "meta device", "not compiled with CUDA", "No CUDA GPUs", "NVIDIA driver")


def _needs_values(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _NEEDS_VALUES)


class NoDriver:
    """Triton's view of a device that is not there: all that its launcher asks before it compiles."""

    def __init__(self, device: Device):
        from triton.backends.compiler import GPUTarget

        self._target, self._device = GPUTarget(device.backend, device.arch, device.warp_size), device
        self.utils = self

    def get_current_target(self) -> Any:
        """The target that is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where tensors have no data."""
        return torch.device("meta")

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The device's row, in Triton's words."""
        return {
            "max_shared_mem": self._device.shared_per_block,
            "multiprocessor_count": self._device.sms,
            "max_num_regs": self._device.registers_per_sm,
            "warpSize": self._device.warp_size,
        }

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """For autotuners: every configuration is compiled and takes as long as every other."""

        def compile_only(call: Callable[[], Any], quantiles: Sequence[float] = (), **unused: Any) -> list[float]:
            call()
            return [1.0] * max(len(quantiles), 1)

        return compile_only

    def get_empty_cache_for_benchmark(self) -> None:
        """Nothing is timed."""

    def clear_cache(self, cache: Any) -> None:
        """Nothing is timed."""


class _Recorder:
    """Turns every launch in this process into a compilation for `device`, and keeps what was compiled."""

    def __init__(self, device: Device):
        import triton
        from triton.runtime.jit import JITFunction

        self.device, self.prepares = device, False
        self._found: list[tuple[KernelFacts, Any]] = []
        self._refused: tuple[str, Exception] | None = None
        triton.runtime.driver.set_active(NoDriver(device))
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
                self._add(compiled, tuple(grid(bound)) if callable(grid) else tuple(grid), bound.values())
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
                sizes[compiled.hash] = _registers(compiled)
            registers, spills = sizes[compiled.hash]
            out.append(replace(facts, registers=registers, spills=spills))
        return tuple(out)

    def _add(self, compiled: Any, grid: tuple[int, ...], arguments: Iterable[Any]) -> None:
        meta = compiled.metadata
        text = compiled.asm.get("ptx") or compiled.asm.get("amdgcn") or ""
        full = (*(int(g) for g in grid), 1, 1, 1)
        facts = KernelFacts(
            name=compiled.src.name,
            prepares=self.prepares,
            grid=(full[0], full[1], full[2]),
            launches=1,
            warps=meta.num_warps,
            threads=meta.num_warps * self.device.warp_size,
            stages=meta.num_stages,
            shared_bytes=meta.shared,
            registers=None,
            spills=None,
            tensor_bytes=_tensor_bytes(arguments),
            dots=dot_types(text),
            warpgroup="wgmma.mma_async" in text or "tcgen05.mma" in text,
            instructions=len(_INSTRUCTION.findall(text)),
        )
        self._found.append((facts, compiled))


def _explain(kernel: str, error: Exception) -> tuple[str, int | None]:
    """What the compiler refuses in `kernel`, in words, and the line."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    lines = [line for e in chain if (line := getattr(getattr(e, "node", None), "lineno", None)) is not None]
    where = f"kernel {kernel}" + (f", line {lines[-1]}" if lines else "")
    text = f"{where}: {type(chain[-1]).__name__}: {chain[-1]}"
    if len(chain) > 1 and lines:
        text += f"\n{next(e for e in reversed(chain) if hasattr(e, 'node'))}"
    return text[:2000], lines[-1] if lines else None


def _build_launcher(kernel: Any, device: Device) -> None:
    """Compile the C stub that launches the kernel; without a CUDA driver it cannot be linked and is left out."""
    if device.backend != "cuda":
        return
    from triton.backends.nvidia.driver import CudaLauncher

    try:
        CudaLauncher(kernel.src, kernel.metadata)
    except NO_LINK:
        return


_DOTS = (
    re.compile(r"wgmma\.mma_async\.\S*?\.m\d+n\d+k\d+\.\w+\.(bf16|f16|tf32|e4m3|e5m2|s8|u8)"),
    re.compile(r"mma\.sync\.\S*?\.m\d+n\d+k\d+\.row\.col\.\w+\.(bf16|f16|tf32|e4m3|e5m2|s8|u8|f64)"),
    re.compile(r"tcgen05\.mma\S*?\.kind::(f16|tf32|f8f6f4|i8)"),
    re.compile(r"v_(?:mfma|wmma)_f32_\d+x\d+x\d+_?(bf16|f16|xf32|f32|fp8)"),
)


_INSTRUCTION = re.compile(r"^[ \t]+(?![ \t.;/{}])\S", re.MULTILINE)


def dot_types(assembly: str) -> tuple[str, ...]:
    """Operand dtypes of the tensor-core instructions in PTX or AMD assembly.

    >>> dot_types("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {...}")
    ('bf16',)
    """
    return tuple(sorted({m for pattern in _DOTS for m in pattern.findall(assembly)}))


def _tensor_bytes(arguments: Iterable[Any]) -> int:
    storages: dict[int, tuple[int, dict[tuple[int, int], int]]] = {}
    for a in arguments:
        t = getattr(a, "base", a) if not isinstance(a, torch.Tensor) else a
        if isinstance(t, torch.Tensor):
            storage = t.untyped_storage()
            _, views = storages.setdefault(storage._cdata, (storage.nbytes(), {}))
            views[(int(t.storage_offset()), t.numel())] = t.numel() * t.element_size()
    return sum(min(total, sum(views.values())) for total, views in storages.values())


def _registers(compiled: Any) -> tuple[int | None, int | None]:
    """Registers a thread and bytes of stack and local memory, from the binary (`cuobjdump`) or AMD's assembly text."""
    from triton import knobs

    if text := compiled.asm.get("amdgcn"):
        count = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|agpr_count|vgpr_spill_count):\s+(\d+)", text)}
        return count.get("vgpr_count", 0) + count.get("agpr_count", 0), 4 * count.get("vgpr_spill_count", 0)
    path = next((p for name, p in compiled.metadata_group.items() if name.endswith(".cubin")), None)
    if path is None:
        return None, None
    try:
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, RuntimeError, subprocess.TimeoutExpired, AttributeError):  # no such tool
        return None, None
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout + done.stderr)
    return (int(found[1]), int(found[2]) + int(found[3])) if found else (None, None)


__all__ = ["Compiled", "KernelFacts", "NoDriver", "compile_here", "dot_types"]
