"""Which schedules a product with kept blocks starts from, and its tunings.

Reasoned from what is moved, not swept. A tile is as wide as a block, or half of it; single elements have tiles of one
column. Deals in block sizes. Knows nothing about kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import MAX_ALTERNATIVES, Move, family_field
from qimeng.graph.opgraph import itemsize
from qimeng.vocabulary.sparse.kept import Kept


@dataclass(frozen=True)
class SparseSchedule(GemmSchedule):
    """How a product with kept blocks is cut into tiles; see `GemmSchedule` for the fields."""

    family: str = family_field("sparse")


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


def schedules(plan: SparsePlan) -> tuple[SparseSchedule, ...]:
    """At most eight schedules, the best guess first, each once."""
    _, rows, _, depth = plan.gemm.shape
    block = plan.kept.block
    if block == 1:
        each = max(1, plan.kept.count // plan.kept.shape[0])
        high = min(power_of_two(rows), ROWS)
        long = max(STEPS[0], min(power_of_two(each), STEPS[1], VALUES // high))
        found = [(high, long, 4), (high, max(STEPS[0], long // 2), 2), (max(1, high // 2), long, 4), (high, long, 1)]
        made = [SparseSchedule(block_m=m, block_n=1, block_k=k, warps=w, stages=2) for m, k, w in found]
        return tuple(dict.fromkeys(made))
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


WARPGROUP = 64
"""Rows from which Hopper's tensor cores read both operands from shared memory."""


def shared_bytes(plan: SparsePlan, schedule: SparseSchedule) -> int:
    """Bytes of shared memory of a block, as Triton 3.6 allocates them for sm_90; at most, except of half types.

    A block's column is fetched first, so that half of the stages hold blocks. Where warpgroups multiply, one more does.
    """
    s = schedule
    if plan.kept.block == 1:
        return 4 * s.block_m * s.block_k
    ahead = max(1, (s.stages - 1) // 2)
    held = ahead + (s.block_m >= WARPGROUP and s.warps >= 4)
    return (s.block_m + s.block_n) * s.block_k * itemsize(plan.gemm.dtype) * held + 4 * ahead


SparseMove = Move[SparsePlan, SparseSchedule]


class Tiling(SparseMove):
    """Twice or half the rows of a tile, or its columns; the depth of a step of single elements."""

    def schedules(self, plan: SparsePlan, schedule: SparseSchedule, param: str, device: Device) -> Sequence:
        """None where a block allows no other."""
        s, block = schedule, plan.kept.block
        least, most = (1, ROWS) if block == 1 else (LEAST, MOST)
        found = {
            "taller": [s.but(block_m=s.block_m * 2)],
            "wider": [s.but(block_n=s.block_n * 2)],
            "deeper": [s.but(block_k=s.block_k * 2)],
            "smaller": [s.but(block_m=s.block_m // 2), s.but(block_n=s.block_n // 2), s.but(block_k=s.block_k // 2)],
        }.get(param, [])
        return tuple(
            c
            for c in found
            if least <= c.block_m <= most
            and (c.block_n == 1 if block == 1 else LEAST <= c.block_n <= block)
            and (STEPS[0] <= c.block_k <= STEPS[1] if block == 1 else c.block_k == block)
        )


class Pipeline(SparseMove):
    """Other depths of the pipeline, other numbers of warps."""

    def schedules(self, plan: SparsePlan, schedule: SparseSchedule, param: str, device: Device) -> Sequence:
        """Depths of 3 to 8, warps from 1 to 8."""
        s = schedule
        found = [s.but(warps=w) for w in (1, 2, 4, 8)] if param == "warps" else [s.but(stages=n) for n in (3, 4, 6, 8)]
        return tuple(c for c in found if c != s)


__all__ = ["Pipeline", "SparsePlan", "SparseSchedule", "Tiling", "schedules", "shared_bytes"]
