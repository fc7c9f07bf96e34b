"""The tile family: pointwise operators, reductions, softmax-like programs and normalizations.

Deals in what the library asks of a family, and hands it on to the files beside this one.
"""

from __future__ import annotations

from qimeng.coder.template.families.common import fast_by_default
from qimeng.coder.template.families.tile import words
from qimeng.coder.template.families.tile.cuda_accesses import ACCESS_BYTES
from qimeng.coder.template.families.tile.cuda_rows import UNROLLED, print_rows_cuda
from qimeng.coder.template.families.tile.defaults import default_schedule, guesses
from qimeng.coder.template.families.tile.moves import moves
from qimeng.coder.template.families.tile.plan import TilePlan, plan_tile
from qimeng.coder.template.families.tile.printer import print_tile
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import OTHER, Cost, Family, Needs, Sample, Unsupported
from qimeng.graph.opgraph import itemsize
from qimeng.graph.ops import category, is_product
from qimeng.graph.region import Region
from qimeng.program.program import Implementation


class Tile(Family[TilePlan, TileSchedule]):
    """Pointwise operators, reductions and normalizations: a program owns a block of rows and walks their columns."""

    name = "tile"
    about = "pointwise operators, reductions, normalizations"
    schedule = TileSchedule

    def __init__(self) -> None:
        self.moves = moves()

    def plan(self, region: Region) -> TilePlan:
        """The region as rows and columns."""
        return plan_tile(region)

    def concerns(self, region: Region) -> bool:
        """Whatever has no matrix product."""
        return not any(is_product(region.graph, n) for n in region.ops)

    def default(self, plan: TilePlan, device: Device, mode: str) -> TileSchedule:
        """By the rows' number and length; half types take special functions in few instructions from the start."""
        return default_schedule(plan, device).but(fast=fast_by_default(plan.nest, device))

    def guesses(self, plan: TilePlan, schedule: TileSchedule, device: Device, mode: str) -> list[TileSchedule]:
        """The other forms of a reduction of long rows."""
        return guesses(plan, schedule, device)

    def reduced(self, plan: TilePlan, schedule: TileSchedule) -> TileSchedule:
        """Row and column blocks no larger than a smaller problem needs.

        A cooperative row becomes one program's: others that run at the same time cannot be relied on in an interpreter.
        """
        columns = power_of_two(plan.column_count)
        whole = schedule.form in ("resident", "cooperative")
        width = columns if whole else min(schedule.block_r, max(columns // 2, 8))
        return schedule.but(block_r=width, block_p=min(schedule.block_p, max(power_of_two(plan.row_count) // 2, 1)))

    def needs(self, plan: TilePlan, schedule: TileSchedule) -> Needs:
        """Tiles stay in registers, computed piece by piece; warps exchange a row's sums through shared memory."""
        if schedule.language == "cuda":
            return Needs(warps=schedule.warps)
        tile = schedule.block_p * schedule.block_r
        return Needs(schedule.block_p * schedule.warps * 4, schedule.warps, tile, values_per_thread=256)

    def print(self, plan: TilePlan, schedule: TileSchedule, prefix: str) -> Implementation:
        """One kernel, or one a pass."""
        if schedule.language == "cuda":
            return print_rows_cuda(plan, schedule, prefix)
        if schedule.language != "triton":
            raise Unsupported(f"the tile family is not printed in {schedule.language!r}")
        return print_tile(plan, schedule, prefix)

    def cost(self, plan: TilePlan, schedule: TileSchedule) -> Cost:
        """A block asks for its tile at once; forms that pass over a row again read it again, from L2 or memory."""
        size = itemsize(plan.dtype)
        found = Cost(block_bytes=schedule.block_p * schedule.block_r * size)
        if schedule.language == "cuda":
            found = Cost(block_bytes=schedule.warps * 32 * ACCESS_BYTES * UNROLLED)
        if schedule.form not in ("loop", "wave"):
            return found
        reads = plan.passes + (1 if plan.full else 0)
        return Cost(
            block_bytes=found.block_bytes,
            again_reads=max(reads - 1, 0),
            again_bytes=plan.row_count * plan.column_count * size,
            held_bytes=0 if schedule.form == "wave" else plan.column_count * size * schedule.block_p,
        )

    def word(self, region: Region) -> str:
        """By what decides the loops: a convolution of single channels, a reduction, or pointwise operators alone."""
        found = {category(n) for n in region.ops}
        return next((word for word in ("convolution", "reduction", "pointwise") if word in found), OTHER)

    def intents(
        self, region: Region, schedule: TileSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """By what is reduced and how it lies in memory."""
        return words.intents(region, schedule)

    def samples(self) -> tuple[Sample, ...]:
        """A pointwise operator and two softmaxes."""
        return words.samples()


__all__ = ["Tile"]
