"""Compiles the kernels of an implementation for a named device, on a machine that need not have one.

Deals in Triton's own launcher under a driver that only says which device it stands for: tensors are on `meta`, launches
compile and are written down, nothing runs. Arguments are specialised as in a real launch, and the cache's keys are the
real ones, so a process with the device finds the binaries ready. Knows nothing about what kernels compute or how fast
they are. `compile_here` changes Triton's global state: it is called in a process of its own (`qimeng.envs.compilers`).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qimeng.device import Device
from qimeng.envs.kernels import load_kernels
from qimeng.errors import QimengError
from qimeng.graph.opgraph import Meta

if TYPE_CHECKING:
    import torch


class CompileFailure(QimengError):
    """An implementation of which some kernel could not be compiled.

    Attributes:
        kind: ``"compile"`` (the compiler refuses a kernel), ``"error"`` (the Python code around it raised),
            ``"meta"`` (it needs a tensor's values or a real GPU, so it cannot be compiled ahead), ``"timeout"`` or
            ``"crash"`` (the compiler died).
        kernel: the kernel, where one was being compiled.
        line: line within that kernel; None where unknown.
    """

    def __init__(self, kind: str, message: str, kernel: str = "", line: int | None = None):
        super().__init__(message)
        self.kind, self.kernel, self.line = kind, kernel, line

    def __reduce__(self) -> tuple[Any, ...]:
        return CompileFailure, (self.kind, str(self), self.kernel, self.line)


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


Compiled = tuple[KernelFacts, ...]


@dataclass(frozen=True)
class KernelJob:
    """What is compiled: one implementation and the tensors it is called with.

    Attributes:
        source: Python text.
        entry: the function to call.
        inputs: a `Meta` for each tensor, a number for each number.
        prepare: the function that prepares buffers; empty where none are.
        prepare_inputs: positions of the inputs that it takes.
    """

    source: str
    entry: str
    inputs: tuple[Meta | float, ...]
    prepare: str = ""
    prepare_inputs: tuple[int, ...] = ()


def warm_up() -> None:
    """Do once, in the server before it forks, what every compilation needs.

    Triton's cache keys hold a hash of its own binaries (about a second) and the version of ptxas; the first operator on
    a tensor without data imports sympy.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    torch.empty_like(torch.empty(1, device="meta"))
    triton_key()
    make_backend(GPUTarget("cuda", 90, 32)).hash()


def compile_here(job: KernelJob, device: Device) -> Compiled:
    """Compile all kernels that `job` launches, in this process, which stands for `device` from then on.

    Raises:
        CompileFailure: what went wrong, and where.
    """
    import torch

    recorder = _Recorder(device)
    try:
        module = load_kernels(job.source)
        inputs = [_meta_tensor(x) if isinstance(x, Meta) else x for x in job.inputs]
        with torch.no_grad(), recorder:
            buffers: tuple[Any, ...] = ()
            if job.prepare:
                recorder.prepares = True
                buffers = getattr(module, job.prepare)(*(inputs[i] for i in job.prepare_inputs))
                recorder.prepares = False
            getattr(module, job.entry)(*inputs, *buffers)
    except CompileFailure:
        raise
    except Exception as error:  # the code around the kernels may raise anything
        kind = "meta" if _needs_values(error) else "error"
        raise CompileFailure(kind, f"{type(error).__name__}: {error}"[:2000]) from error
    return recorder.facts()


def _meta_tensor(meta: Meta) -> torch.Tensor:
    import torch

    return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype), device="meta")


_NEEDS_VALUES = ("meta tensor", "Meta tensor", "meta device", "not compiled with CUDA", "No CUDA GPUs", "NVIDIA driver")


def _needs_values(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _NEEDS_VALUES)


class _FakeDriver:
    """Stands for a device as far as Triton's launcher asks before it compiles."""

    def __init__(self, device: Device):
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(device.backend, device.arch, device.warp_size)
        self.utils = _FakeUtils(device)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        import torch

        return torch.device("meta")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def compile_only(call: Callable[[], Any], quantiles: Sequence[float] = (0.5,), **unused: Any) -> list[float]:
            call()
            return [1.0] * len(quantiles)

        return compile_only


class _FakeUtils:
    def __init__(self, device: Device):
        self._device = device

    def get_device_properties(self, index: int) -> dict[str, int]:
        d = self._device
        return {
            "max_shared_mem": d.shared_per_block,
            "max_num_regs": d.registers_per_sm,
            "multiprocessor_count": d.sms,
            "warpSize": d.warp_size,
        }


class _Recorder:
    """Turns launches into compilations while entered, and keeps what was compiled."""

    def __init__(self, device: Device):
        self.device = device
        self.prepares = False
        self._found: list[tuple[KernelFacts, Any]] = []

    def __enter__(self) -> None:
        import triton
        from triton.runtime.jit import JITFunction

        triton.runtime.driver.set_active(_FakeDriver(self.device))
        launch = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = True, **options: Any) -> Any:
            try:
                compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
                binder = kernel.device_caches[0][-1]
                bound = binder(*args, **options)[0]
            except Exception as error:  # the compiler's errors are of many classes
                raise _failure(kernel.__name__, error) from error
            self._add(compiled, tuple(grid(bound)) if callable(grid) else tuple(grid), bound.values())
            return compiled

        self._launch = launch
        JITFunction.run = run

    def __exit__(self, *unused: object) -> None:
        from triton.runtime.jit import JITFunction

        JITFunction.run = self._launch

    def facts(self) -> Compiled:
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


def _failure(kernel: str, error: Exception) -> CompileFailure:
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    lines = [line for e in chain if (line := getattr(getattr(e, "node", None), "lineno", None)) is not None]
    where = f"kernel {kernel}" + (f", line {lines[-1]}" if lines else "")
    text = f"{where}: {type(chain[-1]).__name__}: {chain[-1]}"
    if len(chain) > 1 and lines:
        text += f"\n{next(e for e in reversed(chain) if hasattr(e, 'node'))}"
    return CompileFailure("compile", text[:2000], kernel, lines[-1] if lines else None)


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
    import torch

    storages: dict[int, tuple[int, dict[tuple[int, int], int]]] = {}
    for a in arguments:
        t = getattr(a, "base", a) if not isinstance(a, torch.Tensor) else a
        if isinstance(t, torch.Tensor):
            storage = t.untyped_storage()
            _, views = storages.setdefault(storage._cdata, (storage.nbytes(), {}))
            views[(int(t.storage_offset()), t.numel())] = t.numel() * t.element_size()
    return sum(min(total, sum(views.values())) for total, views in storages.values())


def _registers(compiled: Any) -> tuple[int | None, int | None]:
    """Registers and spilled bytes a thread, from the binary (`cuobjdump`) or AMD's assembly text."""
    from triton import knobs

    if text := compiled.asm.get("amdgcn"):
        count = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|agpr_count|vgpr_spill_count):\s+(\d+)", text)}
        return count.get("vgpr_count", 0) + count.get("agpr_count", 0), 4 * count.get("vgpr_spill_count", 0)
    path = next((p for name, p in compiled.metadata_group.items() if name.endswith(".cubin")), None)
    if path is None:
        return None, None
    done = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)], capture_output=True, text=True, timeout=20, check=False
    )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout + done.stderr)
    return (int(found[1]), int(found[2]) + int(found[3])) if found else (None, None)


__all__ = ["CompileFailure", "Compiled", "KernelFacts", "KernelJob", "compile_here", "dot_types", "warm_up"]
