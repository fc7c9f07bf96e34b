"""An analytic model of how long generated kernels take, from what the compiler says about them.

Deals in launches (grid, registers, shared memory, bytes of their tensors, tensor-core instructions), in what a family
says of its schedules, and in a device's datasheet. Constants say where they were measured. Knows nothing about
how kernels are compiled. Everything it says is an estimate; it is never compared with a measured time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qimeng.backend.facts import KernelFacts
from qimeng.device import Device
from qimeng.envs.cost.roofline import (
    COPY_SHARE,
    L2_SPEEDUP,
    L2_USABLE,
    LAUNCH_MS,
    PRODUCT_WRITE_SHARE,
    node_ms,
    product_flops,
    source_bytes,
)
from qimeng.errors import IllegalAction
from qimeng.family import Cost, Unsupported, family_of, plan_of
from qimeng.graph.region import Region
from qimeng.program.program import Implementation, Program

TILE_SHARE, TILE_OVERHEAD, MOST_SHARE = 1.08, 40.0, 0.8
"""A product reaches `TILE_SHARE / (1 + TILE_OVERHEAD (1 / block_m + 1 / block_n))` of the peak, at most `MOST_SHARE`.

Against 562 configurations on an H200 (Triton 3.6, nine shapes) the time of a product is off by 3 % at the median, and
the logarithms correlate by 0.96; 64 x 256 is 13 % too fast, plain fp32 in 128 x 128 blocks 0.66 (0.68 measured).
"""

INLINE_SHARE = 0.5
"""What is left of a product's rate where its main loop splits operands (bf16x6: 67 TFLOP/s, packed 131)."""

NO_WARPGROUP_SHARE = 0.25
"""What is left of a product's rate on Hopper where Triton uses `mma.sync` (TF32, 4096^3: 86 of 363 TFLOP/s)."""

BYTES = {"e4m3", "e5m2", "s8", "u8", "f8f6f4", "i8", "fp8"}
"""What assembly calls operands of 8 bits."""

OVERLAP_LOST = 0.3
"""Share of the shorter of a product's arithmetic and traffic that is not hidden behind the longer one."""

IN_FLIGHT_BYTES = 24 << 10
"""Bytes an SM must have asked for to reach the full bandwidth: 4.5 TB/s x 0.7 us / 132 SMs (Little's law)."""

BYTES_A_THREAD = 64
"""Bytes that a thread asks for before it waits, where no schedule says more."""

SM_REACH = 1.5
"""How many times its fair share of the bandwidth one SM can take when others are idle."""

TAIL_LOST = 0.5
"""Share of the last wave's idle time that is lost where a kernel only moves memory: blocks do not run in step."""

ISSUE_SHARE = 0.7
"""Share of the peak instruction rate (half the fp32 peak, which counts a multiply-add as two) that kernels reach."""

MOST_BLOCKS = 32
"""Most resident blocks of an SM on every device of the table."""


def program_ms(
    program: Program,
    kernels: Mapping[str, Sequence[KernelFacts]],
    device: Device,
    mode: str = "default",
) -> dict[str, float]:
    """Estimated milliseconds of each region that a call of `program` computes, by region id.

    Args:
        program: what is estimated.
        kernels: region signature to the compiled kernels of what implements it; a region that is missing here is taken
            to run on PyTorch.
        device: where it runs.
        mode: precision mode, for what runs on PyTorch.
    """
    times = {}
    for region in program.called:
        found = kernels.get(region.signature)
        if found is None:
            times[region.id] = sum(node_ms(program.graph, node, device, mode) for node in region.ops)
        else:
            times[region.id] = region_ms(region, program.implementation(region), found, device)
    return times


def region_ms(
    region: Region,
    implementation: Implementation,
    kernels: Sequence[KernelFacts],
    device: Device,
) -> float:
    """Estimated milliseconds of one call of a region's kernels; preparation is left out."""
    cost = cost_of(region, implementation)
    launched = [k for k in kernels if not k.prepares]
    work = sum(product_flops(region.graph, node) for node in region.ops)
    main = _product_kernel(launched) if work else None
    total = cost.waiting_ms
    for number, kernel in enumerate(launched):
        hot = _hot_bytes(region, device) if number == 0 else _left_in_cache(launched[:number], kernel, device)
        if kernel is main:
            ms = _product_ms(kernel, region, work, hot, cost, device)
        else:
            ms = _moving_ms(kernel, hot, cost, device)
        total += kernel.launches * (LAUNCH_MS + ms)
    return total


def cost_of(region: Region, implementation: Implementation) -> Cost:
    """What the family of a region's schedule says; nothing for a kernel without one, or with one that was made up."""
    if implementation.schedule is None:
        return Cost()
    try:
        family = family_of(implementation.schedule)
        return family.cost(plan_of(family, region), implementation.schedule)
    except (Unsupported, IllegalAction):
        return Cost()


