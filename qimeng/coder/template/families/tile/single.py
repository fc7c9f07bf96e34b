"""The forms of the tile family in which no program waits for another: a row a program, or a tile a program.

Deals in kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

from qimeng.coder.template.triton.row_passes import output_pass, reduce_pass, store_rows
from qimeng.coder.template.triton.row_pieces import Pieces


def print_single(p: Pieces) -> None:
    """`resident` and `loop`: one program does all of its rows."""
    rows, row_walks = p.rows("tl.program_id(0)")
    resident = p.schedule.form == "resident"
    columns, col_walks = p.columns("0" if resident else "t")
    em = p.emitter(row_walks + col_walks)
    body = list(rows)
    if resident:
        body += columns
        for level in range(1, p.plan.passes + 1):
            for e, acc in p.accumulators(level):
                x = em.value(e.args[0])
                em.lines += acc.whole(x, em.masks.get("r", ""), str(p.plan.column_count), p.index(em, e))
                p.define(em, e, acc)
        for i in p.row_outputs:
            em.store(i, sides="p")
        for i in p.full_outputs:
            em.store(i)
        body += p.flush(em)
    else:
        for level in range(1, p.plan.passes + 1):
            body += reduce_pass(p, em, level, columns, "0", str(p.steps))
        body += store_rows(p, em)
        columns, _ = p.columns(f"{p.steps - 1} - t")  # backwards: what was read last is still in the cache
        body += output_pass(p, em, columns, "0", str(p.steps))
    p.kernel("rows", body, [], str(p.programs))


def print_pointwise(p: Pieces) -> None:
    """No reductions: a program a tile."""
    rows, row_walks = p.rows(f"pid // {p.steps}" if p.programs > 1 else "0")
    columns, col_walks = p.columns(f"pid % {p.steps}" if p.programs > 1 else "pid")
    em = p.emitter(row_walks + col_walks)
    for i in range(len(p.nest.outputs)):
        em.store(i)
    body = ["pid = tl.program_id(0)", *rows, *columns, *p.flush(em)]
    p.kernel("tiles", body, [], str(p.programs * p.steps))


__all__ = ["print_pointwise", "print_single"]
