"""Which schedules a product with kept blocks starts from, and its tunings.

Reasoned from what is moved, not swept. A tile of blocks is as wide as a block, or half of it. Of single elements the
left operand is read along its rows where there are more than a few: an H100 took 631 us for 1 % of 4096 x 4096 and 512
rows where each element gathers along the depth, 4.4 TB/s of sectors from L2 of which a sixteenth is used. Deals in
block sizes. Knows nothing about kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.moves import resized
from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import MAX_ALTERNATIVES, Move, family_field
from qimeng.graph.opgraph import itemsize
from qimeng.vocabulary.sparse.kept import Kept


@dataclass(frozen=True)
class SparseSchedule(GemmSchedule):
    """How a product with kept blocks is cut into tiles; see `GemmSchedule` for the other fields.

    Attributes:
        transposed: single elements meet runs of the left operand's rows, which lie so or are written so before; a step
            takes `block_k` elements of each of a tile's `block_n` columns.
        share: single elements that each program of a kernel before takes, `block_k` a step, whatever columns they
            belong to, so that a long column is split; the product then adds sums. 0: a program takes whole columns.
        padded: single elements are stored as many for each column as the longest has (ELL), the first ones of all
            columns side by side, so that a step takes one of each column of a tile.
        by_depth: single elements are stored by their depth in each tile of columns (CSC), and multiplied on the tensor
            cores, `block_k` a step.
    """

    family: str = family_field("sparse")
    transposed: bool = False
    share: int = 0
    padded: bool = False
    by_depth: bool = False

    @property
    def numerics(self) -> str:
        """In which order single elements are added, as well."""
        return f"{super().numerics}, {self.transposed}, {self.share}, {self.padded}, {self.by_depth}"


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """A product whose right operand is made of kept blocks.

    Attributes:
        gemm: the product, its right operand read by `qimeng.vocabulary.sparse.reading`.
        kept: the blocks.
        inputs: the entry function's parameters, in the order of the region's inputs.
        hidden: name of the product's input that the blocks stand for.
    """

    gemm: GemmPlan
    kept: Kept
    inputs: tuple[str, ...]
    hidden: str


LEAST, MOST = 16, 256
"""The least and the most rows of a tile of blocks."""

ROWS, STEPS = 64, (16, 512)
"""The most rows of a tile of single elements, and the least and the most elements of a step."""

VALUES = 4096
"""Products that a step of single elements makes at most."""

TURNED = 8
"""Rows from which they are read as runs: 16 bytes of a half type."""

Shape = tuple[int, int, int, int, int]

SOME = 32
"""Rows up to which a tile has few columns, so that there are enough programs."""

ONE_SWEEP: tuple[Shape, ...] = (
    (1, 8, 32, 4, 0),
    (1, 4, 64, 4, 0),
    (1, 16, 16, 4, 0),
    (1, 4, 32, 2, 0),
    (1, 2, 64, 1, 0),
    (1, 64, 32, 1, 256),
    (1, 64, 64, 2, 1024),
)
SOME_SWEEP: tuple[Shape, ...] = (
    (32, 4, 16, 4, 0),
    (32, 8, 8, 4, 0),
    (32, 2, 32, 4, 0),
    (32, 4, 8, 2, 0),
    (32, 16, 4, 4, 0),
    (32, 16, 16, 1, 128),
    (32, 16, 32, 2, 256),
)
MANY_SWEEP: tuple[Shape, ...] = (
    (64, 16, 4, 4, 0),
    (128, 16, 2, 4, 0),
    (32, 16, 4, 4, 0),
    (128, 8, 4, 4, 0),
    (16, 16, 4, 4, 0),
    (64, 16, 8, 1, 128),
    (128, 32, 16, 4, 512),
)
"""Rows and columns of a tile, elements of a step, warps, elements of a share. The rows of a thin tile stay in L1."""


def schedules(plan: SparsePlan) -> tuple[SparseSchedule, ...]:
    """At most eight schedules, the best guess first, each once."""
    _, rows, _, depth = plan.gemm.shape
    block = plan.kept.block
    if block == 1:
        return _single(plan)
    high = max(LEAST, min(power_of_two(rows), 128))
    precisions = ("ieee",) if plan.gemm.half else ("ieee", "tf32x3")
    half, twice = max(LEAST, high // 2), min(MOST, high * 2)
    shapes = [(high, 4, 6), (half, 4, 6), (high, 8, 6), (twice, 8, 6), (high, 4, 8), (high, 2, 6), (high, 4, 4)]
    made = [
        SparseSchedule(block_m=m, block_n=block, block_k=block, warps=w, stages=s, precision=p)
        for m, w, s in shapes
        for p in precisions
        if m <= max(LEAST, power_of_two(rows))
    ]
    return tuple(dict.fromkeys(made))[:MAX_ALTERNATIVES]


def _single(plan: SparsePlan) -> tuple[SparseSchedule, ...]:
    """Those of single elements: tiles of several columns first where the rows are worth reading as runs."""
    _, rows, columns, _ = plan.gemm.shape
    each = max(1, plan.kept.count // plan.kept.shape[0])
    found = [
        SparseSchedule(
            block_m=min(m, power_of_two(rows)),
            block_n=min(n, power_of_two(columns)),
            block_k=min(k, power_of_two(each)),
            group_m=1,
            warps=warps,
            stages=2,
            transposed=True,
            share=share,
        )
        for m, n, k, warps, share in (ONE_SWEEP if rows == 1 else SOME_SWEEP if rows <= SOME else MANY_SWEEP)
    ]
    high = min(power_of_two(rows), ROWS)
    long = max(STEPS[0], min(power_of_two(each), STEPS[1], VALUES // high))
    shapes = [(high, long, 4), (high, max(STEPS[0], long // 2), 2), (max(1, high // 2), long, 4), (high, long, 1)]
    gathered = [SparseSchedule(block_m=m, block_n=1, block_k=k, warps=w, stages=2) for m, k, w in shapes]
    made = gathered if 1 < rows < TURNED else [*found, gathered[2]] if rows <= SOME else found
    return tuple(dict.fromkeys(made))[:MAX_ALTERNATIVES]


MOST_COLUMNS, SHARES = 64, (64, 4096)
"""The most columns of a tile of single elements, and the least and the most of these in a share."""

WARPGROUP = 64
"""Rows from which Hopper's tensor cores read both operands from shared memory."""


