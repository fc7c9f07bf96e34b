"""Which schedules an attention starts from, which ones lowering tries, and what each takes of an SM.

The blocks of half operands are those of Triton's own tutorial of fused attention (06-fused-attention.py, tuned on an
H100), those of fp32 operands follow from the registers and spills that the compiler reports (Triton 3.6, sm_90; depths
64 and 96); none was timed here yet. Deals in block sizes and capacities. Knows nothing about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.families.attention.plan import AttentionPlan
from qimeng.coder.template.families.attention.schedule import AttentionSchedule
from qimeng.coder.template.families.attention.tiles import LEAST, row_blocks
from qimeng.coder.template.families.common import fast_by_default
from qimeng.coder.template.nest.expr import reach
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import Needs
from qimeng.graph.opgraph import itemsize

Blocks = tuple[int, int, int, int]
"""block_m, block_n, warps, stages."""

HALF_SWEEP: tuple[Blocks, ...] = (
    (128, 64, 4, 3),
    (128, 128, 8, 3),
    (128, 64, 8, 3),
    (64, 64, 4, 3),
    (128, 32, 4, 4),
    (64, 32, 4, 3),
)
FULL_SWEEP: tuple[Blocks, ...] = (
    (64, 32, 8, 2),
    (64, 32, 4, 2),
    (128, 32, 8, 1),
    (64, 64, 8, 2),
    (128, 32, 8, 2),
    (32, 32, 4, 2),
)
GUESSES = 4
"""Schedules that lowering tries beside the plain one."""


LEAST_STEPS = 4
"""Steps of a program below which sharing the keys further costs more than it gains."""


def default_schedule(plan: AttentionPlan, device: Device, mode: str) -> AttentionSchedule:
    """The plain schedule: fp32 operands in fp32 arithmetic, except in mode ``"high"``."""
    blocks = HALF_SWEEP[0] if plan.half else FULL_SWEEP[0]
    precision = "tf32" if mode == "high" and not plan.half and _has_tf32(device) else "ieee"
    base = AttentionSchedule(precision=precision, fast=fast_by_default(plan.nest, device) or plan.half)
    return shared(plan, fitted(plan, with_blocks(plan, base, blocks), device), device)


def guesses(plan: AttentionPlan, schedule: AttentionSchedule, device: Device, mode: str) -> list[AttentionSchedule]:
    """Other blocks of half operands; for fp32 operands the tensor cores, as far as the mode admits."""
    if plan.half:
        return list(sweep(plan, schedule, schedule.precision, device)[:GUESSES])
    if not _has_tf32(device):
        return []
    return list(sweep(plan, schedule, "tf32" if mode == "high" else "tf32x3", device)[:GUESSES])


def sweep(
    plan: AttentionPlan, schedule: AttentionSchedule, precision: str, device: Device
) -> tuple[AttentionSchedule, ...]:
    """Configurations for `precision` that fit the device, each once, best guess first."""
    rows = HALF_SWEEP if plan.half else FULL_SWEEP
    base = schedule.but(precision=precision)
    found = [shared(plan, fitted(plan, with_blocks(plan, base, b), device), device) for b in rows]
    return tuple(dict.fromkeys(s for s in found if s != schedule and needs(plan, s).refusal(device) is None))


def with_blocks(plan: AttentionPlan, schedule: AttentionSchedule, blocks: Blocks) -> AttentionSchedule:
    """`schedule` with these blocks, cut to the problem."""
    _, rows, keys, _, _ = plan.shape
    block_m, block_n, warps, stages = blocks
    block_m = min(block_m, power_of_two(rows, LEAST))
    block_n = min(block_n, power_of_two(keys, LEAST))
    warps = min(warps, max(4, block_m // 8))
    return schedule.but(block_m=block_m, block_n=block_n, warps=warps, stages=stages)


def shared(plan: AttentionPlan, schedule: AttentionSchedule, device: Device) -> AttentionSchedule:
    """`schedule` with the keys shared by so many programs that each multiprocessor has one, where keys are many."""
    programs = plan.shape[0] * row_blocks(plan, schedule)
    steps = -(-plan.shape[2] // schedule.block_n)
    return schedule.but(splits=max(1, min(device.sms // programs, steps // LEAST_STEPS)))


def fitted(plan: AttentionPlan, schedule: AttentionSchedule, device: Device) -> AttentionSchedule:
    """`schedule` with fewer stages, then smaller blocks, until the device has what it needs or nothing is left."""
    s = schedule
    while needs(plan, s).refusal(device) is not None:
        if s.stages > 1:
            s = s.but(stages=s.stages - 1)
        elif s.block_n > 32:
            s = s.but(block_n=s.block_n // 2, stages=min(2, schedule.stages))
        elif s.block_m > 32:
            s = s.but(block_m=s.block_m // 2, stages=min(2, schedule.stages))
        else:
            break
    return s


def needs(plan: AttentionPlan, schedule: AttentionSchedule) -> Needs:
    """The queries once, the stages of keys, values and masks in shared memory; scores and products in registers.

    A thread's share of a step's scores, their exponentials and the product must fit its registers.
    """
    depth, columns = (power_of_two(n, LEAST) if n > 1 or i else 0 for i, n in enumerate(plan.shape[3:]))
    size = itemsize(plan.dtype)
    held = schedule.block_m * depth + schedule.stages * schedule.block_n * (depth + columns)
    if not plan.half:  # the weights change threads between the products, in two parts for several of them
        held += schedule.block_m * schedule.block_n * (2 if schedule.precision == "tf32x3" else 1)
    masks = schedule.stages * schedule.block_m * schedule.block_n * sum(_tile_bytes(plan))
    tile = schedule.block_m * (schedule.block_n + columns)
    return Needs(held * size + masks, schedule.warps, tile, values_per_thread=255)


def _tile_bytes(plan: AttentionPlan) -> list[int]:
    """Bytes of an element of each tensor that is read for each query and key, as masks are."""
    found = reach(plan.weights.tile(), lambda e: e is plan.scores)
    sides = (set(plan.rows), set(plan.keys))
    return [itemsize(e.dtype) for e in found if e.op == "load" and all(e.depends & side for side in sides)]


def _has_tf32(device: Device) -> bool:
    return device.tf32_tflops > device.fp32_tflops


__all__ = [
    "FULL_SWEEP",
    "GUESSES",
    "HALF_SWEEP",
    "default_schedule",
    "fitted",
    "guesses",
    "needs",
    "sweep",
    "with_blocks",
]
