"""One pass over the columns: one that finishes reductions, one that stores what changes along them.

Deals in loops and in what may be computed before them. Knows nothing about forms.
"""

from __future__ import annotations

from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.row_pieces import Pieces

UNROLLED = 64
"""Most steps of one column that are written out, so that their loads do not wait for one another."""


def reduce_pass(p: Pieces, em: Emitter, level: int, columns: list[str], low: str, high: str) -> list[str]:
    """One pass over the columns that finishes the reductions of `level`."""
    accs = p.accumulators(level)
    for e, _ in accs:
        hoist(p, em, e.args[0])
    lines = p.flush(em)
    outside = dict(em.names)
    for _, acc in accs:
        lines += acc.start()
    for e, acc in accs:
        x = em.value(e.args[0])
        em.lines += acc.take(x, em.masks.get("r", ""), p.index(em, e))
    lines += loop(p, columns, p.flush(em), low, high)
    em.names = outside
    for e, acc in accs:
        lines += acc.collapse()
        p.define(em, e, acc)
    return lines


def output_pass(p: Pieces, em: Emitter, columns: list[str], low: str, high: str) -> list[str]:
    """One pass over the columns that stores the outputs which change along them."""
    if not p.full_outputs:
        return []
    for i in p.full_outputs:
        hoist(p, em, p.nest.outputs[i][0])
    lines = p.flush(em)
    for i in p.full_outputs:
        em.store(i)
    return lines + loop(p, columns, p.flush(em), low, high)


def store_rows(p: Pieces, em: Emitter) -> list[str]:
    """Store the outputs that do not change along the columns."""
    for i in p.row_outputs:
        em.store(i, sides="p")
    return p.flush(em)


def hoist(p: Pieces, em: Emitter, e: Expr) -> bool:
    """Print the parts of `e` that do not change along the columns and are known; False where one is not yet."""
    if id(e) in em.names:
        return True
    known = all([hoist(p, em, a) for a in e.operands()])
    if not known or e.op in ("reduce", "part", "dot", "scan"):
        return False
    if "r" not in em.side(e) and not _walks_columns(p, em, e):
        em.value(e)
    return True


def _walks_columns(p: Pieces, em: Emitter, e: Expr) -> bool:
    """True where `e` depends on a column axis that a scalar of the loop walks."""
    scalars = {a for w in em.walks if w.side == "" and w.column for a in w.atoms}
    return bool(e.depends & scalars)


def loop(p: Pieces, columns: list[str], body: list[str], low: str, high: str) -> list[str]:
    """`body` for each step from `low` to `high`, pipelined as the schedule says; a few steps of one column unrolled."""
    inside = [f"    {line}" for line in [*columns, *body]]
    if p.RB == 1 and (low, high) == ("0", str(p.steps)) and p.steps <= UNROLLED:
        return [f"for t in tl.static_range({p.steps}):", *inside]
    stages = f", num_stages={p.schedule.stages}" if p.schedule.stages > 1 else ""
    return [f"for t in tl.range({low}, {high}{stages}):", *inside]


__all__ = ["hoist", "loop", "output_pass", "reduce_pass", "store_rows"]
