"""A reduction by segment as Triton source.

``sorted`` and ``bucket``: a program walks the rows of its segments through their order, computes each where it is
needed and keeps running sums; ``atomic``: a program computes rows as they come and adds them to sums in memory. Deals
in which of them a schedule asks for.
"""

from __future__ import annotations

import math

from qimeng.family import Unsupported
from qimeng.program.program import Implementation
from qimeng.vocabulary.irregular.atomic import Atomic
from qimeng.vocabulary.irregular.plan import SegmentPlan
from qimeng.vocabulary.irregular.schedules import SegmentSchedule, changes_sums, wants_order
from qimeng.vocabulary.irregular.walked import Walked


def print_segments(plan: SegmentPlan, schedule: SegmentSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`.

    Raises:
        Unsupported: the schedule does not fit the plan.
    """
    if schedule.form == "atomic" and plan.segments.kind not in ("sum", "mean"):
        raise Unsupported(f"atomics for the {plan.segments.kind} of rows")
    if schedule.form != "sorted" and plan.segments.by is None:
        raise Unsupported(f"the form {schedule.form!r} for rows that lie in the order of their segments")
    if changes_sums(plan, schedule.form) and (why := wants_order(plan)):
        raise Unsupported(f"sums in the form {schedule.form!r}, whose order changes from call to call: {why}")
    return (Atomic if schedule.form == "atomic" else Walked)(plan, schedule, prefix).implementation()


def tile_bytes(schedule: SegmentSchedule) -> int:
    """Bytes that a block asks for before it waits: a tile of rows in fp32."""
    return 4 * math.prod((schedule.lanes, schedule.block_r))


__all__ = ["print_segments", "tile_bytes"]
