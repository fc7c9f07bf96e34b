"""Turns the measurements of a region into advice, one sentence each.

Pure functions of an evaluation, a region, its implementation and a device. Raw counters do not help a model (KernelPro,
CudaForge); conclusions from them do. Knows nothing about prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from qimeng.device import Device
from qimeng.graph.ops import category, flops
from qimeng.graph.region import Region
from qimeng.interfaces import Evaluation, Resources
from qimeng.program.program import Implementation

LAUNCH_MS = 0.005
"""About what one kernel launch costs; a region that takes no longer gains only from fewer launches."""
FAST, SLOW = 0.85, 0.4
"""Shares of the memory bandwidth from which a region counts as bound by it, and below which as not."""
DOTS_BUSY = 0.6
"""Share of the tensor cores' peak that a good matrix product reaches."""
THREAD_REGISTERS = 255


def advise(
    evaluation: Evaluation | None, region: Region, implementation: Implementation, device: Device
) -> tuple[str, ...]:
    """What follows from the evaluation of the program for `region`, most important first; empty where nothing does.

    Args:
        evaluation: of the program in which `implementation` computes `region`; None where it was not judged.
        region: what is computed.
        implementation: its present one.
        device: the device that the evaluation is of.
    """
    found: list[str] = []
    ms = evaluation.region_ms.get(region.id) if evaluation is not None else None
    if evaluation is not None and ms:
        found += _of_time(ms, evaluation, region, implementation, device)
    if implementation.generated:
        if evaluation is not None and evaluation.resources is not None and evaluation.resources.kernels:
            found += _of_resources(evaluation.resources, warps_of(implementation.source), device)
        found += _of_text(region, implementation, device)
    return tuple(found)


def occupancy(resources: Resources, warps: int, device: Device) -> tuple[int, str] | None:
    """Resident warps an SM out of what it holds, in percent, and what limits them; None where registers are unknown.

    Args:
        resources: of the kernel.
        warps: warps a block.
        device: whose SM.
    """
    if not resources.registers or warps < 1:
        return None
    most = device.threads_per_sm // device.warp_size
    threads = warps * device.warp_size
    limits = {
        "registers": device.registers_per_sm // (resources.registers * threads),
        "threads": device.threads_per_sm // threads,
    }
    if resources.shared_bytes:
        limits["shared memory"] = device.shared_per_sm // resources.shared_bytes
    limit = min(limits, key=lambda name: limits[name])
    return round(100 * limits[limit] * warps / most), limit


def warps_of(source: str) -> int:
    """Most warps that a launch in `source` asks for; 4, Triton's default, where none says.

    >>> warps_of("k[(8,)](x, num_warps=8)")
    8
    """
    return max((int(n) for n in re.findall(r"\bnum_warps\s*=\s*(\d+)", source)), default=4)


def _of_time(
    ms: float, evaluation: Evaluation, region: Region, implementation: Implementation, device: Device
) -> Iterator[str]:
    how = "by an estimate, not a measurement, " if evaluation.timing and evaluation.timing.estimated else ""
    whole = sum(evaluation.region_ms.values())
    if len(evaluation.region_ms) > 1 and whole:
        yield f"{how}the region takes {100 * ms / whole:.0f} % of the program's time.".capitalize()
    if ms <= LAUNCH_MS:
        yield f"It takes {ms * 1e3:.1f} microseconds, no more than a launch costs: one kernel instead of several helps."
        return
    work = sum(flops(region.graph, n) for n in region.ops if category(n) == "gemm")
    share = region.bytes_moved() / (ms * 1e6 * device.bandwidth_gbs)
    peak = work / (ms * 1e9 * _peak(region, implementation, device)) if work else 0.0
    if share >= FAST:
        yield (
            f"It moves its inputs and outputs at {100 * share:.0f} % of the memory bandwidth: "
            "nothing but moving fewer bytes will make it faster."
        )
    elif work and peak >= share:
        yield (
            f"Its products run at {100 * peak:.0f} % of the peak rate: "
            + (
                "little is left to gain."
                if peak >= DOTS_BUSY
                else "larger tiles or a deeper pipeline feed them better."
            )
        )
    elif share >= SLOW:
        yield (
            f"It reaches {100 * share:.0f} % of the memory bandwidth: "
            "wider loads or more bytes in flight (larger blocks, more stages) use more of it."
        )
    else:
        yield (
            f"It reaches only {100 * share:.0f} % of the memory bandwidth: it reads or writes more than once, "
            "too few programs run at a time, or arithmetic is the limit."
        )


def _peak(region: Region, implementation: Implementation, device: Device) -> float:
    """Peak TFLOP/s of the arithmetic that the products use."""
    dtype = region.graph.meta(region.outputs[0]).dtype
    return device.peak_tflops("tf32" if dtype == "float32" and "tf32" in implementation.source else dtype)


def _of_resources(resources: Resources, warps: int, device: Device) -> Iterator[str]:
    if resources.spills:
        yield (
            f"A thread spills {resources.spills} B of registers to memory: "
            "smaller tiles, more warps or fewer values held at once avoid it."
        )
    elif resources.registers and resources.registers >= 0.9 * THREAD_REGISTERS:
        yield f"A thread holds {resources.registers} of {THREAD_REGISTERS} registers: a larger tile would spill."
    found = occupancy(resources, warps, device)
    if found is not None and found[0] < 25:
        fewer = "fewer stages or smaller tiles" if found[1] == "shared memory" else "fewer registers a thread"
        yield f"Only {found[0]} % of an SM's warps can be resident, limited by {found[1]}: {fewer} admit more."


def _of_text(region: Region, implementation: Implementation, device: Device) -> Iterator[str]:
    if any(category(n) == "gemm" for n in region.ops) and "tl.dot" not in implementation.source:
        dtype = region.graph.meta(region.outputs[0]).dtype
        rate = device.peak_tflops("tf32" if dtype == "float32" else dtype) / device.fp32_tflops
        gain = f", which are {rate:.0f} times as fast as plain arithmetic" if dtype != "float32" and rate > 1 else ""
        yield f"The matrix product does not use tl.dot and so not the tensor cores{gain}."


__all__ = ["advise", "occupancy", "warps_of"]
