"""The family of products with matrices that an index chooses, such as those of experts.

Deals in what the library asks of a family, and hands it on to the files beside this one.
"""

from __future__ import annotations

import torch

from qimeng.device import Device
from qimeng.family import Cost, Family, Needs, NotConcerned, Sample, Unsupported
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.vocabulary.irregular.grouped import grouped_product
from qimeng.vocabulary.irregular.grouped_plan import (
    GroupedPlan,
    GroupedSchedule,
    Pipeline,
    Tiling,
    plan_grouped,
    schedules,
    shared_bytes,
    tiles,
)
from qimeng.vocabulary.irregular.grouped_printing import print_grouped


class GroupedProducts(Family[GroupedPlan, GroupedSchedule]):
    """Rows times the matrices that an index chooses for them; rows of one matrix are multiplied together."""

    name = "grouped"
    about = "products with chosen matrices"
    schedule = GroupedSchedule
    spares = True

    def __init__(self) -> None:
        self.moves = {"tiling": Tiling(), "pipeline": Pipeline()}

    def plan(self, region: Region) -> GroupedPlan:
        """The product, and which row meets which matrix."""
        return plan_grouped(region)

    def concerns(self, region: Region) -> bool:
        """Whatever chooses matrices and multiplies with them."""
        return any(is_grouped(region, n.name) for n in region.ops)

    def default(self, plan: GroupedPlan, device: Device, mode: str) -> GroupedSchedule:
        """The likeliest tiles."""
        return schedules(plan)[0]

    def guesses(self, plan: GroupedPlan, schedule: GroupedSchedule, device: Device, mode: str) -> list[GroupedSchedule]:
        """The others, which only a measurement can tell apart."""
        return [s for s in schedules(plan) if s != schedule]

    def needs(self, plan: GroupedPlan, schedule: GroupedSchedule) -> Needs:
        """The stages of both operands; the accumulator in registers."""
        s = schedule
        return Needs(shared_bytes(plan, s), s.warps, s.block_m * s.block_n, values_per_thread=255)

    def print(self, plan: GroupedPlan, schedule: GroupedSchedule, prefix: str) -> Implementation:
        """The product, and the kernels that count slots into groups."""
        return print_grouped(plan, schedule, prefix)

    def cost(self, plan: GroupedPlan, schedule: GroupedSchedule) -> Cost:
        """Tiles of rows that are not full multiply all the same."""
        s, found = schedule, plan.grouped
        across = -(-found.columns // s.block_n)
        high = min(tiles(plan, s), -(-found.slots // s.block_m) + found.groups)
        return Cost(
            tile=(s.block_m, s.block_n),
            products=3 if s.precision == "tf32x3" else 1,
            programs=high * across,
            padded=high * s.block_m * across * s.block_n / (found.slots * found.columns),
        )

    def intents(
        self, region: Region, schedule: GroupedSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """Tiles, then stages and warps."""
        return ("tiling", "wider"), ("tiling", "smaller"), ("pipeline", "stages"), ("pipeline", "warps")

    def samples(self) -> tuple[Sample, ...]:
        """Rows times experts."""
        return ((_Experts, ((32, 64),)),)


class _Experts(torch.nn.Module):
    chosen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 64, 48))
        self.register_buffer("chosen", torch.arange(32) % 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.unsqueeze(1), self.weight[self.chosen])


def is_grouped(region: Region, name: str) -> bool:
    """Whether an operator multiplies with matrices that an index chooses in `region`, covered or not."""
    try:
        found = grouped_product(region.graph, region.graph.nodes[name])
    except NotConcerned:
        return False
    except Unsupported:
        return True
    return set(found.copies) <= set(region.nodes)


__all__ = ["GroupedProducts", "is_grouped"]
