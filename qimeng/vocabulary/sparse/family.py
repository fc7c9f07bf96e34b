"""The family of products that read only the kept blocks of a weight.

It prints the kernels of the gemm family with one operand, and a main loop, of its own. Deals in what the library asks
of a family.
"""

from __future__ import annotations

import math

from qimeng.coder.template.families.gemm.host import print_gemm, with_inputs
from qimeng.coder.template.families.gemm.plan import plan_gemm, read_weight_by
from qimeng.device import Device
from qimeng.family import Cost, Family, Needs
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.vocabulary.sparse.kept import sparse_product
from qimeng.vocabulary.sparse.reading import AT, FIRST, VALUES, reader_of
from qimeng.vocabulary.sparse.schedules import (
    Pipeline,
    SparsePlan,
    SparseSchedule,
    Tiling,
    schedules,
    shared_bytes,
)


class SparseProducts(Family[SparsePlan, SparseSchedule]):
    """A linear layer on the kept blocks of its weight, with what surrounds it."""

    name = "sparse"
    about = "products with weights of few blocks"
    schedule = SparseSchedule

    def __init__(self) -> None:
        self.moves = {"tiling": Tiling(), "pipeline": Pipeline()}

    def plan(self, region: Region) -> SparsePlan:
        """The product, its right operand as kept blocks."""
        kept, product = sparse_product(region)
        gemm = read_weight_by(plan_gemm(product), reader_of(kept))
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
        s = schedule
        held = s.block_m * (s.block_k if plan.kept.block == 1 else s.block_n)
        return Needs(shared_bytes(plan, s), s.warps, held, values_per_thread=255)

    def print(self, plan: SparsePlan, schedule: SparseSchedule, prefix: str) -> Implementation:
        """The gemm family's kernels; the entry function takes blocks and indices where the weight would be."""
        made = print_gemm(plan.gemm, schedule, prefix)
        return with_inputs(made, prefix, plan.inputs, plan.hidden, VALUES)

    def cost(self, plan: SparsePlan, schedule: SparseSchedule) -> Cost:
        """The share of the multiply-adds that is carried out."""
        _, m, n, k = plan.gemm.shape
        s, kept = schedule, plan.kept
        down = math.ceil(m / s.block_m)
        return Cost(
            tile=(s.block_m, s.block_n),
            products=3 if s.precision == "tf32x3" else 1,
            programs=down * math.ceil(n / s.block_n),
            padded=down * s.block_m * kept.count * kept.block**2 / (m * n * k),
        )

    def intents(
        self, region: Region, schedule: SparseSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """Stages and warps, then tiles."""
        return ("pipeline", "stages"), ("pipeline", "warps"), ("tiling", "taller"), ("tiling", "smaller")


__all__ = ["SparseProducts"]
