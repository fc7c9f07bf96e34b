"""What the library knows about a GPU: one row of numbers a device, from the datasheet or from the GPU itself.

Deals in capacities (bytes, registers, SMs) and peak rates. Knows nothing about kernels.
Sources: NVIDIA datasheets of A100, H100, H200, L40S and B200; its white paper of the Ada architecture (RTX 4090); the
CUDA C++ programming guide, table "technical specifications per compute capability"; AMD's MI300X data sheet. Peak
rates are dense: half of what a datasheet gives "with sparsity".
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from qimeng.errors import DeviceError

HERE = "(here)"
"""What the name of a device ends with that is a GPU of this machine."""


@dataclass(frozen=True)
class Device:
    """Capacities and peak rates of one GPU.

    Attributes:
        name: short name, the key of `DEVICES`.
        kind: ``"cuda"`` (NVIDIA) or ``"hip"`` (AMD): the programming interface that its kernels are launched through.
        arch: compute capability times ten (90 for 9.0), or a gfx name such as ``"gfx942"``.
        sms: streaming multiprocessors (compute units on AMD).
        shared_per_block: bytes of shared memory that one block may use (opt-in maximum).
        shared_per_sm: bytes of shared memory of one SM.
        registers_per_sm: 32-bit registers of one SM.
        threads_per_sm: resident threads of one SM.
        l2_bytes: bytes of last-level cache.
        memory_bytes: bytes of device memory.
        bandwidth_gbs: datasheet memory bandwidth in GB/s.
        fp32_tflops: peak rate of plain fp32 arithmetic in TFLOP/s.
        tf32_tflops: dense TF32 tensor-core peak in TFLOP/s (fp32 where there is none).
        half_tflops: dense fp16/bf16 tensor-core peak in TFLOP/s.
        warp_size: threads of a warp.
        byte_tflops: dense tensor-core peak of 8-bit operands, int8 or fp8 summed in 32 bits, in TFLOP/s; 0 stands for
            that of half types.
        capabilities: what its instructions offer, of `CAPABILITIES`; by default what its architecture has.
    """

    name: str
    kind: str
    arch: int | str
    sms: int
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    l2_bytes: int
    memory_bytes: int
    bandwidth_gbs: float
    fp32_tflops: float
    tf32_tflops: float
    half_tflops: float
    warp_size: int = 32
    byte_tflops: float = 0.0
    capabilities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Fill in what the architecture offers, and the rate of 8-bit operands, where nothing else is said."""
        if not self.byte_tflops:
            object.__setattr__(self, "byte_tflops", self.half_tflops)
        if not self.capabilities:
            object.__setattr__(self, "capabilities", capabilities_of(self.kind, self.arch))

    def has(self, capability: str) -> bool:
        """Whether the device offers `capability`.

        Raises:
            DeviceError: there is no such capability; the message lists them.

        >>> DEVICES["h200"].has("descriptors"), DEVICES["a100"].has("descriptors")
        (True, False)
        """
        if capability not in CAPABILITIES:
            raise DeviceError(f"unknown capability {capability!r}; known: {', '.join(CAPABILITIES)}")
        return capability in self.capabilities

    @property
    def target(self) -> str:
        """The architecture as compilers call it: ``"sm_90"``, ``"gfx942"``."""
        return f"sm_{self.arch}" if self.kind == "cuda" else str(self.arch)

    def peak_tflops(self, dtype: str) -> float:
        """Peak rate in TFLOP/s for a matrix product of `dtype` (``"float32"``, ``"tf32"``, ``"int8"`` …)."""
        if dtype == "int8" or dtype.startswith("float8"):
            return self.byte_tflops
        if dtype in ("float16", "bfloat16"):
            return self.half_tflops
        return self.tf32_tflops if dtype == "tf32" else self.fp32_tflops

    @property
    def measured(self) -> bool:
        """True when this row describes a GPU in this machine, so that times can be measured."""
        return self.name.endswith(HERE)


@dataclass(frozen=True)
class Card:
    """The GPU that something was measured on, as it calls itself.

    Attributes:
        name: such as ``"NVIDIA H100 PCIe"``; cards of one row of `DEVICES` may differ.
        driver: version of its driver; empty where it does not tell.
        uuid: tells it from others of its kind; empty where that is not known.
    """

    name: str
    driver: str = ""
    uuid: str = ""

    def __str__(self) -> str:
        return f"{self.name}, driver {self.driver}" if self.driver else self.name


CAPABILITIES = {
    "approximate": "special functions (log, exp, tanh, sqrt …) of reduced accuracy by one instruction",
    "bf16": "bfloat16 arithmetic",
    "fp8": "matrix products of 8-bit floating numbers",
    "descriptors": "tiles copied to and from shared memory through tensor descriptors (NVIDIA's TMA)",
    "dependent": "a kernel that is launched while the one before it ends (programmatic dependent launch)",
    "warpgroup": "matrix products by whole warp groups (wgmma, tcgen05), which the full rate needs",
}
"""What a device may offer beyond plain arithmetic, in words."""

