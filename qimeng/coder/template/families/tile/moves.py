"""The tunings of the tile family.

Deals in schedules: each move is a pure function. Knows nothing about kernel text; whether a schedule fits the device is
checked by whoever asks.
"""

from __future__ import annotations

from qimeng.coder.template.families.common import check_special
from qimeng.coder.template.families.tile.cuda_moves import (
    ByLanguage,
    CudaPipeline,
    CudaSplit,
    CudaTiling,
    Language,
)
from qimeng.coder.template.families.tile.forms import other_form, others
from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import Move

TileMove = Move[TilePlan, TileSchedule]
Found = tuple[TileSchedule, ...]

WIDEST = 32768
"""Most columns of a step."""


class Tiling(TileMove):
    """Twice or four times the rows or columns, or half of them, with warps to match."""

    table: dict[str, list[tuple[float, float]]] = {
        "taller": [(2, 1), (4, 1), (2, 0.5)],
        "wider": [(1, 2), (1, 4), (0.5, 2)],
        "deeper": [],
        "smaller": [(0.5, 1), (1, 0.5), (0.5, 0.5)],
        "larger": [(2, 2), (1, 8)],
    }
    """Factors of rows and columns, for rows that do not stay in registers."""

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """Resident rows change in number alone: their columns are what they are."""
        s, rows = schedule, power_of_two(plan.row_count)
        if s.form == "resident":
            if param not in ("taller", "smaller"):
                return ()
            heights = [s.block_p * 2, s.block_p * 4] if param == "taller" else [s.block_p // 2, s.block_p // 4]
            return others(s, [s.but(block_p=p, warps=w) for p in heights for w in (4, 8, 16) if 1 <= p <= rows])
        found = []
        for p, r in self.table[param]:
            height, width = int(s.block_p * p), int(s.block_r * r)
            if 1 <= height <= rows and 1 <= width <= WIDEST and width <= 2 * power_of_two(plan.column_count):
                found += [s.but(block_p=height, block_r=width, warps=w) for w in (4, 8, 16)]
        return others(s, found)


class Pipeline(TileMove):
    """Other depths of the pipeline, for forms that loop; other numbers of warps."""

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """Depths of 1 to 5, warps from 2 to 16."""
        s = schedule
        if param == "warps":
            return others(s, [s.but(warps=w) for w in (2, 4, 8, 16)])
        if s.form in ("resident", "wave", "cooperative") or plan.passes == 0:
            return ()
        return others(s, [s.but(stages=n) for n in (1, 2, 3, 4, 5)])


class Split(TileMove):
    """Another form of a reduction, or other numbers of programs a row."""

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """A change of form with block sizes that suit it, or twice / half the splits."""
        s = schedule
        if param not in ("more", "fewer"):
            return other_form(plan, s, param, device)
        if plan.passes == 0 or s.form != "split":
            return ()
        counts = [s.splits * 2, s.splits * 4] if param == "more" else [s.splits // 2, s.splits // 4]
        return others(s, [s.but(splits=c) for c in counts if 1 <= c <= 2048])


class Vectorization(TileMove):
    """More or fewer elements a thread."""

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """Half or twice the warps for the same tile, or twice or half the tile for the same warps."""
        s, fixed = schedule, schedule.form == "resident"
        if param == "more":
            found = [s.but(warps=max(1, s.warps // 2))]
            found += [s.but(block_r=s.block_r * 2)] if not fixed and s.block_r * 2 <= WIDEST else []
        else:
            found = [s.but(warps=min(16, s.warps * 2))]
            found += [s.but(block_r=s.block_r // 2)] if not fixed and s.block_r >= 64 else []
        return others(s, found)


class Special(TileMove):
    """Other code for special functions, where every element takes one."""

    def check(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device, mode: str) -> None:
        """Only where every element takes such a function, on a GPU that has the units."""
        check_special(plan.special, schedule.fast, param, device)

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """The same tiles."""
        return others(schedule, [schedule.but(fast=param == "fast")])


def moves() -> dict[str, TileMove]:
    """Kind of action to the move that carries it out."""
    return {
        "tiling": ByLanguage({"triton": Tiling(), "cuda": CudaTiling()}),
        "pipeline": ByLanguage({"triton": Pipeline(), "cuda": CudaPipeline()}),
        "split": ByLanguage({"triton": Split(), "cuda": CudaSplit()}),
        "vectorization": ByLanguage({"triton": Vectorization()}),
        "special": ByLanguage({"triton": Special()}),
        "language": Language(),
    }


__all__ = ["WIDEST", "Pipeline", "Special", "Split", "Tiling", "Vectorization", "moves"]
