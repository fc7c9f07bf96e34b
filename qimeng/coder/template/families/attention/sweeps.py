"""Which schedules an attention starts from, which ones lowering tries, and what each takes of an SM.

The blocks of half operands are the fastest ones on an H200 (`experiments.attention`: depths 64, 80 and 128, causal and
not), those of fp32 operands follow from the registers and spills that the compiler reports (Triton 3.6, sm_90; depths
64 and 96) and were not timed yet. Deals in block sizes and capacities. Knows nothing about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.families.attention.boxes import described
from qimeng.coder.template.families.attention.plan import AttentionPlan
from qimeng.coder.template.families.attention.schedule import LEAST, AttentionSchedule
from qimeng.coder.template.families.common import fast_by_default
from qimeng.coder.template.nest.expr import reach
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import Needs
from qimeng.graph.opgraph import itemsize

Blocks = tuple[int, int, int, int]
"""block_m, block_n, warps, stages."""

NARROW_SWEEP: tuple[Blocks, ...] = ((128, 64, 4, 3), (128, 64, 8, 4), (64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2))
WIDE_SWEEP: tuple[Blocks, ...] = ((128, 64, 4, 2), (128, 32, 4, 4), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3))
WIDE_BOUNDED_SWEEP: tuple[Blocks, ...] = (
    (64, 64, 4, 3),
    (128, 128, 8, 3),
    (128, 64, 8, 3),
    (128, 64, 4, 2),
    (128, 32, 8, 3),
)
FULL_SWEEP: tuple[Blocks, ...] = (
    (64, 32, 8, 2),
    (64, 32, 4, 2),
    (128, 32, 8, 1),
    (64, 64, 8, 2),
    (128, 32, 8, 2),
    (32, 32, 4, 2),
)
NARROW = 64
"""Elements of a head up to which the first sweep is for it."""

GUESSES = 4
"""Schedules that lowering tries beside the plain one."""


QUEUES = 17408
"""Bytes of shared memory for what warps of their own copy and compute tell each other (seen: Triton 3.6, sm_90)."""

LEAST_STEPS = 4
"""Steps of a program below which sharing the keys further costs more than it gains."""


def default_schedule(plan: AttentionPlan, device: Device, mode: str) -> AttentionSchedule:
    """The plain schedule: fp32 operands in fp32 arithmetic, except in mode ``"high"``."""
    blocks = _blocks(plan)[0]
    precision = "tf32" if mode == "high" and not plan.half and _has_tf32(device) else "ieee"
    base = AttentionSchedule(precision=precision, fast=fast_by_default(plan.nest, device) or plan.half)
    return shared(plan, fitted(plan, with_blocks(plan, base, blocks), device), device)


def guesses(plan: AttentionPlan, schedule: AttentionSchedule, device: Device, mode: str) -> list[AttentionSchedule]:
    """Copies by descriptors and other blocks of half operands; for fp32 operands the tensor cores, as the mode admits.

    With descriptors an H200 took 0.98 ms instead of 1.05 (bf16, 4 x 16 heads of 4096 x 128; cuDNN 0.91).
    """
    if plan.half:
        copied = [schedule.but(descriptors=True)] if device.has("descriptors") and described(plan) else []
        return [*copied, *sweep(plan, schedule, schedule.precision, device)][:GUESSES]
    if not _has_tf32(device):
        return []
    return list(sweep(plan, schedule, "tf32" if mode == "high" else "tf32x3", device)[:GUESSES])


def sweep(
    plan: AttentionPlan, schedule: AttentionSchedule, precision: str, device: Device
) -> tuple[AttentionSchedule, ...]:
    """Configurations for `precision` that fit the device, each once, best guess first."""
    base = schedule.but(precision=precision)
    found = [shared(plan, fitted(plan, with_blocks(plan, base, b), device), device) for b in _blocks(plan)]
    return tuple(dict.fromkeys(s for s in found if s != schedule and needs(plan, s).refusal(device) is None))


def _blocks(plan: AttentionPlan) -> tuple[Blocks, ...]:
    """Blocks for the operands, best guess first; a tile of more than `NARROW` columns leaves room for less else."""
    if not plan.half:
        return FULL_SWEEP
    if max(plan.shape[3:]) <= NARROW:
        return NARROW_SWEEP
    return WIDE_BOUNDED_SWEEP if plan.bounds else WIDE_SWEEP


def with_blocks(plan: AttentionPlan, schedule: AttentionSchedule, blocks: Blocks) -> AttentionSchedule:
    """`schedule` with these blocks, cut to the problem."""
    _, rows, keys, _, _ = plan.shape
    block_m, block_n, warps, stages = blocks
    block_m = min(block_m, power_of_two(rows, LEAST))
    block_n = min(block_n, power_of_two(keys, LEAST))
    warps = min(warps, max(4, block_m // 8))
    return compilable(plan, schedule.but(block_m=block_m, block_n=block_n, warps=warps, stages=stages))


def compilable(plan: AttentionPlan, schedule: AttentionSchedule) -> AttentionSchedule:
    """`schedule`, with half the warps where `is_miscompiled`."""
    return schedule.but(warps=schedule.warps // 2) if is_miscompiled(plan, schedule) else schedule


def is_miscompiled(plan: AttentionPlan, schedule: AttentionSchedule) -> bool:
    """Whether two groups of four warps share 64 queries and steps of fewer than 32 keys, in TF32 in parts.

    Triton then asks for products of 8 keys (wgmma m64n8k8), and the assembler of CUDA 12.8, which Triton 3.6 brings for
    sm_90, computes the addresses of the values from registers that hold something else: illegal memory accesses (seen
    on an H200). The assemblers of 12.9 and 13.0 do not. Depths 64, 96 and 128, softmax or not, with a mask or not; not
    with wider steps, fewer warps, taller tiles or a single product.
    """
    s = schedule
    groups = s.warps * 16 // s.block_m  # that compute the same scores
    return not plan.half and s.precision == "tf32x3" and s.block_m >= 64 and groups > 1 and s.block_n < 16 * groups


def shared(plan: AttentionPlan, schedule: AttentionSchedule, device: Device) -> AttentionSchedule:
    """`schedule` with the keys shared by so many programs that each multiprocessor has one, where keys are many."""
    programs = plan.shape[0] * schedule.row_blocks(plan.shape[1])
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
    if schedule.specialize:  # two groups of warps hold the tile, and a third one copies
        return Needs(held * size + masks + QUEUES, schedule.warps * 3, tile, values_per_thread=170)
    made = _Miscompiled if is_miscompiled(plan, schedule) else Needs
    return made(held * size + masks, schedule.warps, tile, values_per_thread=255)


class _Miscompiled(Needs):
    """What a kernel needs for which `is_miscompiled` holds."""

    def refusal(self, device: Device) -> str | None:
        """The assembler's fault, on the architecture that it concerns."""
        if device.target == "sm_90":
            return f"{self.warps} warps share so few queries and keys that CUDA 12.8 miscompiles it: half do as well"
        return super().refusal(device)


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
    "NARROW_SWEEP",
    "WIDE_BOUNDED_SWEEP",
    "WIDE_SWEEP",
    "Blocks",
    "compilable",
    "default_schedule",
    "fitted",
    "guesses",
    "is_miscompiled",
    "needs",
    "shared",
    "sweep",
    "with_blocks",
]
