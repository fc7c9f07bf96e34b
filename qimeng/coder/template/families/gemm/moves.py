"""The tunings of the gemm family.

Deals in schedules: each move is a pure function. Knows nothing about kernel text; whether a schedule fits the device is
checked by whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.staging import holds_planes, stageable
from qimeng.coder.template.families.gemm.sweeps import has_tma, schedule_for_precision
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.family import MAX_ALTERNATIVES, Move

GemmMove = Move[GemmPlan, GemmSchedule]
Found = tuple[GemmSchedule, ...]
Tiled = TypeVar("Tiled", bound=GemmSchedule)

LEAST, MOST = 16, 256
"""The least and the largest side and depth of a tile that are tried."""


def resized(schedule: Tiled, param: str) -> list[Tiled]:
    """`schedule` with tiles of twice the rows, columns or depth, or of half of one of them; none for other options."""
    s = schedule
    return {
        "taller": [s.but(block_m=s.block_m * 2)],
        "wider": [s.but(block_n=s.block_n * 2)],
        "deeper": [s.but(block_k=s.block_k * 2)],
        "smaller": [s.but(block_m=s.block_m // 2), s.but(block_n=s.block_n // 2), s.but(block_k=s.block_k // 2)],
    }.get(param, [])


class Tiling(GemmMove):
    """Twice or half the tile along one side or more, with warps to match."""

    def schedules(self, plan: GemmPlan, schedule: GemmSchedule, param: str, device: Device) -> Found:
        """Steps of two in the direction of `param`, each with 4 and 8 warps."""
        s = schedule
        more = {
            "deeper": [s.but(block_k=s.block_k * 2, stages=max(2, s.stages - 1))],
            "larger": [s.but(block_m=s.block_m * 2, block_n=s.block_n * 2, warps=min(8, s.warps * 2))],
        }
        found = [*resized(s, param), *more.get(param, [])]
        found += [c.but(warps=w) for c in list(found) for w in (4, 8) if w != c.warps]
        return _others(s, [c for c in found if all(LEAST <= b <= MOST for b in (c.block_m, c.block_n, c.block_k))])


class Reordering(GemmMove):
    """Tiles in groups of rows, so that neighbours share operands in L2, or row by row."""

    def schedules(self, plan: GemmPlan, schedule: GemmSchedule, param: str, device: Device) -> Found:
        """Group heights 4, 8, 16 and 32, or 1."""
        return _others(schedule, [schedule.but(group_m=g) for g in ((1,) if param == "plain" else (4, 8, 16, 32))])


class Pipeline(GemmMove):
    """Other depths of the pipeline, other numbers of warps."""

    def schedules(self, plan: GemmPlan, schedule: GemmSchedule, param: str, device: Device) -> Found:
        """Depths of 2 to 5 (a single stage overlaps nothing), warps from 2 to 16."""
        s = schedule
        if param == "warps":
            return _others(s, [s.but(warps=w) for w in (2, 4, 8, 16)])
        return _others(s, [s.but(stages=n) for n in (2, 3, 4, 5)])


class Precision(GemmMove):
    """Another scheme for fp32 operands, in tiles that suit it."""

    def check(self, plan: GemmPlan, schedule: GemmSchedule, param: str, device: Device, mode: str) -> None:
        """Single-product forms only where eager takes TF32 (`qimeng.graph.ops.TF32`); fp32 operands only.

        That is in mode ``high``, and for convolutions in mode ``default`` too.
        """
        if plan.dtype != "float32":
            raise IllegalAction(f"precision is a choice for float32 operands, these are {plan.dtype}")
        if param in ("tf32", "fp16") and plan.mode(mode) != "high":
            raise IllegalAction(f"{param} keeps 11 bits of 24; mode {mode!r} asks for fp32 (mode 'high' allows it)")
        if device.tf32_tflops <= device.fp32_tflops and param != "ieee":
            raise IllegalAction(f"{device.name} has no faster rate for {param}")

    def probe(self, plan: GemmPlan, schedule: GemmSchedule, param: str, device: Device) -> Found:
        """The present tiles with the other scheme."""
        return () if schedule.precision == param else (schedule.but(precision=param),)

    def schedules(self, plan: GemmPlan, schedule: GemmSchedule, param: str, device: Device) -> Found:
        """The sweep of that scheme's tiles."""
        return schedule_for_precision(plan, schedule, param, device)


class Layout(GemmMove):
    """Operands packed beforehand or not, read through tensor descriptors or by pointers.

    A convolution's input is copied channels last, with its padding. Triton has compiled convolutions of windows wrongly
    at 8 warps in places (github.com/triton-lang/triton/issues/1254); the judge checks each result.
    """

    def check(self, plan: GemmPlan, schedule: GemmSchedule, param: str, device: Device, mode: str) -> None:
        """Windows are not packed one by one, and not read through descriptors."""
        windows = [side for side in plan.sides if side.computed]
        reason = stageable(plan)
        if param == "pack" and windows and not plan.packable and reason is not None:
            times = max(side.repeats for side in windows)
            raise IllegalAction(f"a copy of each window would be {times:.3g} times their tensor; {reason}")
        if param == "descriptors" and len(windows) == len(plan.sides):
            raise IllegalAction("descriptors read neighbouring rows, and both operands are read at computed positions")

    def schedules(self, plan: GemmPlan, schedule: GemmSchedule, param: str, device: Device) -> Found:
        """Set or clear `packed`, `staged` and `descriptors`; the main loop splits windows whose copy held planes."""
        read = "a" if stageable(plan) is None and holds_planes(plan, schedule) else ""
        new = {
            "pack": schedule.but(packed=plan.packable, staged=stageable(plan) is None),
            "unpack": schedule.but(packed="", inline=read + schedule.inline, staged=False, shifted=False),
            "descriptors": schedule.but(descriptors=has_tma(device)),
            "pointers": schedule.but(descriptors=False),
        }[param]
        return _others(schedule, [new])


class Split(GemmMove):
    """More or fewer programs along the depth."""

    def schedules(self, plan: GemmPlan, schedule: GemmSchedule, param: str, device: Device) -> Found:
        """2, 4 or 8 times as many, at most one a step; or a half or a quarter."""
        s = schedule
        if param not in ("more", "fewer"):
            return ()
        counts = [s.splits * 2, s.splits * 4, s.splits * 8] if param == "more" else [s.splits // 2, s.splits // 4]
        depth = plan.shape[3]
        return _others(s, [s.but(splits=c) for c in counts if 1 <= c <= max(1, depth // s.block_k)])


def _others(schedule: GemmSchedule, found: Iterable[GemmSchedule]) -> Found:
    """The first of `found`, without `schedule` itself and each once."""
    return tuple(dict.fromkeys(s for s in found if s != schedule))[:MAX_ALTERNATIVES]


def moves() -> dict[str, GemmMove]:
    """Kind of action to the move that carries it out."""
    return {
        "tiling": Tiling(),
        "reordering": Reordering(),
        "pipeline": Pipeline(),
        "precision": Precision(),
        "layout": Layout(),
        "split": Split(),
    }


__all__ = ["Layout", "Pipeline", "Precision", "Reordering", "Split", "Tiling", "moves", "resized"]
