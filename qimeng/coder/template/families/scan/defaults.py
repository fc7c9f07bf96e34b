"""The schedule that lowering gives a region of the scan family, and others worth measuring beside it.

Deals in shapes and capacities; no size here was measured yet, they follow those of the tile family. Knows nothing about
kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.families.scan.plan import LONGEST_TILE, ScanPlan
from qimeng.coder.template.families.scan.schedule import ScanSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device

SHORT = 4096
"""Rows up to this length stay in registers from the start."""

GUESSES = 2
"""Schedules of each form that lowering measures beside the plain one."""


def default_schedule(plan: ScanPlan, device: Device) -> ScanSchedule:
    """A plain schedule that is right for the shape, without tuning."""
    width, start = power_of_two(plan.column_count), ScanSchedule(backwards=plan.turns)
    if plan.forms == ("resident",):
        return resident(plan, start)[0]
    if plan.contiguous == "p":
        height, length, warps = column_shapes(plan)[0]
        if width <= length:
            return start.but(block_p=height, block_r=width, warps=warps)
        return shared(plan, start.but(form="loop", block_p=height, block_r=length, warps=warps), device)
    if width <= SHORT:
        return resident(plan, start)[0]
    return shared(plan, start.but(form="loop", block_p=1, block_r=2048, warps=4), device)


def guesses(plan: ScanPlan, schedule: ScanSchedule, device: Device) -> list[ScanSchedule]:
    """Loads ahead, other block sizes, the other direction, the other forms; what streams best hangs on the shape."""
    found = [schedule.but(stages=3)] if schedule.form != "resident" else []
    found += [s for s in other_form(plan, schedule, schedule.form, device) if s != schedule][: GUESSES - len(found)]
    found += [schedule.but(backwards=False)] if schedule.backwards else []
    for form in plan.forms:
        if form != schedule.form:
            found += other_form(plan, schedule, form, device)[:GUESSES]
    return found


def other_form(plan: ScanPlan, schedule: ScanSchedule, form: str, device: Device) -> list[ScanSchedule]:
    """The schedules of `form`, best guess first; none where the plan has none."""
    if form not in plan.forms:
        return []
    if form == "resident":
        return resident(plan, schedule)
    column = plan.contiguous == "p"
    shapes = column_shapes(plan) if column else ((1, 2048, 4), (1, 4096, 8), (1, 1024, 2), (1, 8192, 16))
    shapes = [shape for shape in shapes if shape[1] < plan.column_count]
    plain = [schedule.but(form="loop", block_p=p, block_r=r, warps=w, splits=1) for p, r, w in shapes]
    if form == "loop":
        return [s.but(stages=n) for n in (1, 3) for s in plain]
    return [s for waves in (8, 2) for one in plain if (s := shared(plan, one, device, waves)).form == "split"]


def resident(plan: ScanPlan, schedule: ScanSchedule) -> list[ScanSchedule]:
    """Rows in registers, 4 to 64 elements a thread."""
    width, rows = power_of_two(plan.column_count), power_of_two(plan.row_count)
    if width > LONGEST_TILE:
        return []
    heights = (64, 32, 128, 16) if plan.contiguous == "p" else (max(1, 1024 // width), max(1, 4096 // width), 1)
    found = []
    for height in dict.fromkeys(min(h, rows) for h in heights):
        for warps in (4, 8, 16, 2, 1):
            if 2 <= width * height // (32 * warps) <= 32 or (width * height <= 64 and warps == 1):
                found.append(
                    schedule.but(form="resident", block_p=height, block_r=width, warps=warps, splits=1, stages=1)
                )
    return found or [schedule.but(form="resident", block_p=1, block_r=width, warps=16, splits=1, stages=1)]


def column_shapes(plan: ScanPlan) -> list[tuple[int, int, int]]:
    """(rows, columns, warps) of a step where memory runs along the rows.

    At 512 bytes of rows a warp, each thread has whole columns: their scan needs no shuffles.
    """
    rows, width = power_of_two(plan.rows[-1][1]), power_of_two(plan.column_count)
    each = 512 // plan.itemsize
    shapes = (
        ((each, 16, 1), (2 * each, 16, 2), (64, 32, 4), (32, 64, 4)) if rows >= each else ((64, 32, 4), (32, 64, 4))
    )
    return list(dict.fromkeys((min(p, rows), min(r, width), w) for p, r, w in shapes))


def shared(plan: ScanPlan, schedule: ScanSchedule, device: Device, waves: int = 8) -> ScanSchedule:
    """`schedule`, with several programs a row where rows alone do not fill the GPU."""
    programs = -(-plan.row_count // schedule.block_p)
    steps = -(-plan.column_count // schedule.block_r)
    splits = min(steps, -(-waves * device.sms // programs), 1024)
    if "split" not in plan.forms or programs >= 2 * device.sms or splits < 2:
        return schedule
    return schedule.but(form="split", splits=splits)


__all__ = ["GUESSES", "SHORT", "column_shapes", "default_schedule", "guesses", "other_form", "resident", "shared"]