_CUDA_RANGE = {
    "approximate": (0, 999),
    "bf16": (80, 999),
    "fp8": (89, 999),
    "descriptors": (90, 999),
    "dependent": (90, 999),
    "warpgroup": (90, 120),
}
"""Capability to the first compute capability (times ten) that has it, and the first above that which has not.

Source: PTX ISA, "Target ISA notes" of the instructions ex2.approx, cvt.bf16, mma with e4m3, cp.async.bulk.tensor,
griddepcontrol, wgmma and tcgen05.
"""

_HIP = {"gfx90a": ("bf16",), "gfx942": ("bf16", "fp8"), "gfx950": ("bf16", "fp8")}
"""The same of AMD's architectures. Source: the CDNA 2, 3 and 4 instruction set manuals."""


def capabilities_of(kind: str, arch: int | str) -> tuple[str, ...]:
    """What a device of that kind and architecture offers, of `CAPABILITIES`.

    >>> capabilities_of("cuda", 120)
    ('approximate', 'bf16', 'fp8', 'descriptors', 'dependent')
    """
    if kind != "cuda":
        return _HIP.get(str(arch), ())
    return tuple(name for name, (first, end) in _CUDA_RANGE.items() if first <= int(arch) < end)


_GIB = 1 << 30
DEVICES: dict[str, Device] = {
    row.name: row
    for row in (
        Device(
            "a100", "cuda", 80, 108, 166912, 167936, 65536, 2048, 40 << 20, 80 * _GIB, 2039, 19.5, 156, 312, 32, 624
        ),
        Device(
            "rtx4090", "cuda", 89, 128, 101376, 102400, 65536, 1536, 72 << 20, 24 * _GIB, 1008, 82.6, 82.6, 165, 32, 330
        ),
        Device("l40s", "cuda", 89, 142, 101376, 102400, 65536, 1536, 96 << 20, 48 * _GIB, 864, 91.6, 183, 362, 32, 733),
        Device("h100", "cuda", 90, 132, 232448, 233472, 65536, 2048, 50 << 20, 80 * _GIB, 3350, 67, 495, 989, 32, 1979),
        Device(
            "h200", "cuda", 90, 132, 232448, 233472, 65536, 2048, 62914560, 150109880320, 4800, 67, 495, 989, 32, 1979
        ),
        Device(
            "b200", "cuda", 100, 148, 232448, 233472, 65536, 2048, 126 << 20, 180 * _GIB, 8000, 80, 1100, 2250, 32, 4500
        ),
        Device(
            "mi300x",
            "hip",
            "gfx942",
            304,
            65536,
            65536,
            131072,
            2048,
            256 << 20,
            192 * _GIB,
            5300,
            163,
            654,
            1307,
            64,
            2614,
        ),
    )
}
"""The devices that kernels can be made for, by name; their rates are the makers' figures."""


def device_named(name: str) -> Device:
    """The row of the table called `name`.

    Raises:
        DeviceError: no such row; the message lists the names.

    >>> device_named("h200").sms
    132
    """
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise DeviceError(f"unknown device {name!r}; known: {', '.join(DEVICES)}") from None


def current_device() -> Device | None:
    """The GPU of this machine, or None when there is none.

    Capacities are read from the GPU; rates come from the table row of the same compute capability (the row whose
    name the GPU reports, if there is one).
    """
    import torch

    if not torch.cuda.is_available():
        return None
    props = torch.cuda.get_device_properties(0)
    kind = "hip" if torch.version.hip else "cuda"
    if kind == "hip":
        arch: int | str = props.gcnArchName.split(":")[0]
    else:
        arch = props.major * 10 + props.minor
    same = [row for row in DEVICES.values() if row.arch == arch] or [
        row for row in DEVICES.values() if row.kind == kind
    ]
    label = props.name.lower().replace(" ", "")
    row = next((r for r in same if r.name in label), same[0])
    return replace(
        row,
        name=f"{row.name}{HERE}",
        arch=arch,
        capabilities=capabilities_of(kind, arch),
        sms=props.multi_processor_count,
        l2_bytes=props.L2_cache_size,
        memory_bytes=props.total_memory,
        shared_per_block=getattr(props, "shared_memory_per_block_optin", row.shared_per_block),
        shared_per_sm=getattr(props, "shared_memory_per_multiprocessor", row.shared_per_sm),
        registers_per_sm=getattr(props, "regs_per_multiprocessor", row.registers_per_sm),
    )


def row_name(name: str) -> str:
    """The name in the table of a device, be it measured or not.

    >>> row_name("h200(here)"), row_name("b200")
    ('h200', 'b200')
    """
    return name.removesuffix(HERE)


def target_device() -> Device:
    """The device to optimize for where none is named: the GPU here, else the H200 row (estimated times)."""
    return current_device() or DEVICES["h200"]


def current_card() -> Card | None:
    """The GPU of this machine, as `current_device` means it; None when there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    driver = driver_version()
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return Card(torch.cuda.get_device_name(0), "" if driver == "none" else driver, uuid)


@lru_cache(1)
def driver_version() -> str:
    """Version of the GPU's driver, as its kernel module says; ``"none"`` where there is none."""
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"):
        file = Path(path)
        if file.is_file():
            return file.read_text().strip()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0] or "none"


__all__ = [
    "DEVICES",
    "Card",
    "Device",
    "capabilities_of",
    "current_card",
    "current_device",
    "device_named",
    "driver_version",
    "row_name",
    "target_device",
]
