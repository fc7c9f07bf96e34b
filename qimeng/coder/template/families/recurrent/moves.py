"""The tunings of the recurrent family.

Deals in schedules: each move is a pure function. Knows nothing about kernel text; whether a schedule fits the device is
checked by whoever asks.
"""

from __future__ import annotations

from qimeng.coder.template.families.common import check_special
from qimeng.coder.template.families.recurrent.defaults import (
    GUESSES,
    depth_block,
    dots,
    exact,
    keeps_states,
    takes_tf32,
)
from qimeng.coder.template.families.recurrent.plan import RecurrentPlan
from qimeng.coder.template.families.recurrent.schedule import LEAST, RecurrentSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import Move

PRECISIONS = ("fp16x3", "tf32")
"""How tensor cores take fp32."""

RecurrentMove = Move[RecurrentPlan, RecurrentSchedule]
Found = list[RecurrentSchedule]


class Tiling(RecurrentMove):
    """More or fewer sequences and units a program."""

    table: dict[str, tuple[tuple[float, float], ...]] = {
        "taller": ((2, 1), (4, 1)),
        "wider": ((1, 2), (1, 4)),
        "smaller": ((0.5, 1), (1, 0.5)),
        "larger": ((2, 2),),
    }
    """Factors of sequences and units."""

    def schedules(self, plan: RecurrentPlan, schedule: RecurrentSchedule, param: str, device: Device) -> Found:
        """Blocks up to the whole, with products in steps that fit."""
        found = []
        for p, r in self.table.get(param, ()):
            rows, units = int(schedule.block_p * p), int(schedule.block_r * r)
            most = max(power_of_two(plan.row_count), LEAST if schedule.dot else 1)
            if 1 <= rows <= most and 1 <= units <= power_of_two(plan.column_count):
                found += [_cut(plan, schedule, rows, units, warps) for warps in (8, 4, 16)]
        return found


class Split(RecurrentMove):
    """More or fewer programs that share a sequence."""

    def schedules(self, plan: RecurrentPlan, schedule: RecurrentSchedule, param: str, device: Device) -> Found:
        """Half or twice the units a program, and one step further."""
        factors = {"more": (0.5, 0.25), "fewer": (2, 4)}.get(param, ())
        sizes = [int(schedule.block_r * f) for f in factors]
        sizes = [r for r in sizes if 1 <= r <= power_of_two(plan.column_count)]
        return [_cut(plan, schedule, schedule.block_p, r, schedule.warps) for r in sizes]


class Pipeline(RecurrentMove):
    """Depths of the pipeline, or what programs wait for; other numbers of warps."""

    def schedules(self, plan: RecurrentPlan, schedule: RecurrentSchedule, param: str, device: Device) -> Found:
        """Depths of 1 to 6; warps from 1 to 16, and what their lanes share."""
        if param == "stages" and plan.exchanged:
            return [schedule.but(by_value=not schedule.by_value)] if keeps_states(plan) else []
        if param == "stages":
            return [schedule.but(stages=n) for n in (1, 2, 3, 4, 6) if n != schedule.stages]
        others = [w for w in (1, 2, 4, 8, 16) if w != schedule.warps] if param == "warps" else []
        found = [_cut(plan, schedule, schedule.block_p, schedule.block_r, w) for w in others]
        if not found or not plan.exchanged or schedule.dot:
            return found
        return [schedule.but(by_result=not schedule.by_result), *found]


class Precision(RecurrentMove):
    """Products of fp32 on tensor cores, in parts or rounded, or as multiply-adds."""

    def check(self, plan: RecurrentPlan, schedule: RecurrentSchedule, param: str, device: Device, mode: str) -> None:
        """TF32 only where PyTorch may take it: in its own layers, or in mode ``high``."""
        if plan.itemsize != 4 or not plan.exchanged or param not in ("ieee", *PRECISIONS):
            raise IllegalAction(f"ieee, fp16x3 and tf32 are choices for products of float32, not {param}")
        if (schedule.precision if schedule.dot else "ieee") == param:
            raise IllegalAction(f"{param} is what the region has")
        if param == "tf32" and not takes_tf32(plan, mode):
            raise IllegalAction(f"tf32 keeps 11 bits of 24; mode {mode!r} asks for fp32 (mode 'high' allows it)")
        if param != "ieee" and not dots(plan, device):
            raise IllegalAction(f"no cut of {plan.column_count} units fits the tensor cores and {device.name}'s memory")

    def schedules(self, plan: RecurrentPlan, schedule: RecurrentSchedule, param: str, device: Device) -> Found:
        """The same blocks and the best guesses."""
        if param == "ieee":
            return [s.but(fast=schedule.fast) for s in exact(plan, device)[: GUESSES + 1]]
        guesses = [s.but(fast=schedule.fast, precision=param) for s in dots(plan, device)[:GUESSES]]
        return [schedule.but(precision=param), *guesses] if schedule.dot else guesses


class Special(RecurrentMove):
    """Other code for special functions."""

    def check(self, plan: RecurrentPlan, schedule: RecurrentSchedule, param: str, device: Device, mode: str) -> None:
        """Only where every element takes such a function, on a GPU that has the units."""
        check_special(plan.special, schedule.fast, param, device)

    def schedules(self, plan: RecurrentPlan, schedule: RecurrentSchedule, param: str, device: Device) -> Found:
        """The same blocks."""
        return [schedule.but(fast=param == "fast")]


def _cut(plan: RecurrentPlan, s: RecurrentSchedule, rows: int, units: int, warps: int) -> RecurrentSchedule:
    """Other blocks, with products in steps that fit."""
    k = s.block_k if s.dot else depth_block(plan, rows, units, warps)
    return s.but(block_p=rows, block_r=units, block_k=k, warps=warps)


def moves() -> dict[str, RecurrentMove]:
    """Kind of action to the move that carries it out."""
    return {
        "tiling": Tiling(),
        "split": Split(),
        "pipeline": Pipeline(),
        "precision": Precision(),
        "special": Special(),
    }


__all__ = ["Pipeline", "Precision", "Special", "Split", "Tiling", "moves"]
