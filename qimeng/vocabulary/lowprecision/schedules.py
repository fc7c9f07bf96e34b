"""Which schedules a product with a stored weight starts from, and its tunings.

Reasoned from what is moved, not swept: for few rows the codes are all that counts, and enough programs must read them
at once; for many rows the tiles are those of a product of half operands. Deals in block sizes. Knows nothing about
kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.moves import Pipeline, Reordering, Split, Tiling, resized
from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.ir import VECTOR_BYTES
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
        direct: a product with one row and codes of four bits goes without tensor cores (`direct`).
    """

    family: str = family_field("lowprecision")
    sums: bool = False
    quick: bool = False
    direct: bool = False

    @property
    def numerics(self) -> str:
        """Where scales are multiplied, as well."""
        return f"{super().numerics}, {self.sums}, {self.direct}"


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

DIRECT_SWEEP: tuple[Blocks, ...] = (
    (1, 4, 4096, 4, 1, 0),
    (1, 2, 4096, 4, 1, 0),
    (1, 8, 4096, 4, 1, 0),
    (1, 4, 2048, 2, 1, 0),
    (1, 2, 16384, 8, 1, 0),
)
"""Without tensor cores, of one row: 16 to 128 bytes of codes for each thread in a step."""

MOST_COLUMNS, LEAST_DEPTH, MOST_DEPTH, MOST_WARPS = 16, 256, 16384, 16
"""The most columns of such a tile, the least and the most depth of a step, the most warps."""

ONE_SWEEP: tuple[Blocks, ...] = ((16, 32, 128, 2, 5, 4), (16, 32, 256, 4, 4, 0), (16, 64, 128, 4, 5, 2))
"""With them: the fastest of `FEW_SWEEP` for one row of Llama's layers on an H100, int4 (`h100_lowprecision.jsonl`)."""

PRECISIONS = ("ieee", "tf32x3")
"""How fp32 activations are multiplied: as they are, or in three products of TF32 parts."""


def default_schedule(plan: StoredPlan, device: Device) -> StoredSchedule:
    """The plain schedule."""
    return schedules(plan, device)[0]


def schedules(plan: StoredPlan, device: Device) -> tuple[StoredSchedule, ...]:
    """At most eight schedules, the best guess first, each once."""
    rows = plan.gemm.shape[1]
    if rows == 1 and plan.stored.bits == 4:
        return _of_one_row(plan, device)
    sweep = FEW_SWEEP if rows <= FEW else SOME_SWEEP if rows <= SOME else MANY_SWEEP
    precisions = ("ieee",) if plan.gemm.half else PRECISIONS
    fitted = [_fit(plan, device, blocks, p) for blocks in sweep for p in precisions]
    if plan.stored.group:
        sums = [_by_groups(s, plan.stored.group) for s in fitted]
        if plan.stored.bits == 8:  # each scale is of a whole step
            return tuple(dict.fromkeys(sums))[:MAX_ALTERNATIVES]
        fitted = [*fitted, sums[0]] if rows > SOME else [*sums, *fitted[:2]]
    return tuple(dict.fromkeys(fitted))[:MAX_ALTERNATIVES]


def _of_one_row(plan: StoredPlan, device: Device) -> tuple[StoredSchedule, ...]:
    """Those of one row and codes of four bits: without tensor cores first."""
    _, _, n, k = plan.gemm.shape
    fitted = [_fit(plan, device, blocks, "ieee") for blocks in ONE_SWEEP]
    quick = fitted[0].quick
    direct = [
        StoredSchedule(
            block_m=1,
            block_n=min(bn, power_of_two(n)),
            block_k=min(bk, power_of_two(k, 32)),
            group_m=1,
            warps=warps,
            stages=stages,
            quick=quick,
            direct=True,
        )
        for _, bn, bk, warps, stages, _ in DIRECT_SWEEP
    ]
    sums = _by_groups(fitted[0], plan.stored.group), fitted[1], _by_groups(fitted[2], plan.stored.group)
    return tuple(dict.fromkeys((*direct, *sums)))[:MAX_ALTERNATIVES]


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
    Without tensor cores, the row passes through it in pieces of a vector for each thread.
    """
    s, stored = schedule, plan.stored
    if s.direct:
        return min(VECTOR_BYTES * 32 * s.warps, s.block_k // 2)
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

    def __init__(self, name: str, move: Move[GemmPlan, GemmSchedule]):
        self.name, self.move = name, move

    def schedules(self, plan: StoredPlan, schedule: StoredSchedule, param: str, device: Device) -> Sequence:
        """Those of the move; a step reads whole pairs of codes, and of bytes no more than share a scale."""
        if schedule.direct:
            return _directly(plan, schedule, self.name, param)
        found = self.move.schedules(plan.gemm, schedule, param, device)
        assert all(isinstance(s, StoredSchedule) for s in found)
        most = plan.stored.group if plan.stored.bits == 8 else 0
        return [s for s in found if not most or s.block_k <= most]


def _directly(plan: StoredPlan, schedule: StoredSchedule, kind: str, param: str) -> tuple[StoredSchedule, ...]:
    """Tunings without tensor cores: columns and depth of a step, warps, programs that share the depth."""
    s, (_, _, columns, depth) = schedule, plan.gemm.shape
    if kind == "tiling":
        found = [c for c in resized(s, param) if c.block_m == 1]
        found += [c.but(warps=w) for c in list(found) for w in (c.warps * 2, c.warps // 2)]
    elif kind == "pipeline":
        found = [s.but(warps=w) for w in (1, 2, 4, 8)] if param == "warps" else []
    elif kind == "split":
        found = [s.but(splits=c) for c in ([2 * s.splits, 4 * s.splits] if param == "more" else [s.splits // 2])]
    else:
        found = []
    most = power_of_two(depth, 32)
    return tuple(
        c
        for c in dict.fromkeys(found)
        if c != s
        and c.block_n <= min(MOST_COLUMNS, power_of_two(columns))
        and min(LEAST_DEPTH, most) <= c.block_k <= min(MOST_DEPTH, most)
        and 1 <= c.warps <= MOST_WARPS
        and 1 <= c.splits <= max(1, depth // c.block_k)
    )


def moves() -> dict[str, Tuning]:
    """Kind of action to the move that carries it out."""
    tuned = {"tiling": Tiling(), "reordering": Reordering(), "pipeline": Pipeline(), "split": Split()}
    return {name: Tuning(name, move) for name, move in tuned.items()}


__all__ = [
    "FEW", "SOME", "StoredPlan", "StoredSchedule", "Tuning", "default_schedule", "moves", "schedules", "shared_bytes",
]  # fmt: skip
