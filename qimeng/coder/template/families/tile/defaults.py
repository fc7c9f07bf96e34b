"""The schedule that lowering gives a region of the tile family, and others worth measuring beside it.

Deals in shapes and capacities. Knows nothing about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.families.tile.forms import other_form
from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device

RESIDENT_ELEMENTS = 32768
"""Most elements of a row that a program keeps in registers (16 or 32 warps; measured best up to here on H200)."""


SHORT = 64
"""Most columns of a window that one thread walks by itself: a maximum over a window, a convolution of single channels.
Triton's lanes then lie along the outputs alone, and no two of them have to exchange anything."""

NARROW = 16
"""The same where the columns lie next to each other in memory, as in windows that do not overlap."""

FORMS = ("wave", "cooperative", "split", "resident")
"""Forms of a reduction that lowering tries beside the plain one (`loop` is that wherever there are rows enough)."""

GUESSES = 2
"""Schedules of each."""


def default_schedule(plan: TilePlan, device: Device) -> TileSchedule:
    """A plain schedule that is right for the shape, without tuning.

    The forms follow measurements on an H200: resident rows up to 32K elements, one program a row beyond that, several
    programs a row where rows are too few to fill the GPU.
    """
    rows, columns = plan.row_count, plan.column_count
    if plan.passes == 0:
        elements = 1024 if plan.itemsize > 2 else 2048  # two 16-byte accesses a thread or more
        width = min(power_of_two(columns), elements)
        height = max(1, min(elements // width, power_of_two(rows)))
        return TileSchedule("split", block_p=height, block_r=width, warps=4, stages=1)
    if _is_window(plan):
        return TileSchedule("loop", block_p=min(power_of_two(rows), 1024), block_r=1, warps=4, stages=1)
    if plan.contiguous == "p":
        height = min(power_of_two(plan.rows[-1][1]), 128)
        if plan.full and power_of_two(columns) * height <= RESIDENT_ELEMENTS // 2:
            return TileSchedule("resident", block_p=height, block_r=power_of_two(columns), warps=8, stages=1)
        deep = min(32, power_of_two(columns))
        programs = -(-rows // height)
        splits = _splits(programs, -(-columns // deep), device)
        return TileSchedule(
            "split" if splits > 1 else "loop", block_p=height, block_r=deep, splits=splits, warps=8, stages=1
        )
    if power_of_two(columns) <= RESIDENT_ELEMENTS:
        width = power_of_two(columns)
        return TileSchedule(
            "resident",
            block_p=max(1, min(2048 // width, power_of_two(rows))),
            block_r=width,
            warps=_warps(width),
            stages=1,
        )
    width = 4096
    splits = _splits(rows, -(-columns // width), device)
    return TileSchedule("split" if splits > 1 else "loop", block_p=1, block_r=width, splits=splits, warps=8, stages=1)


def guesses(plan: TilePlan, schedule: TileSchedule, device: Device) -> list[TileSchedule]:
    """For a reduction whose rows are too long for one program's registers, the other forms.

    Which one streams best hangs on the row's length and alignment and on what is computed.
    """
    if not plan.passes or schedule.form == "resident":
        return []
    if schedule.block_r == 1:
        lower, taller = schedule.but(block_p=schedule.block_p // 2), schedule.but(block_p=schedule.block_p * 2, warps=8)
        whole = [s for form in ("resident", "split") for s in other_form(plan, schedule, form, device)[:1]]
        return [*([lower] if lower.block_p else []), taller, *whole]
    return [s for form in FORMS for s in other_form(plan, schedule, form, device)[:GUESSES]]


def _is_window(plan: TilePlan) -> bool:
    """Whether each output is reduced from a few elements at computed positions, none of which is kept along them."""
    moved = any(e.access for e in plan.nest.exprs)
    return moved and not plan.full and plan.column_count <= (SHORT if plan.contiguous == "p" else NARROW)


def _warps(elements: int) -> int:
    """Warps for a row of `elements` in registers."""
    return max(4, min(16, elements // 1024))


def _splits(programs: int, steps: int, device: Device) -> int:
    """Programs that share a row so that every SM has about eight; 1 where rows alone give it two."""
    if programs >= 2 * device.sms:
        return 1
    return max(1, min(steps, -(-8 * device.sms // programs), 1024))


__all__ = ["FORMS", "GUESSES", "RESIDENT_ELEMENTS", "default_schedule", "guesses"]
