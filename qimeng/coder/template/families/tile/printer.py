"""The tile family as Triton source: pointwise, reductions, softmax-like programs and normalizations.

A program owns a block of rows ([PB, 1]) and walks their columns in steps ([1, RB]). Forms (see `TileSchedule.form`):
``resident`` keeps a whole row in registers; ``loop`` passes over it once a level of reductions and once more for the
outputs; ``split`` (see `split`) does the same with several programs a row and one launch a pass;
``wave`` and ``cooperative`` (see `shared`) share a row in one launch. Deals in kernel text.
Knows nothing about which schedule is good.
"""

from __future__ import annotations

from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.families.tile.shared import print_shared_row
from qimeng.coder.template.families.tile.single import print_pointwise, print_single
from qimeng.coder.template.families.tile.split import print_split_row
from qimeng.coder.template.triton.row_pieces import Pieces
from qimeng.coder.template.triton.row_source import source_of
from qimeng.program.program import Implementation


def print_tile(plan: TilePlan, schedule: TileSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`.

    Args:
        plan: the region as rows and columns.
        schedule: form and block sizes.
        prefix: beginning of every top-level name.

    Raises:
        Unsupported: the schedule's form does not fit the plan.
    """
    p, form = Pieces(plan, schedule, prefix), schedule.form
    if form in ("resident", "loop"):
        print_single(p)
    elif plan.passes == 0:
        print_pointwise(p)
    elif form in ("wave", "cooperative"):
        print_shared_row(p)
    else:
        print_split_row(p)
    return Implementation("triton", source_of(p), f"{prefix}_run", schedule=schedule)


__all__ = ["print_tile"]
