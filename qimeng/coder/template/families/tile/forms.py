"""The forms that a reduction may take, each with block sizes that suit it.

Deals in schedules; the sizes say where they were measured. Knows nothing about kernel text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import MAX_ALTERNATIVES


def other_form(plan: TilePlan, schedule: TileSchedule, form: str, device: Device) -> tuple[TileSchedule, ...]:
    """The schedules of `form`, best guess first; none where the schedule has that form, or the plan none."""
    if plan.passes == 0 or form == schedule.form:
        return ()
    return others(schedule, _FORMS[form](plan, schedule, device))


def others(schedule: TileSchedule, found: Iterable[TileSchedule]) -> tuple[TileSchedule, ...]:
    """The first of `found`, without `schedule` itself and each once."""
    return tuple(dict.fromkeys(s for s in found if s != schedule))[:MAX_ALTERNATIVES]


def _resident(plan: TilePlan, s: TileSchedule, device: Device) -> list[TileSchedule]:
    width = power_of_two(plan.column_count)
    if width > 65536:
        return []
    found = []
    for height in (128, 64, 32) if _column(plan) else (1, 2, 4):
        for warps in (8, 16, 4):
            per_thread = width * height // (warps * device.warp_size)
            if height <= power_of_two(plan.row_count) and 2 <= per_thread <= 64:
                found.append(s.but(form="resident", block_p=height, block_r=width, splits=1, warps=warps, stages=1))
    return found


def _loop(plan: TilePlan, s: TileSchedule, device: Device) -> list[TileSchedule]:
    shapes = (
        [(128, 32, 8), (64, 32, 4), (256, 16, 8)]
        if _column(plan)
        else [(1, 4096, 8), (1, 2048, 4), (1, 8192, 8), (1, 8192, 16)]
    )
    return [s.but(form="loop", block_p=p, block_r=r, warps=w, splits=1, stages=n) for n in (1, 3) for p, r, w in shapes]


def _split(plan: TilePlan, s: TileSchedule, device: Device) -> list[TileSchedule]:
    """Measured on H200: columns in tiles of 32 x 128 with 4 shares; long rows in grid strides of 4096."""
    column = _column(plan)
    shapes = (
        [(128, 32, 8), (64, 32, 4), (256, 16, 8), (128, 16, 8)]
        if column
        else [(1, 4096, 8), (1, 2048, 4), (1, 8192, 8)]
    )
    found = []
    for p, r, w in shapes:
        programs = max(1, plan.row_count // p)
        steps = max(1, plan.column_count // r)
        for waves in (2, 8):
            shares = min(steps, max(4 if column else 1, -(-waves * device.sms // programs)))
            for stages in (1, 3) if not column else (1,):
                found.append(s.but(form="split", block_p=p, block_r=r, splits=shares, warps=w, stages=stages))
    return found


def _wave(plan: TilePlan, s: TileSchedule, device: Device) -> list[TileSchedule]:
    """Measured on H200: tiles of 16384 with 8 warps, the first pass 150 tiles ahead. Three at once: a guess."""
    if not _may_share(plan) or plan.column_count * 4 > device.l2_bytes // 2:
        return []
    shapes = (
        (16384, 8, 150, 1), (16384, 8, 150, 3), (16384, 8, 75, 1), (8192, 8, 300, 1), (8192, 8, 150, 1),
        (4096, 8, 600, 1),
    )  # fmt: skip
    return [
        s.but(form="wave", block_p=1, block_r=r, warps=w, lag=lag, per_sm=n, splits=1, stages=1)
        for r, w, lag, n in shapes
    ]


def _cooperative(plan: TilePlan, s: TileSchedule, device: Device) -> list[TileSchedule]:
    """Tiles of 16 to 32 elements a thread, with the next row's or not; a row must fit all multiprocessors."""
    if not _may_share(plan):
        return []
    shapes = (
        (8192, 8, 2, 2), (16384, 16, 1, 2), (4096, 4, 4, 2), (4096, 8, 4, 2), (8192, 8, 3, 1), (4096, 4, 6, 1),
        (2048, 4, 8, 2), (16384, 8, 2, 1),
    )  # fmt: skip
    return [
        s.but(form="cooperative", block_p=1, block_r=r, warps=w, per_sm=n, splits=1, stages=stages)
        for r, w, n, stages in shapes
        if r < plan.column_count <= r * device.sms * n
    ]


def _column(plan: TilePlan) -> bool:
    """Whether memory runs along the rows, so that a tile takes many of them."""
    return plan.contiguous == "p"


def _may_share(plan: TilePlan) -> bool:
    """Whether programs may share a row in one launch: one pass, outputs along the row, long rows of memory."""
    return plan.passes == 1 and bool(plan.full) and not _column(plan) and plan.column_count >= 8192


_FORMS: dict[str, Callable[[TilePlan, TileSchedule, Device], list[TileSchedule]]] = {
    "resident": _resident,
    "loop": _loop,
    "split": _split,
    "wave": _wave,
    "cooperative": _cooperative,
}

__all__ = ["other_form", "others"]
