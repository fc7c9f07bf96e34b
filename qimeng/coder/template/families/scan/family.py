"""The scan family: cumulative operators with pointwise operators and reductions around them.

Deals in what the library asks of a family, and hands it on to the files beside this one.
"""

from __future__ import annotations

from qimeng.coder.template.families.common import fast_by_default
from qimeng.coder.template.families.scan import words
from qimeng.coder.template.families.scan.defaults import default_schedule, guesses
from qimeng.coder.template.families.scan.moves import moves
from qimeng.coder.template.families.scan.plan import ScanPlan, plan_scan
from qimeng.coder.template.families.scan.printer import print_scan
from qimeng.coder.template.families.scan.schedule import ScanSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import Cost, Family, Needs, Sample
from qimeng.graph.opgraph import itemsize
from qimeng.graph.ops import category
from qimeng.graph.region import Region
from qimeng.program.program import Implementation


class Scans(Family[ScanPlan, ScanSchedule]):
    """Cumulative sums, products, extremes and their like: a program walks a block of rows in their order."""

    name = "scan"
    about = "cumulative operators"
    schedule = ScanSchedule

    def __init__(self) -> None:
        self.moves = moves()

    def plan(self, region: Region) -> ScanPlan:
        """The region as rows and ordered columns."""
        return plan_scan(region)

    def concerns(self, region: Region) -> bool:
        """Whatever has a scan and no matrix product."""
        kinds = {category(n) for n in region.ops}
        return "scan" in kinds and "gemm" not in kinds

    def default(self, plan: ScanPlan, device: Device, mode: str) -> ScanSchedule:
        """By the rows' number and length."""
        return default_schedule(plan, device).but(fast=fast_by_default(plan.nest, device))

    def guesses(self, plan: ScanPlan, schedule: ScanSchedule, device: Device, mode: str) -> list[ScanSchedule]:
        """The other forms."""
        return guesses(plan, schedule, device)

    def reduced(self, plan: ScanPlan, schedule: ScanSchedule) -> ScanSchedule:
        """Row and column blocks no larger than a smaller problem needs."""
        columns = power_of_two(plan.column_count)
        width = columns if schedule.form == "resident" else min(schedule.block_r, max(columns // 2, 8))
        return schedule.but(block_r=width, block_p=min(schedule.block_p, max(power_of_two(plan.row_count) // 2, 1)))

    def needs(self, plan: ScanPlan, schedule: ScanSchedule) -> Needs:
        """Tiles stay in registers, one a part; shared memory holds what warps exchange and tiles loaded ahead."""
        tile, ahead = schedule.block_p * schedule.block_r, schedule.stages - 1 if schedule.form != "resident" else 0
        loaded = ahead * tile * plan.itemsize * max(plan.tensors - plan.full, 1)
        exchanged = schedule.block_p * schedule.warps * 8 * plan.parts
        return Needs(exchanged + loaded, schedule.warps, tile * plan.parts, values_per_thread=128)

    def print(self, plan: ScanPlan, schedule: ScanSchedule, prefix: str) -> Implementation:
        """One kernel, or two for rows that programs share."""
        return print_scan(plan, schedule, prefix)

    def cost(self, plan: ScanPlan, schedule: ScanSchedule) -> Cost:
        """A block asks for its tile at once; totals and reductions read a row once more, from L2 or memory."""
        size = itemsize(plan.dtype)
        again = plan.passes if schedule.form == "loop" else 1 if schedule.form == "split" else 0
        return Cost(
            block_bytes=schedule.block_p * schedule.block_r * size,
            again_reads=again,
            again_bytes=plan.row_count * plan.column_count * size,
            held_bytes=plan.column_count * size * schedule.block_p if schedule.form == "loop" and again else 0,
        )

    def intents(
        self, region: Region, schedule: ScanSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """By the present form."""
        return words.intents(schedule)

    def samples(self) -> tuple[Sample, ...]:
        """A running mean."""
        return words.samples()


__all__ = ["Scans"]
