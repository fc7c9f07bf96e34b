"""The family of products of codes: fp8 or int8 on both sides, summed on the tensor cores and scaled afterwards.

It prints the kernels of the gemm family with operands and a loop of its own. Deals in what the library asks of a
family.
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
from qimeng.vocabulary.quantized.called import called_product, is_called
from qimeng.vocabulary.quantized.coded import coded_product
from qimeng.vocabulary.quantized.reading import LEFT, RIGHT, readers_of
from qimeng.vocabulary.quantized.schedules import CodedPlan, CodedSchedule, moves, schedules, shared_bytes


class CodedProducts(Family[CodedPlan, CodedSchedule]):
    """A linear layer on codes of activations and of a weight, or `_scaled_mm` or `_int_mm`, with what follows it."""

    name = "quantized"
    about = "products of activations and weights in 8 bits"
    schedule = CodedSchedule

    def __init__(self) -> None:
        self.moves = moves()

    def plan(self, region: Region) -> CodedPlan:
        """The product, both operands as codes and scales."""
        coded = called_product(region) if is_called(region) else coded_product(region)
        reader = readers_of(coded)
        gemm = read_weight_by(plan_gemm(coded.product, one_row=True), reader)
        gemm = replace(gemm, a=replace(gemm.a, plain=None, loads=(), held=False, reader=reader))
        names = {v: f"x{i}" for i, v in enumerate(coded.product.inputs)}
        hidden = names[coded.widened[0]], names[coded.widened[1]]
        read = {coded.left: LEFT[0], coded.right: RIGHT[0], coded.left_scale: LEFT[1], coded.right_scale: RIGHT[1]}
        names |= {value: name for value, name in read.items() if value is not None}
        return CodedPlan(gemm, coded, tuple(names[v] for v in region.inputs), hidden)

    def concerns(self, region: Region) -> bool:
        """Products that a module calls on codes."""
        return is_called(region)

    def default(self, plan: CodedPlan, device: Device, mode: str) -> CodedSchedule:
        """The likeliest tiles."""
        return schedules(plan, device)[0]

    def guesses(self, plan: CodedPlan, schedule: CodedSchedule, device: Device, mode: str) -> list[CodedSchedule]:
        """The others, which only a measurement can tell apart."""
        return [s for s in schedules(plan, device) if s != schedule]

    def needs(self, plan: CodedPlan, schedule: CodedSchedule) -> Needs:
        """The stages of both operands in shared memory; the accumulator is held in registers as a whole.

        So is the sum of one step where that has scales of its own.
        """
        tile = schedule.block_m * schedule.block_n * (2 if plan.coded.group else 1)
        return Needs(shared_bytes(plan, schedule), schedule.warps, tile, values_per_thread=255)

    def print(self, plan: CodedPlan, schedule: CodedSchedule, prefix: str) -> Implementation:
        """The gemm family's kernels; the entry function takes codes and scales where the operands would be."""
        made = print_gemm(plan.gemm, schedule, prefix)
        for hidden, names in zip(plan.hidden, (LEFT, RIGHT), strict=True):
            made = with_inputs(made, prefix, plan.inputs, hidden, names[0])
        return made

    def cost(self, plan: CodedPlan, schedule: CodedSchedule) -> Cost:
        """As for whole operands: what is read is known from the region."""
        _, m, n, _ = plan.gemm.shape
        s = schedule
        tiles = math.ceil(m / s.block_m) * math.ceil(n / s.block_n)
        padded = tiles * s.block_m * s.block_n / (m * n)
        return Cost(tile=(s.block_m, s.block_n), programs=tiles * s.splits, padded=padded)

    def intents(
        self, region: Region, schedule: CodedSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """Tiles and stages, then the depth shared by more or fewer programs."""
        return ("tiling", "wider"), ("pipeline", "stages"), ("split", "more"), ("split", "fewer"), ("tiling", "deeper")


__all__ = ["CodedProducts"]
