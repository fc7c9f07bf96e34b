"""The gemm family: a matrix product with a pointwise prologue of each operand and a tile-wise epilogue.

A convolution is such a product, of windows of its input (`plan`, `positions`).

Deals in what the library asks of a family, and hands it on to the files beside this one.
"""

from __future__ import annotations

import math

from qimeng.coder.template.families.common import fast_by_default
from qimeng.coder.template.families.gemm import words
from qimeng.coder.template.families.gemm.host import print_gemm
from qimeng.coder.template.families.gemm.moves import moves
from qimeng.coder.template.families.gemm.plan import GemmPlan, plan_gemm
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.sweeps import default_schedule, guesses, shared_bytes
from qimeng.device import Device
from qimeng.family import Cost, Family, Needs, Sample, refusal
from qimeng.graph.ops import category, is_product
from qimeng.graph.region import Region
from qimeng.program.program import Implementation

PRODUCTS = {"tf32x3": 3, "bf16x3": 3, "bf16x6": 6, "fp16x3": 3}
"""Products of planes that a precision takes; 1 for all others."""


class Gemm(Family[GemmPlan, GemmSchedule]):
    """A matrix product with what surrounds it: a program owns a tile of the result and walks the depth."""

    name = "gemm"
    about = "matrix products and convolutions"
    schedule = GemmSchedule

    def __init__(self) -> None:
        self.moves = moves()

    def plan(self, region: Region) -> GemmPlan:
        """The region as prologue, product, epilogue."""
        return plan_gemm(region)

    def concerns(self, region: Region) -> bool:
        """Whatever has a matrix product or a convolution that sums over channels."""
        return any(is_product(region.graph, n) for n in region.ops)

    def default(self, plan: GemmPlan, device: Device, mode: str) -> GemmSchedule:
        """Fixed tiles, cut to the problem; half types take special functions in few instructions from the start."""
        return default_schedule(plan, device, mode).but(fast=fast_by_default(plan.nest, device))

    def guesses(self, plan: GemmPlan, schedule: GemmSchedule, device: Device, mode: str) -> list[GemmSchedule]:
        """The tensor cores at the precisions that the mode admits; larger tiles of half operands."""
        return guesses(plan, schedule, device, mode)

    def unmeasured(self, plan: GemmPlan, device: Device, mode: str) -> GemmSchedule:
        """On tensor cores where the mode admits them: plain fp32 takes several times as long."""
        plain = self.default(plan, device, mode)
        guesses = (s for s in self.guesses(plan, plain, device, mode) if s.precision != plain.precision)
        return next((s for s in guesses if refusal(self, plan, s, device) is None), plain)

    def needs(self, plan: GemmPlan, schedule: GemmSchedule) -> Needs:
        """The stages of both operands in shared memory; the accumulator is held in registers as a whole."""
        tile = schedule.block_m * schedule.block_n
        return Needs(shared_bytes(plan, schedule), schedule.warps, tile, values_per_thread=255)

    def print(self, plan: GemmPlan, schedule: GemmSchedule, prefix: str) -> Implementation:
        """The product's kernel, and those before and after it."""
        return print_gemm(plan, schedule, prefix)

    def cost(self, plan: GemmPlan, schedule: GemmSchedule) -> Cost:
        """Tiles that overhang are computed whole; several products of planes take as many times as long."""
        batch, m, n, _ = plan.shape
        tiles = math.ceil(m / schedule.block_m) * math.ceil(n / schedule.block_n) * batch
        return Cost(
            tile=(schedule.block_m, schedule.block_n),
            products=PRODUCTS.get(schedule.precision, 1),
            programs=tiles * schedule.splits,
            padded=tiles * schedule.block_m * schedule.block_n / max(m * n * batch, 1),
            splits_operands=bool(schedule.inline),
        )

    def word(self, region: Region) -> str:
        """A matrix product or a convolution."""
        return self.name if any(category(n) == "gemm" for n in region.ops) else "convolution"

    def intents(
        self, region: Region, schedule: GemmSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """By precision mode and by how many tiles there are."""
        return words.intents(region, schedule, device, mode)

    def samples(self) -> tuple[Sample, ...]:
        """A linear layer with its activation."""
        return words.samples()


__all__ = ["PRODUCTS", "Gemm"]
