"""The family of layers of experts that compute only the experts that count.

Deals in what the library asks of a family, and hands it on to the files beside this one.
"""

from __future__ import annotations

import torch

from qimeng.device import Device
from qimeng.family import Cost, Family, Needs, NotConcerned, Sample, Unsupported
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.vocabulary.irregular.experts import experts_layer
from qimeng.vocabulary.irregular.grouped_plan import Pipeline, Tiling
from qimeng.vocabulary.irregular.routed import (
    RoutedPlan,
    RoutedSchedule,
    plan_routed,
    print_routed,
    schedules,
    shared_bytes,
    tiles,
)


class RoutedExperts(Family[RoutedPlan, RoutedSchedule]):
    """Layers of experts: each row is multiplied by the matrices of its own experts alone."""

    name = "routed"
    about = "layers of experts"
    schedule = RoutedSchedule
    spares = True

    def __init__(self) -> None:
        self.moves = {"tiling": Tiling(), "pipeline": Pipeline()}

    def plan(self, region: Region) -> RoutedPlan:
        """The layer, and which row meets which expert."""
        return plan_routed(region)

    def concerns(self, region: Region) -> bool:
        """Whole layers of experts."""
        for node in region.ops:
            try:
                return experts_layer(region.graph, node).taken <= set(region.nodes)
            except NotConcerned:
                continue
            except Unsupported:
                return False
        return False

    def default(self, plan: RoutedPlan, device: Device, mode: str) -> RoutedSchedule:
        """The likeliest tiles."""
        return schedules(plan)[0]

    def guesses(self, plan: RoutedPlan, schedule: RoutedSchedule, device: Device, mode: str) -> list[RoutedSchedule]:
        """The others, which only a measurement can tell apart."""
        return [s for s in schedules(plan) if s != schedule]

    def needs(self, plan: RoutedPlan, schedule: RoutedSchedule) -> Needs:
        """The stages of all operands; the accumulators in registers."""
        s = schedule
        held = s.block_m * s.block_n * len(plan.layer.leaves)
        return Needs(shared_bytes(plan, s), s.warps, held, values_per_thread=255)

    def print(self, plan: RoutedPlan, schedule: RoutedSchedule, prefix: str) -> Implementation:
        """Both products, the sum of a row's slots, and the kernels that count slots into experts."""
        return print_routed(plan, schedule, prefix)

    def cost(self, plan: RoutedPlan, schedule: RoutedSchedule) -> Cost:
        """The share of the multiply-adds that is carried out."""
        s, (rows, experts, *_, inner, _) = schedule, plan.sizes
        high = min(tiles(plan, s), -(-plan.slots // s.block_m) + experts)
        return Cost(
            tile=(s.block_m, s.block_n),
            products=3 if s.precision == "tf32x3" else 1,
            programs=high * -(-inner // s.block_n),
            padded=high * s.block_m / (rows * experts),
        )

    def intents(
        self, region: Region, schedule: RoutedSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """Tiles, then stages and warps."""
        return ("tiling", "wider"), ("tiling", "smaller"), ("pipeline", "stages"), ("pipeline", "warps")

    def samples(self) -> tuple[Sample, ...]:
        """Four experts, of which each row takes two."""
        return ((_Experts, ((32, 64), (32, 4))),)


class _Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.zeros(4, 64, 32))
        self.down = torch.nn.Parameter(torch.zeros(4, 32, 64))

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(scores, 2)
        shares = torch.zeros_like(scores).scatter(1, chosen, weights)
        return (torch.relu(x @ self.up) @ self.down * shares.t().unsqueeze(-1)).sum(0)


__all__ = ["RoutedExperts"]
