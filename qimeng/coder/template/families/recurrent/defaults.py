"""The schedule that lowering gives a loop over steps, and others worth measuring beside it.

Deals in shapes and capacities. A step takes the time of its multiply-adds, of the weights that are read again, and of
waiting for the other programs; the figures for these are guesses that no measurement has corrected yet. Knows nothing
about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.families.recurrent.plan import RecurrentPlan
from qimeng.coder.template.families.recurrent.schedule import RecurrentSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device

TILE = 32
"""Values of a product's tile that a thread holds."""

GUESSES = 5
"""Schedules that lowering measures beside the plain one."""

CYCLES_A_MS = 1.7e6
"""Cycles of a multiprocessor in a millisecond."""

AHEAD = 4
"""Depth of the pipeline of a loop whose programs do not wait."""

WAIT_CYCLES, WAIT_EACH, AGAIN_BYTES = 2500, 8, 32
"""Cycles of one exchange, more for each program that takes part, and bytes of weights that an SM reads in a cycle."""

LANES_CYCLES, READ_CYCLES = 600, 2
"""Cycles of a product whose terms the lanes of a warp share, for shuffles and for what all of them compute; and those
of a warp that reads a term for each of its results."""


def default_schedule(plan: RecurrentPlan, device: Device) -> RecurrentSchedule:
    """The one with the shortest steps by the figures above."""
    return candidates(plan, device)[0]


def guesses(plan: RecurrentPlan, device: Device) -> list[RecurrentSchedule]:
    """The next best ones."""
    return candidates(plan, device)[1 : GUESSES + 1]


def candidates(plan: RecurrentPlan, device: Device) -> list[RecurrentSchedule]:
    """Every cut whose programs run at the same time, the best guess first."""
    if not plan.exchanged:
        return apart(plan)
    found = []
    for p in (1, 2, 4, 8, 16):
        if p > power_of_two(plan.row_count):
            break
        groups = -(-plan.row_count // p)
        for shift in range(power_of_two(plan.column_count).bit_length()):
            r = power_of_two(plan.column_count) >> shift
            shares = -(-plan.column_count // r)
            if shares == 1 or groups * shares <= device.sms:
                for warps in (4, 8):
                    s = RecurrentSchedule(block_p=p, block_r=r, block_k=depth_block(plan, p, r, warps), warps=warps)
                    found += [s, s.but(by_result=True)]
    ranked = sorted(found, key=lambda s: cycles(plan, s, device.sms))
    by_result, shared = ([s for s in ranked if s.by_result is form] for form in (True, False))
    held = by_result[0].holds(len(plan.products), plan.column_count)  # else weights are read anew, for each lane
    forms = (by_result, shared) if held else (shared, by_result)
    return [s for pair in zip(*forms, strict=True) for s in pair]  # by turns, as the figures are guesses


def apart(plan: RecurrentPlan) -> list[RecurrentSchedule]:
    """Cuts of a loop whose elements do not meet: few elements a program, what they read loaded ahead."""
    found = []
    for elements, warps in ((128, 4), (64, 2), (256, 4), (32, 1), (512, 4)):
        r = min(power_of_two(plan.column_count), elements)
        p = min(power_of_two(plan.row_count), elements // r)
        found.append(RecurrentSchedule(block_p=p, block_r=r, block_k=1, warps=warps, stages=AHEAD))
    return list(dict.fromkeys(found))


def depth_block(plan: RecurrentPlan, block_p: int, block_r: int, warps: int) -> int:
    """The longest part of a row of states that a product takes at once."""
    most = max(TILE * 32 * warps // (block_p * block_r), 1)
    return min(power_of_two(plan.column_count), 1 << (most.bit_length() - 1))


def cycles(plan: RecurrentPlan, s: RecurrentSchedule, sms: int = 132) -> float:
    """A guess at the cycles of a step on a GPU of `sms` multiprocessors."""
    shares, groups = -(-plan.column_count // s.block_r), -(-plan.row_count // s.block_p)
    waves = max(1.0, groups * shares / sms) if plan.exchanged else 1.0
    weights = len(plan.products) * s.block_r * plan.column_count
    rate = 32 * min(s.warps, 4)
    again = 0.0 if s.holds(len(plan.products), plan.column_count) else weights * plan.itemsize / AGAIN_BYTES
    reads = len(plan.exchanged) * s.block_p * s.block_r * plan.column_count / 32
    adding = READ_CYCLES * reads if s.by_result else LANES_CYCLES * len(plan.products)
    wait = WAIT_CYCLES + WAIT_EACH * shares if shares > 1 and plan.exchanged else WAIT_CYCLES / 4
    return waves * (weights * s.block_p / rate + again + adding) + wait


__all__ = ["CYCLES_A_MS", "GUESSES", "apart", "candidates", "cycles", "default_schedule", "depth_block", "guesses"]
