"""Which schedules a reduction by segment starts from, and its tunings.

Reasoned from what is moved, not swept: a segment takes as many lanes as it has rows on average. Deals in block sizes
and forms. Knows nothing about kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import MAX_ALTERNATIVES, Move, Schedule, family_field
from qimeng.program.schedule import power_of_two as a_power
from qimeng.vocabulary.irregular.plan import SegmentPlan

FORMS = ("sorted", "bucket", "atomic")
"""Order of the rows that a kernel walks; see `SegmentSchedule.form`."""


@dataclass(frozen=True)
class SegmentSchedule(Schedule):
    """How rows are reduced by segment.

    Attributes:
        form: ``"sorted"`` (rows in the order of their segments, of equal ones the first first: the same sums in every
            call), ``"bucket"`` (rows counted and put into segments by atomics, in any order within one), ``"atomic"``
            (no order: every row is added to its segment's sum in memory).
        block_s: segments of a program.
        block_e: rows of each segment that a step takes.
        block_r: elements of a row.
        warps: warps of a program.
        longest: rows of a segment that its program walks; further ones are walked by other programs, so many by each.
            0 where it walks all.
    """

    family: str = family_field("irregular")
    form: str = "sorted"
    block_s: int = a_power(1)
    block_e: int = a_power(8)
    block_r: int = a_power(64)
    warps: int = a_power(2)
    longest: int = 0

    @property
    def lanes(self) -> int:
        """Rows of a tile."""
        return self.block_s * self.block_e

    @property
    def numerics(self) -> str:
        """In which order rows are added."""
        return f"{self.form} {self.block_e} {self.longest}"

    def fault(self) -> str:
        """As for every schedule, and where pieces have a negative number of rows."""
        return super().fault() or ("" if type(self.longest) is int and self.longest >= 0 else f"{self.longest = }")


WIDEST, TILE, MOST_LANES = 128, 1024, 256
"""The most elements of a row in a tile; elements of the first tile; the most rows of one."""

LONGEST, SHORTEST = 1024, 128
"""Rows of a piece of a long segment at first, and at least."""


def default_schedule(plan: SegmentPlan) -> SegmentSchedule:
    """Rows in a fixed order where that costs nothing or is asked for, else in counted buckets."""
    form = "sorted" if plan.settled or plan.segments.by is None or wants_order(plan) else "bucket"
    wide = min(power_of_two(plan.columns), WIDEST)
    lanes = max(1, min(TILE // wide, MOST_LANES))
    each = min(power_of_two(max(1, plan.rows // plan.segments.count)), lanes)
    made = SegmentSchedule(form=form, block_s=lanes // each, block_e=each, block_r=wide)
    return made.but(longest=LONGEST) if plan.settled and may_be_long(plan, LONGEST) else made


def guesses(plan: SegmentPlan, schedule: SegmentSchedule) -> tuple[SegmentSchedule, ...]:
    """Other shapes of the tile, which only a measurement can tell apart."""
    s, lanes = schedule, schedule.lanes
    found = [
        s.but(block_s=lanes, block_e=1),
        s.but(block_s=1, block_e=lanes),
        *([s.but(longest=0 if s.longest else LONGEST)] if may_be_long(plan, LONGEST) else []),
        s.but(warps=4),
        s.but(block_s=max(1, s.block_s // 2), warps=1),
        s.but(block_r=max(1, s.block_r // 2), warps=1),
        s.but(block_s=s.block_s * 2, warps=4),
    ]
    return tuple(dict.fromkeys(c for c in found if c != s and c.lanes <= MOST_LANES))[: MAX_ALTERNATIVES - 1]


def may_be_long(plan: SegmentPlan, longest: int) -> bool:
    """Whether a segment may have more rows than that."""
    return not plan.segments.even and plan.rows > longest


def wants_order(plan: SegmentPlan) -> str:
    """Who asks for the same sums in every call, the spec or PyTorch's switch; empty where nobody does."""
    if plan.region.graph.deterministic:
        return "the spec asks for the same bits in every call (deterministic=True)"
    return "torch.use_deterministic_algorithms is on" if torch.are_deterministic_algorithms_enabled() else ""


def changes_sums(plan: SegmentPlan, form: str) -> bool:
    """Whether the sums of a form are added in an order that changes from call to call."""
    return form != "sorted" and plan.segments.by is not None and plan.segments.kind in ("sum", "mean")


SegmentMove = Move[SegmentPlan, SegmentSchedule]


class Tiling(SegmentMove):
    """More segments (``taller``), rows of each (``deeper``) or elements of a row (``wider``) a program, or fewer."""

    def schedules(self, plan: SegmentPlan, schedule: SegmentSchedule, param: str, device: Device) -> Sequence:
        """None where a tile would have more than the region."""
        s = schedule
        found = {
            "taller": [s.but(block_s=s.block_s * 2)],
            "deeper": [s.but(block_e=s.block_e * 2)],
            "wider": [s.but(block_r=s.block_r * 2)],
            "larger": [s.but(block_s=s.block_s * 2, warps=min(8, s.warps * 2))],
            "smaller": [s.but(**{f: getattr(s, f) // 2}) for f in ("block_s", "block_e", "block_r")],
        }.get(param, [])
        most = power_of_two(plan.columns)
        return tuple(c for c in found if c.block_s and c.block_e and 1 <= c.block_r <= most and c.lanes <= MOST_LANES)


class Pipeline(SegmentMove):
    """Other numbers of warps."""

    def schedules(self, plan: SegmentPlan, schedule: SegmentSchedule, param: str, device: Device) -> Sequence:
        """From 1 to 8; there is no pipeline of loads whose places are loaded first."""
        found = [schedule.but(warps=w) for w in (1, 2, 4, 8)] if param == "warps" else []
        return tuple(s for s in found if s != schedule)


class Split(SegmentMove):
    """More or fewer programs for a long segment."""

    def check(self, plan: SegmentPlan, schedule: SegmentSchedule, param: str, device: Device, mode: str) -> None:
        """Rows that are added to sums in memory are shared among programs already."""
        if schedule.form == "atomic":
            raise IllegalAction(f"split {param}: in the form atomic, programs share all rows evenly")
        if plan.segments.even:
            raise IllegalAction(f"split {param}: every segment has {plan.segments.even} rows")

    def schedules(self, plan: SegmentPlan, schedule: SegmentSchedule, param: str, device: Device) -> Sequence:
        """Pieces of half or twice the rows; none at all where they would be longer than all rows."""
        long = schedule.longest
        if param == "more":
            found = [long // 2 if long else LONGEST]
        else:
            found = [long * 2, 0] if param == "fewer" and long else []
        return tuple(schedule.but(longest=n) for n in found if n == 0 or (n >= SHORTEST and may_be_long(plan, n)))


class Form(SegmentMove):
    """Another order of the rows."""

    def check(self, plan: SegmentPlan, schedule: SegmentSchedule, param: str, device: Device, mode: str) -> None:
        """Atomics add, and give other sums in every call; a form that the region has is no change."""
        kind = plan.segments.kind
        if param == schedule.form:
            raise IllegalAction(f"rows are reduced in the form {param} already")
        if plan.segments.by is None:
            raise IllegalAction(f"{param}: rows lie in the order of their segments, one side by side with the next")
        if param == "atomic" and kind not in ("sum", "mean"):
            raise IllegalAction(f"atomic: rows are added by atomics, and this reduction takes the {kind}")
        if changes_sums(plan, param) and (why := wants_order(plan)):
            raise IllegalAction(f"{param}: the order of the sums changes from call to call, and {why}; take sorted")
        if param == "bucket" and plan.settled:
            raise IllegalAction("bucket: the index is a buffer, whose order is found once: sorted costs nothing")

    def schedules(self, plan: SegmentPlan, schedule: SegmentSchedule, param: str, device: Device) -> Sequence:
        """The same tile; atomics need no rows of one segment side by side, so that more fit."""
        if param not in FORMS:
            return ()
        return (schedule.but(form=param, longest=0 if param == "atomic" else schedule.longest),)


__all__ = [
    "FORMS", "LONGEST", "Form", "Pipeline", "SegmentSchedule", "Split", "Tiling", "changes_sums",
    "default_schedule", "guesses", "may_be_long", "wants_order",
]  # fmt: skip
