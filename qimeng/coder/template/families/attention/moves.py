"""The tunings of the attention family.

Deals in schedules: each move is a pure function. Knows nothing about kernel text; whether a schedule fits the device is
checked by whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterable

from qimeng.coder.template.families.attention.boxes import can_specialize, described
from qimeng.coder.template.families.attention.plan import AttentionPlan
from qimeng.coder.template.families.attention.schedule import LEAST, AttentionSchedule
from qimeng.coder.template.families.attention.sweeps import sweep
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import MAX_ALTERNATIVES, Move

AttentionMove = Move[AttentionPlan, AttentionSchedule]
Found = tuple[AttentionSchedule, ...]

MOST = 256
"""The most queries or keys of a tile that are tried."""

PRECISIONS = ("ieee", "tf32", "tf32x3")
"""How products of fp32 operands can be computed."""


class Tiling(AttentionMove):
    """Twice or half the queries of a program or the keys of a step, with warps to match."""

    def schedules(self, plan: AttentionPlan, schedule: AttentionSchedule, param: str, device: Device) -> Found:
        """Queries are rows, keys are the depth; columns are not cut."""
        s = schedule
        found = {
            "taller": [s.but(block_m=s.block_m * 2)],
            "wider": [],
            "deeper": [s.but(block_n=s.block_n * 2), s.but(block_n=s.block_n * 2, stages=max(1, s.stages - 1))],
            "smaller": [s.but(block_m=s.block_m // 2), s.but(block_n=s.block_n // 2)],
            "larger": [s.but(block_m=s.block_m * 2, block_n=s.block_n * 2, warps=min(8, s.warps * 2))],
        }[param]
        found += [c.but(warps=w) for c in list(found) for w in (4, 8) if w != c.warps]
        return _others(s, [c for c in found if LEAST <= c.block_m <= MOST and LEAST <= c.block_n <= MOST])


class Pipeline(AttentionMove):
    """Other depths of the pipeline, other numbers of warps, or warps of their own that copy."""

    def schedules(self, plan: AttentionPlan, schedule: AttentionSchedule, param: str, device: Device) -> Found:
        """Depths of 1 to 4, warps from 2 to 8, or 4 beside those that copy."""
        s = schedule
        if param == "warps":
            found = [s.but(warps=w, specialize=False) for w in (2, 4, 8)]
            if can_specialize(plan, device):
                found += [s.but(warps=4, descriptors=True, specialize=True, block_n=n) for n in (64, 128)]
            return _others(s, found)
        return _others(s, [s.but(stages=n) for n in (1, 2, 3, 4)])


class Precision(AttentionMove):
    """Another scheme for products of fp32 operands."""

    def check(self, plan: AttentionPlan, schedule: AttentionSchedule, param: str, device: Device, mode: str) -> None:
        """The single product only in mode ``high``; fp32 operands only."""
        if plan.half:
            raise IllegalAction(f"precision is a choice for float32 operands, these are {plan.dtype}")
        if param not in PRECISIONS:
            raise IllegalAction(f"{param} is not among the precisions of an attention: {', '.join(PRECISIONS)}")
        if param == "tf32" and mode != "high":
            raise IllegalAction(f"tf32 keeps 11 bits of 24; mode {mode!r} asks for fp32 (mode 'high' allows it)")
        if device.tf32_tflops <= device.fp32_tflops and param != "ieee":
            raise IllegalAction(f"{device.name} has no faster rate for {param}")

    def schedules(self, plan: AttentionPlan, schedule: AttentionSchedule, param: str, device: Device) -> Found:
        """The present blocks and those of the sweep."""
        if schedule.precision == param:
            return ()
        return _others(schedule, [schedule.but(precision=param), *sweep(plan, schedule, param, device)])


class Layout(AttentionMove):
    """Operands read through tensor descriptors, or by pointers."""

    def check(self, plan: AttentionPlan, schedule: AttentionSchedule, param: str, device: Device, mode: str) -> None:
        """Descriptors where the GPU has them and at least one half operand lies so that one can say where."""
        if param not in ("descriptors", "pointers"):
            raise IllegalAction(f"an attention packs nothing: {param} is not for it")
        if param == "descriptors" and not device.has("descriptors"):
            raise IllegalAction(f"{device.name} copies no tiles by descriptors")
        if param == "descriptors" and not plan.half:
            raise IllegalAction(f"descriptors are for half operands, these are {plan.dtype}")
        if param == "descriptors" and not described(plan):
            raise IllegalAction(
                "descriptors need rows of neighbouring elements that begin at multiples of 16 bytes, and no operand is "
                "such a tensor as it lies in memory"
            )

    def schedules(self, plan: AttentionPlan, schedule: AttentionSchedule, param: str, device: Device) -> Found:
        """Set or clear `descriptors`, with other depths of the pipeline."""
        if param == "pointers":
            return _others(schedule, [schedule.but(descriptors=False, specialize=False)])
        s = schedule.but(descriptors=True)
        return _others(schedule, [s, *(s.but(stages=n) for n in (2, 3, 4))])


class Split(AttentionMove):
    """More or fewer programs that share the keys of a tile of queries."""

    def schedules(self, plan: AttentionPlan, schedule: AttentionSchedule, param: str, device: Device) -> Found:
        """2, 4 or 8 times as many, at most one a step; or a half or a quarter, or one."""
        if param not in ("more", "fewer"):
            return ()
        s, steps = schedule, -(-plan.shape[2] // schedule.block_n)
        counts = [s.splits * 2, s.splits * 4, s.splits * 8] if param == "more" else [s.splits // 2, s.splits // 4, 1]
        return _others(s, [s.but(splits=c) for c in counts if 1 <= c <= steps])


class Special(AttentionMove):
    """Exponentials as powers of two with one multiply-add, other special functions in few instructions, or not."""

    def schedules(self, plan: AttentionPlan, schedule: AttentionSchedule, param: str, device: Device) -> Found:
        """Set or clear `fast`."""
        return _others(schedule, [schedule.but(fast=param == "fast")])


def _others(schedule: AttentionSchedule, found: Iterable[AttentionSchedule]) -> Found:
    """The first of `found`, without `schedule` itself and each once."""
    return tuple(dict.fromkeys(s for s in found if s != schedule))[:MAX_ALTERNATIVES]


def moves() -> dict[str, AttentionMove]:
    """Kind of action to the move that carries it out."""
    return {
        "tiling": Tiling(),
        "pipeline": Pipeline(),
        "precision": Precision(),
        "layout": Layout(),
        "split": Split(),
        "special": Special(),
    }


__all__ = ["PRECISIONS", "Layout", "Pipeline", "Precision", "Special", "Split", "Tiling", "moves"]
