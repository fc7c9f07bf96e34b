"""Which schedules a product with a stored weight starts from, and its tunings.

Reasoned from what is moved, not swept: for few rows the codes are all that counts, and enough programs must read them
at once; for many rows the tiles are those of a product of half operands. Deals in block sizes. Knows nothing about
kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.moves import Pipeline, Reordering, Split, Tiling
from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import MAX_ALTERNATIVES, Move, family_field
from qimeng.graph.opgraph import itemsize
from qimeng.vocabulary.lowprecision.stored import Stored


@dataclass(frozen=True)
class StoredSchedule(GemmSchedule):
    """How a product with a stored weight is cut into tiles; see `GemmSchedule` for the other fields.

    Attributes:
        sums: the scale of a group multiplies the products of each step rather than the codes, where a step reads no
            more than one group.
        quick: codes of four bits become numbers of a half type by a few instructions of NVIDIA's for eight of them.
    """

    family: str = family_field("lowprecision")
    sums: bool = False
    quick: bool = False

    @property
    def numerics(self) -> str:
        """Where scales are multiplied, as well."""
        return f"{super().numerics}, {self.sums}"


@dataclass(frozen=True, eq=False)
class StoredPlan:
    """A product whose right operand is a stored weight.

    Attributes:
        gemm: the product, its right operand read by `qimeng.vocabulary.lowprecision.reading`.
        stored: the weight.
        inputs: the entry function's parameters, in the order of the region's inputs.
        hidden: name of the product's input that the stored weight stands for.
    """

    gemm: GemmPlan
    stored: Stored
    inputs: tuple[str, ...]
    hidden: str


Blocks = tuple[int, int, int, int, int, int]
"""block_m, block_n, block_k, warps, stages, and programs for each multiprocessor that share the depth (0: no split)."""

FEW, SOME = 16, 64
"""Rows up to which a product waits for its weight alone, and up to which it takes one tile of rows."""

FEW_SWEEP: tuple[Blocks, ...] = (
    (16, 32, 256, 4, 4, 0),
    (16, 16, 256, 4, 4, 0),
    (16, 64, 128, 4, 5, 2),
    (16, 64, 256, 4, 3, 4),
    (16, 128, 128, 4, 4, 2),
    (16, 32, 128, 2, 5, 4),
    (16, 32, 512, 4, 3, 0),
)
SOME_SWEEP: tuple[Blocks, ...] = (
    (64, 64, 128, 4, 4, 1),
    (64, 32, 128, 4, 4, 0),
    (64, 128, 64, 4, 4, 1),
    (64, 64, 64, 4, 4, 2),
    (32, 64, 128, 4, 4, 1),
)
MANY_SWEEP: tuple[Blocks, ...] = (
    (128, 128, 64, 8, 3, 0),
    (128, 128, 64, 4, 3, 0),
    (128, 256, 64, 8, 3, 0),
    (256, 128, 64, 8, 3, 0),
    (64, 128, 64, 4, 4, 0),
)

PRECISIONS = ("ieee", "tf32x3")
"""How fp32 activations are multiplied: as they are, or in three products of TF32 parts."""


def default_schedule(plan: StoredPlan, device: Device) -> StoredSchedule:
    """The plain schedule."""
    return schedules(plan, device)[0]


def schedules(plan: StoredPlan, device: Device) -> tuple[StoredSchedule, ...]:
    """At most eight schedules, the best guess first, each once."""
    rows = plan.gemm.shape[1]
    sweep = FEW_SWEEP if rows <= FEW else SOME_SWEEP if rows <= SOME else MANY_SWEEP
    precisions = ("ieee",) if plan.gemm.half else PRECISIONS
    fitted = [_fit(plan, device, blocks, p) for blocks in sweep for p in precisions]
    if plan.stored.group:
        sums = [_by_groups(s, plan.stored.group) for s in fitted]
        if plan.stored.bits == 8:  # each scale is of a whole step
            return tuple(dict.fromkeys(sums))[:MAX_ALTERNATIVES]
        fitted = [*fitted, sums[0]] if rows > SOME else [*sums, *fitted[:2]]
    return tuple(dict.fromkeys(fitted))[:MAX_ALTERNATIVES]


def _fit(plan: StoredPlan, device: Device, blocks: Blocks, precision: str) -> StoredSchedule:
    """A schedule with blocks no larger than the problem, its depth shared where that was asked for."""
    batch, m, n, k = plan.gemm.shape
    bm, bn, bk, warps, stages, per_sm = blocks
    bm, bn, bk = min(bm, power_of_two(m, 16)), min(bn, power_of_two(n, 16)), min(bk, power_of_two(k, 32))
    if not plan.gemm.half:
        bk = min(bk, 64)
    tiles, steps = batch * -(-m // bm) * -(-n // bn), -(-k // bk)
    splits = max(1, min(per_sm * device.sms // tiles, steps // 2))
    return StoredSchedule(
        block_m=bm,
        block_n=bn,
        block_k=bk,
        warps=warps,
        stages=stages,
        splits=splits,
        precision=precision,
        quick=plan.stored.bits == 4 and plan.gemm.half and device.has("approximate"),
    )


COPIED = 4
"""Least bytes of a thread that are copied to shared memory while others are used."""

WARPGROUP = 64
"""Rows from which Hopper's tensor cores read both operands from shared memory."""