def shared_bytes(plan: SparsePlan, schedule: SparseSchedule) -> int:
    """Bytes of shared memory of a block, as Triton 3.6 allocates them for sm_90; at most, except of half types.

    A block's column is fetched first, so that half of the stages hold blocks. Where warpgroups multiply, one more does.
    """
    s = schedule
    if s.by_depth:
        return _depth_bytes(plan, s)
    if plan.kept.block == 1:
        return 4 * held_values(plan, s)
    ahead = max(1, (s.stages - 1) // 2)
    held = ahead + (s.block_m >= WARPGROUP and s.warps >= 4)
    return (s.block_m + s.block_n) * s.block_k * itemsize(plan.gemm.dtype) * held + 4 * ahead


def held_values(plan: SparsePlan, schedule: SparseSchedule) -> int:
    """Sums that a block holds, of single elements those of each place of a step."""
    s = schedule
    if plan.kept.block > 1 or s.by_depth:
        return s.block_m * s.block_n
    return s.block_m * max(s.block_k, s.block_n) if s.share or not s.transposed else s.block_m * s.block_n * s.block_k


SparseMove = Move[SparsePlan, SparseSchedule]


class Tiling(SparseMove):
    """Twice or half the rows of a tile, or its columns; the depth of a step of single elements."""

    def schedules(self, plan: SparsePlan, schedule: SparseSchedule, param: str, device: Device) -> Sequence:
        """None where a block allows no other."""
        found = resized(schedule, param)
        (low_m, low_n, low_k), (high_m, high_n, high_k) = _limits(plan, schedule)
        return tuple(
            c
            for c in found
            if low_m <= c.block_m <= high_m
            and low_n <= c.block_n <= high_n
            and low_k <= c.block_k <= high_k
            and _loads_stay(c)
        )


def _limits(plan: SparsePlan, schedule: SparseSchedule) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The least and the most rows, columns and depth of a tile."""
    block = plan.kept.block
    if block > 1:
        return (LEAST, LEAST, block), (MOST, block, block)
    if schedule.by_depth:
        return (LEAST, LEAST, LEAST), (MOST, MOST_PADDED, 64)
    if schedule.padded:
        return (min(TURNED, power_of_two(plan.gemm.shape[1])), 1, 1), (MOST, MOST_PADDED, 1)
    if schedule.transposed:
        return (min(TURNED, power_of_two(plan.gemm.shape[1])), 1, 1), (MOST, MOST_COLUMNS, STEPS[1])
    return (1, 1, STEPS[0]), (ROWS, 1, STEPS[1])


def _loads_stay(schedule: SparseSchedule) -> bool:
    """Whether a step's elements are fewer than threads, of single elements on several rows that are read transposed.

    Triton 3.6 then has each thread load what it multiplies by. Of more it takes every element once and passes all that
    the step has read through shared memory.
    """
    if schedule.by_depth:
        return True
    lanes = schedule.block_k * (1 if schedule.share else schedule.block_n)
    return not schedule.transposed or schedule.block_m == 1 or lanes < 32 * schedule.warps


class Split(SparseMove):
    """The single elements of a program: fewer or more for each, or whole columns."""

    def check(self, plan: SparsePlan, schedule: SparseSchedule, param: str, device: Device, mode: str) -> None:
        """Only of single elements that meet runs of rows."""
        if not schedule.transposed:
            raise IllegalAction("only single elements that meet a transposed left operand are shared by number")
        if schedule.by_depth:
            raise IllegalAction("elements lie by their depth: every program takes whole columns; storage balanced")
        if schedule.padded:
            raise IllegalAction("columns are padded to one length: every program takes whole ones; storage balanced")

    def schedules(self, plan: SparsePlan, schedule: SparseSchedule, param: str, device: Device) -> Sequence:
        """Shares of 64 to 4096 elements; past the last one, whole columns."""
        s, (least, most) = schedule, SHARES
        if param == "more":
            found = [s.share // 2, s.share // 4] if s.share else [512, 128]
        else:
            found = [s.share * 2, s.share * 4, 0] if s.share else []
        return tuple(s.but(share=n) for n in found if n == 0 or least <= n <= most)


class Storage(SparseMove):
    """Single elements by columns, in equal shares, or padded to the longest column."""

    def check(self, plan: SparsePlan, schedule: SparseSchedule, param: str, device: Device, mode: str) -> None:
        """Only of single elements; but for ``csr``, of so many rows that they are read as runs."""
        if plan.kept.block > 1:
            raise IllegalAction(f"storage is a choice for single elements, these are {plan.kept.text}")
        if param == storage_of(schedule):
            raise IllegalAction(f"the elements are stored as {param} already")
        rows = plan.gemm.shape[1]
        if param == "csc" and rows < TURNED:
            raise IllegalAction(f"csc multiplies {TURNED} rows or more on the tensor cores; these are {rows}")
        if param != "csr" and 1 < rows < TURNED:
            raise IllegalAction(f"{param} reads runs of {TURNED} rows or more, or one row; these are {rows}")

    def schedules(self, plan: SparsePlan, schedule: SparseSchedule, param: str, device: Device) -> Sequence:
        """Those of `schedules`, or tiles of padded columns."""
        if param == "ell":
            return _padded(plan)
        if param == "csc":
            return _by_depth(plan)
        return tuple(s for s in _single(plan) if storage_of(s) == param)


STORAGES = ("csr", "balanced", "ell", "csc")
"""How single elements are stored and shared among programs: by columns of the result, as many for each program, padded
to the longest column, or by their depth in each tile of columns."""


def storage_of(schedule: SparseSchedule) -> str:
    """Which of `STORAGES` a schedule is of."""
    if schedule.by_depth:
        return "csc"
    return "ell" if schedule.padded else "balanced" if schedule.share else "csr"


MOST_PADDED = 256
"""The most columns of a tile of padded ones."""

ONE_PADDED: tuple[tuple[int, int, int], ...] = ((1, 128, 4), (1, 64, 2), (1, 32, 1), (1, 256, 8), (1, 256, 4))
SOME_PADDED: tuple[tuple[int, int, int], ...] = ((32, 16, 4), (32, 32, 4), (16, 32, 4), (32, 8, 2), (8, 32, 2))
MANY_PADDED: tuple[tuple[int, int, int], ...] = ((64, 16, 4), (64, 32, 4), (128, 16, 4), (32, 32, 4), (128, 32, 8))
"""Rows and columns of a tile, warps: reasoned from coalesced loads, not swept."""


def _padded(plan: SparsePlan) -> tuple[SparseSchedule, ...]:
    _, rows, columns, _ = plan.gemm.shape
    made = [
        SparseSchedule(
            block_m=min(m, power_of_two(rows)),
            block_n=min(n, power_of_two(columns)),
            block_k=1,
            group_m=1,
            warps=warps,
            stages=2,
            transposed=True,
            padded=True,
        )
        for m, n, warps in (ONE_PADDED if rows == 1 else SOME_PADDED if rows <= SOME else MANY_PADDED)
    ]
    return tuple(dict.fromkeys(s for s in made if _loads_stay(s)))


DEPTH_SWEEP: tuple[Shape, ...] = (
    (128, 64, 32, 4, 3),
    (64, 64, 32, 4, 3),
    (128, 128, 32, 8, 3),
    (128, 32, 32, 4, 3),
    (64, 32, 64, 4, 3),
)
"""Rows, columns and elements of a step, warps, stages, of elements by depth. Wide tiles meet an activation more
often."""


def _by_depth(plan: SparsePlan) -> tuple[SparseSchedule, ...]:
    _, rows, columns, _ = plan.gemm.shape
    precisions = ("ieee",) if plan.gemm.half else ("ieee", "tf32x3")
    made = [
        SparseSchedule(
            block_m=min(m, power_of_two(rows, LEAST)),
            block_n=min(n, power_of_two(columns, LEAST)),
            block_k=k,
            group_m=1,
            warps=warps,
            stages=stages,
            precision=p,
            transposed=True,
            by_depth=True,
        )
        for m, n, k, warps, stages in DEPTH_SWEEP
        for p in precisions
    ]
    return tuple(dict.fromkeys(made))


def _depth_bytes(plan: SparsePlan, schedule: SparseSchedule) -> int:
    """Bytes of shared memory with elements by depth, at most: all stages of the activations, one of the elements."""
    s = schedule
    return ((s.block_m + s.block_n) * itemsize(plan.gemm.dtype) + 12) * s.block_k * max(s.stages, 1)


class Pipeline(SparseMove):
    """Other depths of the pipeline, other numbers of warps."""

    def schedules(self, plan: SparsePlan, schedule: SparseSchedule, param: str, device: Device) -> Sequence:
        """Depths of 3 to 8, warps from 1 to 8."""
        s = schedule
        found = [s.but(warps=w) for w in (1, 2, 4, 8)] if param == "warps" else [s.but(stages=n) for n in (3, 4, 6, 8)]
        return tuple(c for c in found if c != s and _loads_stay(c))


__all__ = [
    "STORAGES",
    "Pipeline",
    "SparsePlan",
    "SparseSchedule",
    "Split",
    "Storage",
    "Tiling",
    "held_values",
    "schedules",
    "shared_bytes",
    "storage_of",
]
