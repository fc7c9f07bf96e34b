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

_WINDOW = {False: (256, 4), True: (1024, 8)}
"""Rows and warps of a program, without weights and with. Triton gives a thread up to four rows next to each other, so
that more than two a thread spread each load over more of memory. Measured on an H200: maxima of 8 in 0.62 ms instead of
0.85 with 1024 rows and 4 warps, means of 27 in 0.66 instead of 1.63; a convolution of 7 x 7 single channels in bf16 in
0.12 ms instead of 0.19 with 256 rows, since a thread's rows share a weight."""

NARROW, APART = 16, 4
"""The same where windows begin further than `APART` elements from each other, as those do that do not overlap: then
lanes along the outputs read from as many places."""

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
        height, warps = _WINDOW[_has_weights(plan)]
        return TileSchedule("loop", block_p=min(power_of_two(rows), height), block_r=1, warps=warps, stages=1)
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
        shapes = [shape for shape in (*_WINDOW.values(), (512, 8)) if shape[0] <= power_of_two(plan.row_count)]
        found = [schedule.but(block_p=height, warps=warps) for height, warps in shapes]
        found += [s for form in ("resident", "split") for s in other_form(plan, schedule, form, device)[:1]]
        return [s for s in found if s != schedule]
    return [s for form in FORMS for s in other_form(plan, schedule, form, device)[:GUESSES]]


def _is_window(plan: TilePlan) -> bool:
    """Whether each output is reduced from a few elements at computed positions, none of which is kept along them."""
    moved = [e for e in plan.nest.exprs if e.op == "load" and e.access]
    steps = [plan.nest.walked_strides(e).get(plan.rows[-1][0][-1], 0) for e in moved] if plan.rows else []
    near = plan.contiguous == "p" or any(0 < step <= APART for step in steps)
    return bool(moved) and not plan.full and plan.column_count <= (SHORT if near else NARROW)


def _has_weights(plan: TilePlan) -> bool:
    """Whether what is reduced is a product of several tensors."""
    loads: set[int] = set()
    for e in plan.nest.reductions(1):
        todo = list(e.args[:1])
        while todo:
            x = todo.pop()
            loads |= {x.param} if x.op == "load" else set()
            todo += x.operands()
    return len(loads) > 1


def _warps(elements: int) -> int:
    """Warps for a row of `elements` in registers."""
    return max(4, min(16, elements // 1024))


def _splits(programs: int, steps: int, device: Device) -> int:
    """Programs that share a row so that every SM has about eight; 1 where rows alone give it two."""
    if programs >= 2 * device.sms:
        return 1
    return max(1, min(steps, -(-8 * device.sms // programs), 1024))


__all__ = ["FORMS", "GUESSES", "RESIDENT_ELEMENTS", "default_schedule", "guesses"]
