"""The scan family as Triton source.

A program owns a block of rows ([PB, 1]) and walks their columns in steps ([1, RB]), as in the tile family. Forms (see
`ScanSchedule.form`): ``resident`` keeps a whole row in registers; ``loop`` passes over it once a level of reductions
and once more for the scans, whose last values it carries from step to step; ``split`` shares a row among programs, with
one launch for the totals of their shares and one for the scans. A single pass with decoupled look-back (Merrill and
Garland, 2016) reads a shared row once instead of twice. It is not used: programs wait for each other there, which needs
forward progress that Triton does not promise, and the order of the sums changes from run to run. Deals in kernel text.
Knows nothing about which schedule is good.
"""

from __future__ import annotations

from qimeng.coder.template.families.scan.plan import ScanPlan
from qimeng.coder.template.families.scan.schedule import ScanSchedule
from qimeng.coder.template.families.scan.shares import print_shares
from qimeng.coder.template.families.scan.steps import Steps
from qimeng.coder.template.triton.row_passes import reduce_pass, store_rows
from qimeng.coder.template.triton.row_source import source_of
from qimeng.family import Unsupported
from qimeng.program.program import Implementation


def print_scan(plan: ScanPlan, schedule: ScanSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`.

    Args:
        plan: the region as rows and ordered columns.
        schedule: form and block sizes.
        prefix: beginning of every top-level name.

    Raises:
        Unsupported: the schedule's form does not fit the plan.
    """
    if schedule.form not in plan.forms:
        raise Unsupported(f"the form {schedule.form!r}; this region has {', '.join(plan.forms)}")
    if schedule.backwards and not plan.turns:
        raise Unsupported("backwards, although not all scans begin at the end of one axis")
    steps = Steps(plan, schedule, prefix)
    {"resident": _resident, "loop": _loop, "split": print_shares}[schedule.form](steps)
    return Implementation("triton", source_of(steps.pieces), f"{prefix}_run", schedule=schedule)


def _resident(steps: Steps) -> None:
    """A program holds its rows: reductions and scans in the order in which they need each other."""
    p = steps.pieces
    rows, row_walks = p.rows("tl.program_id(0)")
    columns, col_walks = p.columns("0")
    em = p.emitter(row_walks + col_walks)
    accumulators = {id(e): acc for level in range(1, p.plan.passes + 1) for e, acc in p.accumulators(level)}
    running = {id(r.scan): r for r in steps.running}
    body = [*rows, *columns]
    for e in p.nest.exprs:
        if e.op == "reduce":
            acc = accumulators[id(e)]
            x = em.value(e.args[0])
            whole = acc.whole(x, em.masks.get("r", ""), str(p.plan.column_count), p.index(em, e))
            body += [*p.flush(em), *whole]
            p.define(em, e, acc)
        elif e.op == "scan":
            body += steps.scan(em, running[id(e)], carried=False)
    for i in p.row_outputs:
        em.store(i, sides="p")
    for i in p.full_outputs:
        em.store(i)
    p.kernel("rows", body + p.flush(em), [], str(p.programs))


def _loop(steps: Steps) -> None:
    """A program passes over its rows once a level of reductions, then in the order of the scans."""
    p = steps.pieces
    rows, row_walks = p.rows("tl.program_id(0)")
    columns, col_walks = p.columns("t")
    em = p.emitter(row_walks + col_walks)
    body = list(rows)
    for level in range(1, p.plan.passes + 1):
        body += reduce_pass(p, em, level, columns, "0", str(p.steps))
    body += store_rows(p, em)
    body += [line for r in steps.running for line in r.start()]
    body += steps.output_pass(em, "0", str(p.steps))
    p.kernel("rows", body, [], str(p.programs))


__all__ = ["print_scan"]
