"""How tiles are computed that a scheme's planes do not hold.

Deals in schedules. Knows nothing about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import SCHEMES, scheme_of
from qimeng.coder.template.families.gemm.sweeps import promotion

EXACT_TILE, EXACT_DEPTH = 128, 32
"""Largest side and depth of a tile of the exact form."""


def exact_schedules(plan: GemmPlan, schedule: GemmSchedule) -> tuple[GemmSchedule, ...]:
    """How the exact forms of `schedule` are computed, by level; none where its planes hold all values.

    They read the operands as they are, in pieces of the product's tiles. Reductions of the result are laid out by
    tiles, which are whole then.
    """
    bm, bn = schedule.block_m, schedule.block_n
    if not plan.reductions:
        bm, bn = min(bm, EXACT_TILE), min(bn, EXACT_TILE)
    found = []
    for precision in scheme_of(plan, schedule).exact:
        s = GemmSchedule(block_m=bm, block_n=bn, block_k=min(EXACT_DEPTH, schedule.block_k), stages=3)
        s = s.but(warps=max(4, min(8, bm * bn // 2048)), precision=precision, cat=False, fast=schedule.fast)
        s = s.but(inline="ab" if SCHEMES[precision].splits else "")
        found.append(s.but(promote=promotion(plan, s)))
    return tuple(found)


__all__ = ["exact_schedules"]
