"""The family of products that read a stored weight: codes of int8, fp8 or int4, widened before the tensor cores.

It prints the kernels of the gemm family with one operand of its own. Deals in what the library asks of a family.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qimeng.coder.template.families.gemm.host import print_gemm, with_inputs
from qimeng.coder.template.families.gemm.plan import plan_gemm, read_weight_by
from qimeng.device import Device
from qimeng.family import Cost, Family, Needs
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.vocabulary.lowprecision.reading import CODES, SCALE, halves, reader_of
from qimeng.vocabulary.lowprecision.schedules import (
    StoredPlan,
    StoredSchedule,
    default_schedule,
    moves,
    schedules,
    shared_bytes,
)
from qimeng.vocabulary.lowprecision.stored import stored_weight


class StoredProducts(Family[StoredPlan, StoredSchedule]):
    """A linear layer on a weight of int8, fp8 or int4 codes, with what follows it."""

    name = "lowprecision"
    about = "products with stored weights"
    schedule = StoredSchedule
    rivals = ("tile",)  # of one row: a reduction of rows, without tensor cores

    def __init__(self) -> None:
        self.moves = moves()

    def plan(self, region: Region) -> StoredPlan:
        """The product, its right operand as codes and scales."""
        stored = stored_weight(region)
        gemm = read_weight_by(plan_gemm(stored.product, one_row=True), reader_of(stored))
        names = {v: f"x{i}" for i, v in enumerate(stored.product.inputs)}
        names |= {stored.codes: CODES, stored.scale: SCALE}
        return StoredPlan(gemm, stored, tuple(names[v] for v in region.inputs), names[stored.widened])

    def default(self, plan: StoredPlan, device: Device, mode: str) -> StoredSchedule:
        """The likeliest tiles."""
        return default_schedule(plan, device)

    def guesses(self, plan: StoredPlan, schedule: StoredSchedule, device: Device, mode: str) -> list[StoredSchedule]:
        """The others, which only a measurement can tell apart."""
        return [s for s in schedules(plan, device) if s != schedule]

    def needs(self, plan: StoredPlan, schedule: StoredSchedule) -> Needs:
        """The stages of both operands; accumulator and widened block in registers."""
        s = schedule
        held = s.block_m * s.block_n + s.block_n * s.block_k // 2  # codes of two to a value
        return Needs(shared_bytes(plan, s), s.warps, held, values_per_thread=255)

    def print(self, plan: StoredPlan, schedule: StoredSchedule, prefix: str) -> Implementation:
        """The gemm family's kernels; the entry function takes codes and scales where the weight would be."""
        made = with_inputs(print_gemm(plan.gemm, schedule, prefix), prefix, plan.inputs, plan.hidden, CODES)
        if f"{prefix}_halves(" not in made.source:
            return made
        return replace(made, source=f"{halves(prefix, plan.gemm.dtype)}\n\n{made.source}")

    def cost(self, plan: StoredPlan, schedule: StoredSchedule) -> Cost:
        """As for whole operands: what is read is known from the region."""
        _, m, n, _ = plan.gemm.shape
        s = schedule
        tiles = math.ceil(m / s.block_m) * math.ceil(n / s.block_n)
        return Cost(
            tile=(s.block_m, s.block_n),
            products=3 if s.precision == "tf32x3" else 1,
            programs=tiles * s.splits,
            padded=tiles * s.block_m * s.block_n / (m * n),
            splits_operands=True,
        )

    def intents(
        self, region: Region, schedule: StoredSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """The depth shared by more or fewer programs, then tiles and stages."""
        return ("split", "more"), ("split", "fewer"), ("tiling", "wider"), ("tiling", "deeper"), ("pipeline", "stages")


__all__ = ["StoredProducts"]
