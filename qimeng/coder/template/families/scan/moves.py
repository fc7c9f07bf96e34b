"""The tunings of the scan family.

Deals in schedules: each move is a pure function. Knows nothing about kernel text; whether a schedule fits the device is
checked by whoever asks.
"""

from __future__ import annotations

from qimeng.coder.template.families.common import check_special
from qimeng.coder.template.families.scan.defaults import other_form
from qimeng.coder.template.families.scan.plan import LONGEST_TILE, ScanPlan
from qimeng.coder.template.families.scan.schedule import ScanSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import Move

ScanMove = Move[ScanPlan, ScanSchedule]
Found = list[ScanSchedule]


class Tiling(ScanMove):
    """More or fewer rows a program, longer or shorter steps, with warps to match."""

    table: dict[str, list[tuple[float, float]]] = {
        "taller": [(2, 1), (4, 1)],
        "wider": [(1, 2), (1, 4)],
        "smaller": [(0.5, 1), (1, 0.5)],
        "larger": [(2, 2)],
    }
    """Factors of rows and columns."""

    def schedules(self, plan: ScanPlan, schedule: ScanSchedule, param: str, device: Device) -> Found:
        """Rows in registers change in number alone: their columns are what they are."""
        s, rows, width = schedule, power_of_two(plan.row_count), power_of_two(plan.column_count)
        found = []
        for p, r in self.table.get(param, []):
            height, length = int(s.block_p * p), int(s.block_r * r)
            if s.form == "resident" and r != 1:
                continue
            if 1 <= height <= rows and 1 <= length <= width and height * length <= LONGEST_TILE:
                found += [s.but(block_p=height, block_r=length, warps=w) for w in (4, 8, 16, 2)]
        return _others(s, found)


class Pipeline(ScanMove):
    """Other depths of the pipeline, for forms that loop; other numbers of warps."""

    def schedules(self, plan: ScanPlan, schedule: ScanSchedule, param: str, device: Device) -> Found:
        """Depths of 1 to 4, warps from 1 to 16."""
        if param == "warps":
            return _others(schedule, [schedule.but(warps=w) for w in (1, 2, 4, 8, 16)])
        if schedule.form == "resident":
            return []
        return _others(schedule, [schedule.but(stages=n) for n in (1, 2, 3, 4)])


class Split(ScanMove):
    """Another form, or other numbers of programs a row."""

    def check(self, plan: ScanPlan, schedule: ScanSchedule, param: str, device: Device, mode: str) -> None:
        """Only forms that the plan has."""
        if param in ("resident", "loop", "split") and param not in plan.forms:
            raise IllegalAction(f"no form {param!r} for {plan.column_count} elements: {plan.why_not(param)}")

    def schedules(self, plan: ScanPlan, schedule: ScanSchedule, param: str, device: Device) -> Found:
        """A change of form with block sizes that suit it, or twice / half the programs."""
        s = schedule
        if param not in ("more", "fewer"):
            return [] if param == s.form else _others(s, other_form(plan, s, param, device))
        if s.form != "split":
            return []
        counts = [s.splits * 2, s.splits * 4] if param == "more" else [s.splits // 2, s.splits // 4]
        most = -(-plan.column_count // s.block_r)
        return _others(s, [s.but(splits=c) for c in counts if 2 <= c <= min(most, 2048)])


class Vectorization(ScanMove):
    """More or fewer neighbouring elements a thread."""

    def schedules(self, plan: ScanPlan, schedule: ScanSchedule, param: str, device: Device) -> Found:
        """Half or twice the warps for the same tile; read backwards, a thread's elements are no neighbours."""
        warps = schedule.warps // 2 if param == "more" else schedule.warps * 2
        found = [schedule.but(warps=warps)] if 1 <= warps <= 16 else []
        return _others(schedule, [*found, *([schedule.but(backwards=param == "fewer")] if plan.turns else [])])


class Special(ScanMove):
    """Other code for special functions, where every element takes one."""

    def check(self, plan: ScanPlan, schedule: ScanSchedule, param: str, device: Device, mode: str) -> None:
        """Only where every element takes such a function, on a GPU that has the units."""
        check_special(plan.special, schedule.fast, param, device)

    def schedules(self, plan: ScanPlan, schedule: ScanSchedule, param: str, device: Device) -> Found:
        """The same tiles."""
        return _others(schedule, [schedule.but(fast=param == "fast")])


def _others(schedule: ScanSchedule, found: Found) -> Found:
    return [s for s in dict.fromkeys(found) if s != schedule]


def moves() -> dict[str, ScanMove]:
    """Kind of action to the move that carries it out."""
    return {
        "tiling": Tiling(),
        "pipeline": Pipeline(),
        "split": Split(),
        "vectorization": Vectorization(),
        "special": Special(),
    }


__all__ = ["Pipeline", "Special", "Split", "Tiling", "Vectorization", "moves"]
