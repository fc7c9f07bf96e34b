"""The main loop of a product with one row and a weight in four bits, without tensor cores.

Codes are widened and multiplied in registers, in the order in which they lie in memory, so that each thread reads 16
bytes of neighbours and nothing is passed through shared memory but the row. The products of a group are added, then
multiplied by its scale. A program takes few columns of the result and much of their depth at once, so that all bytes
are on their way from the beginning. The row is loaded before the codes: of two operands, Triton 3.6 moves the one that
is loaded first to where the other one lies. Deals in lines of kernel text. Knows nothing about which schedules are
good.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.coder.template.families.gemm.frame import steps_of
from qimeng.coder.template.families.gemm.loop import indent
from qimeng.coder.template.families.gemm.operand import Operand


def direct_loop(left: Operand, codes: Sequence[str], scales: str, group: int) -> list[str]:
    """Lines that leave the tile's product in `acc`, [1, BN].

    Args:
        left: the row.
        codes: lines that leave the codes `b_both` [BN, BK / 2, 2] of the step at depth `k`.
        scales: the load of the scales [BN, groups] of that step.
        group: codes that share a scale.
    """
    plan, s = left.plan, left.schedule
    groups, steps = max(s.block_k // group, 1), steps_of(plan, s)
    low, high, lines = "0", str(steps), list[str]()
    if s.splits > 1:
        per = -(-steps // min(s.splits, steps))
        lines, low, high = [f"low = part * {per}", f"high = tl.minimum(low + {per}, {steps})"], "low", "high"
    step = [
        "k = i * BK",
        *left.fetch("a0", "k"),
        *codes,
        "b_products = tl.reshape(b_both, [BN, BK]).to(tl.float32) * a0.to(tl.float32)",
        f"b_sums = tl.sum(tl.reshape(b_products, [BN, {groups}, BK // {groups}]), axis=2)",
        f"sums += b_sums * {scales}",
    ]
    return [
        *lines,
        "b_n = col0 + tl.arange(0, BN)[:, None]",
        f"sums = tl.zeros([BN, {groups}], tl.float32)",
        f"for i in range({low}, {high}):",
        *indent(step),
        "acc = tl.reshape(tl.sum(sums, axis=1), [1, BN])",
    ]


__all__ = ["direct_loop"]
