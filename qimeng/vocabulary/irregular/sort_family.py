"""The family of sorts: rows that fit a program are put in order by it, with their places.

Deals in what the library asks of a family.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qimeng.device import Device
from qimeng.family import Family, Move, Needs, Sample
from qimeng.graph.region import Region
from qimeng.program.program import Implementation
from qimeng.vocabulary.irregular.sort_kernel import SortSchedule, print_sort
from qimeng.vocabulary.irregular.sorting import SORTS, SortPlan, is_few, plan_sort

EACH = 16
"""Elements of a thread at most, 64 bits each."""

FIRST = 4
"""Elements of a thread at first; a row of fewer elements shares its program."""


class Sort(Family[SortPlan, SortSchedule]):
    """Sorts of rows, and the largest or smallest of them, with their places; equal elements keep their order."""

    name = "sort"
    about = "sorts of rows"
    schedule = SortSchedule

    def __init__(self) -> None:
        self.moves = {"tiling": _Tiling(), "pipeline": _Pipeline()}

    def plan(self, region: Region) -> SortPlan:
        """The operator and its rows."""
        return plan_sort(region)

    def concerns(self, region: Region) -> bool:
        """Whatever sorts, or takes more than a few of the largest."""
        return any(n.target in SORTS and not is_few(region.graph, n) for n in region.ops)

    def default(self, plan: SortPlan, device: Device, mode: str) -> SortSchedule:
        """As many warps as the row has elements for, four rows of a short one."""
        warps = max(1, min(16, plan.width // (32 * FIRST)))
        rows = max(1, min(4, 32 * FIRST * warps // plan.width))
        return SortSchedule(block_p=rows, warps=warps)

    def guesses(self, plan: SortPlan, schedule: SortSchedule, device: Device, mode: str) -> Sequence[SortSchedule]:
        """Fewer and more warps."""
        return [
            s
            for w in (schedule.warps // 2, schedule.warps * 2)
            if 1 <= w <= 16 and _fits(plan, s := schedule.but(warps=w))
        ]

    def needs(self, plan: SortPlan, schedule: SortSchedule) -> Needs:
        """A row is exchanged through shared memory between warps; 64 bits an element in registers, twice."""
        held = plan.width * schedule.block_p
        return Needs(8 * held, schedule.warps, 4 * held, values_per_thread=4 * EACH)

    def print(self, plan: SortPlan, schedule: SortSchedule, prefix: str) -> Implementation:
        """One kernel."""
        return print_sort(plan, schedule, prefix)

    def intents(
        self, region: Region, schedule: SortSchedule | None, device: Device, mode: str
    ) -> tuple[tuple[str, str], ...]:
        """Warps, then rows."""
        return ("pipeline", "warps"), ("tiling", "taller"), ("tiling", "smaller")

    def samples(self) -> tuple[Sample, ...]:
        """Rows with their places."""
        return ((_Sorted, ((64, 128),)),)


SortMove = Move[SortPlan, SortSchedule]


class _Tiling(SortMove):
    """Twice or half the rows of a program."""

    def schedules(self, plan: SortPlan, schedule: SortSchedule, param: str, device: Device) -> Sequence[SortSchedule]:
        """No more than there are; a row is never cut."""
        rows = {"taller": schedule.block_p * 2, "smaller": schedule.block_p // 2}.get(param, 0)
        found = schedule.but(block_p=rows) if 1 <= rows <= max(1, plan.rows) else schedule
        return (found,) if found != schedule and _fits(plan, found) else ()


class _Pipeline(SortMove):
    """Other numbers of warps."""

    def schedules(self, plan: SortPlan, schedule: SortSchedule, param: str, device: Device) -> Sequence[SortSchedule]:
        """From 1 to 16; nothing is loaded in steps."""
        found = [schedule.but(warps=w) for w in (1, 2, 4, 8, 16)] if param == "warps" else []
        return tuple(s for s in found if s != schedule and _fits(plan, s))


def _fits(plan: SortPlan, schedule: SortSchedule) -> bool:
    """Whether threads hold no more than `EACH` elements, and have one each."""
    held = plan.width * schedule.block_p
    return held <= EACH * 32 * schedule.warps and (schedule.warps == 1 or held >= 32 * schedule.warps)


class _Sorted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.sort(x, dim=-1, descending=True)
        return values, places


__all__ = ["Sort"]
