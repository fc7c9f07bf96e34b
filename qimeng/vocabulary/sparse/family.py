"""The family of products that read only the kept blocks of a weight.

It prints the kernels of the gemm family with one operand, and a main loop, of its own. Deals in what the library asks
of a family.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qimeng.coder.template.families.gemm.host import print_gemm, with_inputs
from qimeng.coder.template.families.gemm.plan import plan_gemm, read_weight_by
from qimeng.device import Device
from qimeng.family import Cost, Family, Needs
from qimeng.graph.opgraph import itemsize
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.vocabulary.sparse.by_depth import SORTED_AT, SORTED_TO, SORTED_VALUES, sort_text
from qimeng.vocabulary.sparse.kept import sparse_product
from qimeng.vocabulary.sparse.padded import PADDED_AT, PADDED_VALUES, prepare_text
from qimeng.vocabulary.sparse.reading import AT, FIRST, VALUES, kernel_before, reader_of
from qimeng.vocabulary.sparse.schedules import (
    Pipeline,
    SparsePlan,
    SparseSchedule,
    Split,
    Storage,
    Tiling,
    held_values,
    schedules,
    shared_bytes,
)
from qimeng.vocabulary.sparse.turned import left_operand

SECTOR = 32
"""Bytes that the L2 cache gives for one element whose neighbours are not wanted."""

L2_BYTE = 6.5
"""Multiply-adds in fp32 that an SM could carry out while it gets a byte from L2: on an H100 4.4 TB/s were measured with
single elements, and it has 33.5e12 multiply-adds a second."""


class SparseProducts(Family[SparsePlan, SparseSchedule]):
    """A linear layer on the kept blocks of its weight, with what surrounds it."""

    name = "sparse"
    about = "products with weights of few blocks"
    schedule = SparseSchedule

    def __init__(self) -> None:
        self.moves = {"tiling": Tiling(), "pipeline": Pipeline(), "split": Split(), "storage": Storage()}

    def plan(self, region: Region) -> SparsePlan:
        """The product, its right operand as kept blocks."""
        kept, product = sparse_product(region)
        gemm = read_weight_by(plan_gemm(product, one_row=True), reader_of(kept))
        if kept.block == 1:
            gemm = replace(gemm, a=replace(gemm.a, reader=left_operand))
        names = {v: f"x{i}" for i, v in enumerate(product.inputs)}
        names |= {kept.first: FIRST, kept.at: AT, kept.values: VALUES}
        return SparsePlan(gemm, kept, tuple(names[v] for v in region.inputs), names[kept.weight])

    def default(self, plan: SparsePlan, device: Device, mode: str) -> SparseSchedule:
        """The likeliest tiles."""
        return schedules(plan)[0]

    def guesses(self, plan: SparsePlan, schedule: SparseSchedule, device: Device, mode: str) -> list[SparseSchedule]:
        """The others, which only a measurement can tell apart."""
        return [s for s in schedules(plan) if s != schedule]

    def needs(self, plan: SparsePlan, schedule: SparseSchedule) -> Needs:
        """The stages of both operands; the accumulator in registers."""
        held = held_values(plan, schedule)
        return Needs(shared_bytes(plan, schedule), schedule.warps, held, values_per_thread=255)

    def print(self, plan: SparsePlan, schedule: SparseSchedule, prefix: str) -> Implementation:
        """The gemm family's kernels; the entry function takes blocks and indices where the weight would be."""
        made_once: tuple[str, ...] = (PADDED_AT, PADDED_VALUES) if schedule.padded else ()
        if schedule.by_depth:
            made_once = (SORTED_AT, SORTED_TO, SORTED_VALUES)
        inputs = [*plan.inputs, *made_once]
        made = with_inputs(print_gemm(plan.gemm, schedule, prefix), prefix, inputs, plan.hidden, VALUES)
        if made_once:
            given = tuple(plan.inputs.index(name) for name in (FIRST, AT, VALUES))
            sort = sort_text(plan.kept, schedule.block_n, prefix)
            text = sort if schedule.by_depth else prepare_text(plan.kept, prefix)
            made = replace(made, source=f"{made.source}\n\n{text}", prepare=f"{prefix}_prepare", prepare_inputs=given)
        before = kernel_before(plan.gemm, schedule, prefix)
        return replace(made, source=f"{before}\n\n{made.source}") if before else made

    def cost(self, plan: SparsePlan, schedule: SparseSchedule) -> Cost:
        """The share of the multiply-adds that is carried out; those of single elements wait for the L2 cache."""
        _, m, n, k = plan.gemm.shape
        s, kept = schedule, plan.kept
        down = math.ceil(m / s.block_m)
        read = itemsize(plan.gemm.dtype) if s.transposed else SECTOR
        waits = max(1.0, read * L2_BYTE) if kept.block == 1 else 1.0
        if s.by_depth:  # an activation comes from L2 once for each tile of columns that has any element at its depth
            share = kept.count / (n * k)
            met = (1 - (1 - share) ** s.block_n) / s.block_n / share
            waits = max(float(s.block_n), read * L2_BYTE * met)
        return Cost(
            tile=(s.block_m, s.block_n),
            products=3 if s.precision == "tf32x3" else 1,
            programs=down * math.ceil(n / s.block_n),
            padded=waits * down * s.block_m * kept.count * kept.block**2 / (m * n * k),
        )

    def intents(
        self, region: Region, schedule: SparseSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """Stages and warps, then tiles; shares of single elements before."""
        tuned = ("pipeline", "stages"), ("pipeline", "warps"), ("tiling", "taller"), ("tiling", "smaller")
        single = ("split", "more"), ("split", "fewer"), ("storage", "ell"), ("storage", "csc")
        return (*single, *tuned) if schedule and schedule.transposed else tuned


__all__ = ["SparseProducts"]