def resident_blocks(kernel: KernelFacts, device: Device) -> int:
    """Blocks of `kernel` that one SM holds at once, at least 1."""
    registers = max(kernel.registers or 32, 16) * kernel.threads
    fits = [MOST_BLOCKS, device.threads_per_sm // max(kernel.threads, 1), device.registers_per_sm // registers]
    if kernel.shared_bytes:
        fits.append(device.shared_per_sm // (kernel.shared_bytes + 1024))  # CUDA keeps 1 KiB a block for itself
    return max(1, min(fits))


def tile_share(block_m: int, block_n: int) -> float:
    """Share of the peak rate that a product reaches with this output tile."""
    return min(MOST_SHARE, TILE_SHARE / (1 + TILE_OVERHEAD * (1 / block_m + 1 / block_n)))


def _product_kernel(kernels: Sequence[KernelFacts]) -> KernelFacts | None:
    """The kernel that multiplies: the one with tensor-core instructions, else the longest."""
    return max(kernels, key=lambda k: (bool(k.dots), k.instructions), default=None)


def _product_ms(
    kernel: KernelFacts,
    region: Region,
    work: int,
    hot: float,
    cost: Cost,
    device: Device,
) -> float:
    tiles = kernel.blocks if cost.programs is None else cost.programs
    rate = _rate_tflops(kernel, device) * 1e9 * tile_share(*cost.tile)
    if cost.splits_operands:
        rate *= INLINE_SHARE
    waiting = math.ceil(tiles / device.sms) * device.sms / max(tiles, 1)
    compute = cost.products * work * cost.padded * waiting / rate
    written = min(sum(region.graph.meta(v).bytes for v in region.outputs), kernel.tensor_bytes)
    bandwidth = device.bandwidth_gbs * 1e6
    read = kernel.tensor_bytes - written - hot * (1 - 1 / L2_SPEEDUP)
    memory = max(read, 0.0) / (bandwidth * COPY_SHARE) + written / (bandwidth * PRODUCT_WRITE_SHARE)
    return max(compute, memory) + OVERLAP_LOST * min(compute, memory) + _spill_ms(kernel, device)


def _rate_tflops(kernel: KernelFacts, device: Device) -> float:
    """Peak rate of the instructions that `kernel` multiplies with, in TFLOP/s."""
    if not kernel.dots:
        return device.fp32_tflops
    if set(kernel.dots) <= BYTES:
        rate = device.byte_tflops
    else:
        rate = device.tf32_tflops if set(kernel.dots) <= {"tf32", "xf32", "f32"} else device.half_tflops
    return rate * NO_WARPGROUP_SHARE if device.has("warpgroup") and not kernel.warpgroup else rate


def _moving_ms(kernel: KernelFacts, hot: float, cost: Cost, device: Device) -> float:
    bandwidth = device.bandwidth_gbs * COPY_SHARE * 1e6
    resident = resident_blocks(kernel, device)
    again = _read_again(kernel, resident, cost, device)
    moved = kernel.tensor_bytes + again - min(hot, kernel.tensor_bytes) * (1 - 1 / L2_SPEEDUP)
    block_bytes = max(kernel.threads * BYTES_A_THREAD, cost.block_bytes)
    busy = min(resident, math.ceil(kernel.blocks / device.sms)) * block_bytes / IN_FLIGHT_BYTES
    reach = kernel.blocks * SM_REACH / device.sms
    waves = kernel.blocks / (device.sms * resident)
    tail = 1 + TAIL_LOST * (math.ceil(waves) / waves - 1) if waves > 1 else 1.0
    memory = moved / bandwidth / min(1.0, busy, reach) * tail
    issued = kernel.blocks * kernel.threads * kernel.instructions / min(1.0, kernel.blocks / device.sms)
    return max(memory, issued / (device.fp32_tflops / 2 * ISSUE_SHARE * 1e9)) + _spill_ms(kernel, device)


def _read_again(kernel: KernelFacts, resident: int, cost: Cost, device: Device) -> float:
    """Bytes read after the first time by forms that pass over a row more than once, as bytes from memory."""
    held = resident * device.sms * cost.held_bytes <= L2_USABLE * device.l2_bytes
    return cost.again_reads * min(cost.again_bytes, kernel.tensor_bytes) / (L2_SPEEDUP if held else 1.0)


def _hot_bytes(region: Region, device: Device) -> float:
    """Bytes of the region's inputs that the regions before it have just written and the L2 cache still holds."""
    sizes = [source_bytes(region.graph.meta(v)) for v in region.inputs if region.graph.nodes[v.node].kind == "op"]
    return float(sum(s for s in sizes if s <= L2_USABLE * device.l2_bytes))


def _left_in_cache(before: Sequence[KernelFacts], kernel: KernelFacts, device: Device) -> float:
    """Bytes that a later kernel of the same region finds in the L2 cache: all, where they fit."""
    fits = max(before[-1].tensor_bytes, kernel.tensor_bytes) <= L2_USABLE * device.l2_bytes
    return float(kernel.tensor_bytes) if fits else 0.0


def _spill_ms(kernel: KernelFacts, device: Device) -> float:
    """Spilled registers go out and come back once a thread, through the L2 cache."""
    moved = 2 * (kernel.spills or 0) * kernel.threads * kernel.blocks
    return moved / (device.bandwidth_gbs * L2_SPEEDUP * 1e6)


__all__ = ["cost_of", "program_ms", "region_ms", "resident_blocks", "tile_share"]