def _by_groups(schedule: StoredSchedule, group: int) -> StoredSchedule:
    """`schedule` with one scale a step, and as many bytes on their way as before."""
    depth = min(schedule.block_k, group)
    return schedule.but(sums=True, block_k=depth, stages=min(8, schedule.stages * schedule.block_k // depth))


def shared_bytes(plan: StoredPlan, schedule: StoredSchedule) -> int:
    """Bytes of shared memory of a block, as Triton 3.6 allocates them for sm_90 (within 1 %).

    Each stage but the last holds a block of activations, of codes, and of the scales of groups. Where warpgroups
    multiply, the activations take the last stage too. There, and in plain fp32, the widened block has its own place. Of
    one row of activations only that row is held, and once where a thread's part is too small to be copied (4 bytes).
    """
    s, stored = schedule, plan.stored
    left = s.block_m * s.block_k * itemsize(plan.gemm.dtype)
    codes = s.block_n * s.block_k * stored.bits // 8
    scales = s.block_n * max(s.block_k // stored.group, 1) * itemsize("float32") if stored.group and not s.sums else 0
    once = 0
    if plan.gemm.shape[1] == 1:
        row = s.block_k * itemsize(plan.gemm.dtype)
        left, once = (row, 0) if row >= COPIED * 32 * s.warps else (0, row)
    total = (left + codes + scales) * max(s.stages - 1, 1) + once
    widened = s.block_n * s.block_k * itemsize(plan.gemm.dtype)
    if not plan.gemm.half:
        return total + (widened if s.precision == "ieee" else 0)
    return total + (left + widened if s.block_m >= WARPGROUP and s.warps >= 4 else 0)


class Tuning(Move[StoredPlan, StoredSchedule]):
    """A tuning of the products with whole operands, on such a plan."""

    def __init__(self, move: Move[GemmPlan, GemmSchedule]):
        self.move = move

    def schedules(self, plan: StoredPlan, schedule: StoredSchedule, param: str, device: Device) -> Sequence:
        """Those of the move; a step reads whole pairs of codes, and of bytes no more than share a scale."""
        found = self.move.schedules(plan.gemm, schedule, param, device)
        assert all(isinstance(s, StoredSchedule) for s in found)
        most = plan.stored.group if plan.stored.bits == 8 else 0
        return [s for s in found if not most or s.block_k <= most]


def moves() -> dict[str, Tuning]:
    """Kind of action to the move that carries it out."""
    tuned = {"tiling": Tiling(), "reordering": Reordering(), "pipeline": Pipeline(), "split": Split()}
    return {name: Tuning(move) for name, move in tuned.items()}


__all__ = [
    "FEW", "SOME", "StoredPlan", "StoredSchedule", "Tuning", "default_schedule", "moves", "schedules", "shared_bytes",
]  # fmt: skip
