"""The family of reductions by segment: rows are gathered and computed where they are reduced.

Deals in what the library asks of a family, and hands it on to the files beside this one.
"""

from __future__ import annotations

import math

import torch

from qimeng.device import Device
from qimeng.family import Cost, Family, Needs, Sample
from qimeng.graph.opgraph import itemsize
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.vocabulary.irregular.plan import SegmentPlan, plan_segments
from qimeng.vocabulary.irregular.printing import print_segments, tile_bytes
from qimeng.vocabulary.irregular.schedules import (
    FORMS,
    Form,
    Pipeline,
    SegmentSchedule,
    Split,
    Tiling,
    default_schedule,
    guesses,
)
from qimeng.vocabulary.irregular.segments import reduces

BLOCKS = 1024
"""Blocks that run at a time on a large GPU, about: together they need the whole table in the L2 cache."""


class Irregular(Family[SegmentPlan, SegmentSchedule]):
    """Sums, means and extremes of rows by segment, with the gathers and pointwise operators that make the rows."""

    name = "irregular"
    about = "gathers and reductions by segment"
    schedule = SegmentSchedule

    def __init__(self) -> None:
        self.moves = {"irregular": Form(), "split": Split(), "tiling": Tiling(), "pipeline": Pipeline()}

    def plan(self, region: Region) -> SegmentPlan:
        """The reduction, and the loop nest of its rows."""
        return plan_segments(region)

    def concerns(self, region: Region) -> bool:
        """Whatever reduces by segment."""
        return any(reduces(region.graph, n) for n in region.ops)

    def default(self, plan: SegmentPlan, device: Device, mode: str) -> SegmentSchedule:
        """As many lanes a segment as it has rows on average."""
        return default_schedule(plan)

    def guesses(
        self, plan: SegmentPlan, schedule: SegmentSchedule, device: Device, mode: str
    ) -> tuple[SegmentSchedule, ...]:
        """Other shapes of the tile."""
        return guesses(plan, schedule)

    def needs(self, plan: SegmentPlan, schedule: SegmentSchedule) -> Needs:
        """A tile of running sums and one of rows; lanes of a segment meet in shared memory."""
        tile = schedule.lanes * schedule.block_r
        shared = 4 * tile if schedule.block_e > 1 and schedule.form != "atomic" else 0
        return Needs(shared, schedule.warps, 2 * tile, values_per_thread=255)

    def print(self, plan: SegmentPlan, schedule: SegmentSchedule, prefix: str) -> Implementation:
        """The kernel that reduces, and those that find the order of the rows."""
        return print_segments(plan, schedule, prefix)

    def cost(self, plan: SegmentPlan, schedule: SegmentSchedule) -> Cost:
        """A block asks for a tile of rows at once; rows of a table are read once for each that is gathered."""
        table, times = gathered_table(plan)
        return Cost(
            block_bytes=tile_bytes(schedule),
            again_reads=max(times - 1, 0),
            again_bytes=table,
            held_bytes=table // BLOCKS,
        )

    def intents(
        self, region: Region, schedule: SegmentSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """The other forms, then tiles."""
        forms = tuple(("irregular", f) for f in reversed(FORMS) if schedule is None or f != schedule.form)
        return (
            *forms,
            ("split", "more"),
            ("split", "fewer"),
            ("tiling", "deeper"),
            ("tiling", "taller"),
            ("tiling", "smaller"),
            ("pipeline", "warps"),
        )

    def samples(self) -> tuple[Sample, ...]:
        """Sums by segment, and a layer of a graph network on a ring of nodes."""
        return (_Sums, ((64, 32), (128, 32))), (_Ring, ((64, 32),))


def gathered_table(plan: SegmentPlan) -> tuple[int, int]:
    """Bytes of the largest table that rows are gathered from, and how often it is read in all; zeros for none."""
    tables = {e.param for e in plan.nest.exprs if e.op == "load" and e.access}
    sizes = [math.prod(s.shape) * itemsize(s.dtype) for s in (plan.nest.sources[i] for i in tables) if len(s.shape) > 1]
    if not sizes:
        return 0, 0
    return max(sizes), plan.rows * plan.columns * itemsize(plan.out.dtype) // max(sizes)


class _Sums(torch.nn.Module):
    target: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("target", torch.arange(128) // 2)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, self.target, rows)


class _Ring(torch.nn.Module):
    source: torch.Tensor
    target: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        nodes = torch.arange(64)
        self.register_buffer("source", torch.cat([nodes, nodes]))
        self.register_buffer("target", torch.cat([nodes.roll(1), nodes.roll(-1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, self.target, torch.relu(x.index_select(0, self.source)))


__all__ = ["Irregular", "gathered_table"]
