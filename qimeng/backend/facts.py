"""What the compiler says about a kernel, and how it is launched.

Deals in compiled kernels' metadata, assembly text and binaries. Knows nothing about how they came to be compiled, or
whether they fit a device (`qimeng.envs.screening.resources`) or how long they take (`qimeng.envs.cost.kernel_time`).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


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
        overlaps: a product that reads registers may be under way while they are written anew (`overlapping_reads`).
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
    overlaps: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of one launch."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def check(self) -> None:
        """Raise a ValueError where no kernel has such facts: they may come from a process that is not trusted."""
        counts = (*self.grid, self.launches, self.warps, self.threads)
        amounts = (self.stages, self.shared_bytes, self.registers or 0, self.spills or 0, self.tensor_bytes)
        if min(counts) < 1 or min(amounts) < 0:
            raise ValueError(f"kernel {self.name[:100]} has counts that no kernel has")


def facts_of(
    compiled: Any, grid: tuple[int, ...], arguments: Iterable[Any], prepares: bool, warp_size: int
) -> KernelFacts:
    """The facts of one launch, registers and spills aside (`registers_of`).

    Args:
        compiled: Triton's compiled kernel.
        grid: blocks along one to three axes.
        arguments: what the kernel was called with.
        prepares: launched in a preparation of buffers.
        warp_size: threads of a warp.
    """
    meta = compiled.metadata
    text = compiled.asm.get("ptx") or compiled.asm.get("amdgcn") or ""
    full = (*(int(g) for g in grid), 1, 1, 1)
    return KernelFacts(
        name=compiled.src.name,
        prepares=prepares,
        grid=(full[0], full[1], full[2]),
        launches=1,
        warps=meta.num_warps,
        threads=meta.num_warps * warp_size,
        stages=meta.num_stages,
        shared_bytes=meta.shared,
        registers=None,
        spills=None,
        tensor_bytes=tensor_bytes(arguments),
        dots=dot_types(text),
        warpgroup="wgmma.mma_async" in text or "tcgen05.mma" in text,
        instructions=instructions_of(text),
        overlaps=overlapping_reads(text),
    )


def registers_of(compiled: Any) -> tuple[int | None, int | None]:
    """Registers a thread and bytes of stack and local memory, from the binary (`cuobjdump`) or AMD's assembly text."""
    if text := compiled.asm.get("amdgcn"):
        count = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|agpr_count|vgpr_spill_count):\s+(\d+)", text)}
        return count.get("vgpr_count", 0) + count.get("agpr_count", 0), 4 * count.get("vgpr_spill_count", 0)
    path = next((p for name, p in compiled.metadata_group.items() if name.endswith(".cubin")), None)
    found = usage_of(str(path)) if path is not None else {}
    usage = next(iter(found.values()), Usage())
    return usage.registers, usage.spills


@dataclass(frozen=True)
class Usage:
    """What a kernel in a binary uses.

    Attributes:
        registers: registers a thread; None where no tool tells.
        spills: bytes of stack and local memory a thread; None where no tool tells.
        shared: bytes of shared memory a block that the binary asks for by itself.
    """

    registers: int | None = None
    spills: int | None = None
    shared: int = 0


_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def usage_of(path: str) -> dict[str, Usage]:
    """What each kernel in NVIDIA's binary at `path` uses, by name, from Triton's `cuobjdump`; empty without that."""
    try:
        from triton import knobs

        command = [knobs.nvidia.cuobjdump.path, "-res-usage", path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (ImportError, OSError, RuntimeError, subprocess.TimeoutExpired, AttributeError):  # no such tool
        return {}
    return {
        name: Usage(int(registers), int(stack) + int(local), int(shared))
        for name, registers, stack, shared, local in _USAGE.findall(done.stdout + done.stderr)
    }


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


_FROM_REGISTERS = re.compile(r"wgmma\.mma_async\S+ \{[^}]*\}, \{")
_STILL_PENDING = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+[1-9]")


def overlapping_reads(ptx: str) -> bool:
    """Whether a kernel goes on while a product of its left operand's registers is under way.

    It is right as it stands, but the assembler of CUDA before 13.3 may write those registers too early, so that some
    results are wrong now and then (github.com/triton-lang/triton/issues/9433, pull/11781; seen with Triton 3.6).

    >>> overlapping_reads("wgmma.mma_async.sync.aligned.m64n8k8 {%r1}, {%r2}, %rd1; wgmma.wait_group.sync.aligned 3;")
    True
    """
    return bool(_FROM_REGISTERS.search(ptx) and _STILL_PENDING.search(ptx))


def instructions_of(assembly: str) -> int:
    """Number of instructions in PTX or AMD assembly text."""
    return len(_INSTRUCTION.findall(assembly))


def tensor_bytes(arguments: Iterable[Any]) -> int:
    """Bytes of the tensors among `arguments`, what they share counted once."""
    storages: dict[int, tuple[int, dict[tuple[int, int], int]]] = {}
    for a in arguments:
        t = getattr(a, "base", a) if not isinstance(a, torch.Tensor) else a
        if isinstance(t, torch.Tensor):
            storage = t.untyped_storage()
            _, views = storages.setdefault(storage._cdata, (storage.nbytes(), {}))
            views[(int(t.storage_offset()), t.numel())] = t.numel() * t.element_size()
    return sum(min(total, sum(views.values())) for total, views in storages.values())


__all__ = [
    "KernelFacts",
    "Usage",
    "dot_types",
    "facts_of",
    "instructions_of",
    "overlapping_reads",
    "registers_of",
    "tensor_bytes",
    "usage_of",
]
