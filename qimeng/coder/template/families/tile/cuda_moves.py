"""The tile family in CUDA C++: its schedules, and the moves between them.

Deals in form, rows a block, blocks a row and warps, the fields that the CUDA printer reads. Block sizes are first
guesses by the arithmetic that their text gives; none was measured yet. Asks the printer which schedules it takes, and
knows nothing about the text that it gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from qimeng.backend import backend_named
from qimeng.coder.template.cuda.emitter import check_printable
from qimeng.coder.template.families.tile.cuda_rows import MOST_HELD, print_rows_cuda
from qimeng.coder.template.families.tile.defaults import default_schedule
from qimeng.coder.template.families.tile.forms import others
from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import Move, Unsupported

TileMove = Move[TilePlan, TileSchedule]
Found = tuple[TileSchedule, ...]

LEAST = 4
"""Elements of a row for each thread below which fewer threads share it."""

WAVES = 4
"""Blocks for each multiprocessor at which rows are no longer shared among blocks."""

MOST_WARPS = 32
"""A block has at most 1024 threads."""


class ByLanguage(TileMove):
    """One move for each language that a schedule may be in; there is nothing to change in the others.

    Args:
        moves: language to move.
    """

    def __init__(self, moves: Mapping[str, TileMove]):
        self.moves = dict(moves)

    def check(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device, mode: str) -> None:
        """The check of the schedule's language."""
        if (move := self.moves.get(schedule.language)) is None:
            raise IllegalAction(f"kernels in {backend_named(schedule.language).title} have no such tuning")
        move.check(plan, schedule, param, device, mode)

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """The schedules of the schedule's language."""
        move = self.moves.get(schedule.language)
        return () if move is None else tuple(move.schedules(plan, schedule, param, device))


class Language(TileMove):
    """The same loops in another language, with block sizes that suit it."""

    def check(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device, mode: str) -> None:
        """Only for devices that the language compiles for, where its compiler is installed and it has the operators."""
        backend = backend_named(param)
        if reason := backend.refusal(device):
            raise IllegalAction(reason)
        if missing := backend.missing():
            raise IllegalAction(missing)
        if param == "cuda":
            try:
                check_printable(plan.nest)
            except Unsupported as error:
                raise IllegalAction(str(error)) from None

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """In CUDA C++ each form that suits the rows; in Triton the plain schedule."""
        if param == schedule.language:
            return ()
        if param == "triton":
            return (default_schedule(plan, device),)
        return _printable(plan, schedule, cuda_schedules(plan, device)) if param == "cuda" else ()


class CudaTiling(TileMove):
    """More or fewer rows a block, where a row takes fewer threads than a block has."""

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """Twice or half the rows, at most one a warp."""
        s = schedule
        if not plan.passes or not _along_row(plan) or param not in ("taller", "smaller"):
            return ()
        height = s.block_p * 2 if param == "taller" else s.block_p // 2
        return _printable(plan, s, [s.but(block_p=height)] if 1 <= height <= s.warps else [])


class CudaPipeline(TileMove):
    """Other numbers of warps."""

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """From 1 to 32; loads are pipelined by the compiler."""
        if param != "warps":
            return ()
        found = [schedule.but(warps=w) for w in (2, 4, 8, 16, 32) if schedule.block_p <= w]
        return _printable(plan, schedule, found)


class CudaSplit(TileMove):
    """Another form of a reduction, or other numbers of blocks a row."""

    def schedules(self, plan: TilePlan, schedule: TileSchedule, param: str, device: Device) -> Found:
        """The forms of `cuda_schedules`, or twice / half the blocks of a row."""
        s = schedule
        if param not in ("more", "fewer"):
            found = [f for f in cuda_schedules(plan, device) if f.form == param != s.form]
            return _printable(plan, s, found)
        if not plan.passes or s.form != "split":
            return ()
        counts = [s.splits * 2, s.splits * 4] if param == "more" else [s.splits // 2, s.splits // 4]
        return _printable(plan, s, [s.but(splits=c) for c in counts if 2 <= c <= 2048])


def cuda_schedules(plan: TilePlan, device: Device) -> list[TileSchedule]:
    """Schedules in CUDA C++, best guess first: a row in registers where it fits, blocks that share rows where few.

    Args:
        plan: rows and columns.
        device: whose multiprocessors have to be filled.
    """
    start = TileSchedule(language="cuda", block_p=1, block_r=1, stages=1)
    if not plan.passes:
        return [start.but(form="loop", warps=w) for w in (8, 4, 16)]
    if not _along_row(plan):
        return _columns(plan, device, start)
    found = []
    for per_thread in (16, 32, MOST_HELD):
        if placed := _resident(plan, start, per_thread):
            found.append(placed)
    found += [start.but(form="loop", warps=w) for w in (8, 16, 32) if w * 32 * LEAST <= plan.column_count]
    shared = _shared(plan.row_count, plan.column_count // (8 * 32 * LEAST), device)
    few = [start.but(form="split", splits=n, warps=8) for n in shared]
    found = found or [start.but(form="loop", warps=4, block_p=4)]
    return list(dict.fromkeys(few + found if plan.row_count < device.sms else found + few))


def _printable(plan: TilePlan, present: TileSchedule, found: Iterable[TileSchedule]) -> Found:
    """Those of `found` that the printer takes, without `present`."""
    return others(present, [s for s in found if _prints(plan, s)])


@lru_cache(4096)
def _prints(plan: TilePlan, schedule: TileSchedule) -> bool:
    try:
        print_rows_cuda(plan, schedule, "k")
    except Unsupported:
        return False
    return True


def _along_row(plan: TilePlan) -> bool:
    return plan.contiguous == "r"


def _resident(plan: TilePlan, start: TileSchedule, per_thread: int) -> TileSchedule | None:
    """A row in registers with about `per_thread` elements a thread; short rows are several a block."""
    threads = 32
    while threads * per_thread < plan.column_count:
        threads *= 2
    if threads > MOST_WARPS * 32:
        return None
    warps = max(threads // 32, 4)
    return start.but(form="resident", warps=warps, block_p=warps * 32 // threads)


def _columns(plan: TilePlan, device: Device, start: TileSchedule) -> list[TileSchedule]:
    """Where memory runs along the rows: 32 rows a block, whose warps share the columns."""
    found = [start.but(form="loop", warps=w) for w in (8, 16, 32, 4) if w <= max(plan.column_count, 4)]
    shared = _shared(-(-plan.row_count // 32), plan.column_count // (8 * LEAST), device)
    few = [start.but(form="split", splits=n, warps=8) for n in shared]
    return few + found if plan.row_count < 32 * device.sms else found + few


def _shared(blocks: int, steps: int, device: Device) -> list[int]:
    """How many blocks may share a row, so that all multiprocessors have work; none where rows alone do."""
    if blocks >= WAVES * device.sms:
        return []
    counts = [min(steps, -(-waves * device.sms // max(blocks, 1)), 1024) for waves in (WAVES, 2 * WAVES)]
    return list(dict.fromkeys(c for c in counts if c > 1))


__all__ = ["ByLanguage", "CudaPipeline", "CudaSplit", "CudaTiling", "Language", "cuda_schedules"]
