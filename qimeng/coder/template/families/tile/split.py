"""The form of the tile family in which several programs share a row, one launch a pass.

Each program reduces its part of the row's steps and stores partial results; the next launch combines them. Deals in
kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

from dataclasses import replace

from qimeng.coder.template.families.tile.partials import partial_loads, partial_stores, workspaces
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.row_passes import output_pass, reduce_pass, store_rows
from qimeng.coder.template.triton.row_pieces import Pieces

FLAT = 8
"""Steps of the outputs, for each program of a split row, from which they get a program each instead of a loop: stores
stream faster from many short programs, at one more launch. On an H200 copies reach 4.3 TB/s; batch norm's outputs in a
loop took what 3.8 TB/s take, if its first pass read at 4.5 (KernelBench 1/33, 3.22 ms; not measured apart)."""


WIDE = 4096
"""Partial results of a block of rows from which on they are combined first, by a program a row. Otherwise each program
that needs them holds all of them in registers: 65,536 for batch norm of 204,800 x 48 in 1,024 parts, which took the
most part of a network's time on an H200 (KernelBench 3/46)."""


def print_split_row(p: Pieces) -> None:
    """Print the kernels of a ``split`` schedule, and their launches: one a level of reductions, one for the outputs.

    Where each program would walk many steps of the outputs, the partial results are combined first, and each step gets
    a program of its own. Where they are many (`WIDE`), they are combined after each level.
    """
    splits = max(1, min(p.schedule.splits, p.steps))
    share = -(-p.steps // splits)
    splits = -(-p.steps // share)
    low, high = f"split * {share}", f"tl.minimum(split * {share} + {share}, {p.steps})"
    names, last = workspaces(p, splits), p.plan.passes
    wide = p.PB > 1 and p.PB * power_of_two(splits) > WIDE
    parts = (1, "c") if wide else (splits, "w")  # what later kernels read of a level
    combined = workspaces(p, 1, "c") if wide else []
    for level in range(1, last + 1):
        rows, row_walks = p.rows(f"pid // {splits}")
        columns, col_walks = p.columns("t")
        em = p.emitter(row_walks + col_walks)
        body = ["pid = tl.program_id(0)", f"split = pid % {splits}", *rows, *_combine(p, em, level - 1, *parts)]
        body += reduce_pass(p, em, level, columns, low, high)
        body += partial_stores(p, p.accumulators(level), level, splits)
        p.kernel(f"pass{level}", body, names + combined, str(p.programs * splits))
        if wide:
            _combined(p, level, splits, names + combined)
    flat = bool(p.full_outputs) and share >= FLAT
    if flat and not wide:
        combined = workspaces(p, 1, "c")
    if not wide and (p.row_outputs or flat):
        rows, row_walks = p.rows("tl.program_id(0)")
        em = p.emitter(row_walks + p.columns("0")[1])
        body = [*rows, *_combine(p, em, last, splits)]
        for level in range(1, last + 1) if flat else ():
            body += partial_stores(p, p.accumulators(level), level, 1, "0", "c")
        p.kernel("finish", body + store_rows(p, em), names + combined, str(p.programs))
    if flat:
        _outputs_by_step(p, combined)
    elif p.full_outputs:
        rows, row_walks = p.rows(f"pid // {splits}")
        columns, col_walks = p.columns("last - t")
        em = p.emitter(row_walks + col_walks)
        body = [_backwards(p, splits), f"split = pid % {splits}", f"last = {low} + {high} - 1", *rows]
        body += _combine(p, em, last, *parts)
        body += output_pass(p, em, columns, low, high)
        p.kernel("outputs", body, names + combined, str(p.programs * splits))


def _combined(p: Pieces, level: int, splits: int, names: list[str]) -> None:
    """Combine the partial results of a level, a program a row; after the last one, store the rows' outputs."""
    assert isinstance(p.schedule, TileSchedule)
    one = replace(p, schedule=p.schedule.but(block_p=1))  # prints into the same lists
    rows, row_walks = one.rows("tl.program_id(0)")
    em = one.emitter(row_walks + one.columns("0")[1])
    last = level == p.plan.passes
    body = [*rows, *_combine(one, em, level - 1 if last else 0, 1, "c"), *partial_loads(one, em, level, splits)]
    body += partial_stores(one, one.accumulators(level), level, 1, "0", "c")
    one.kernel(f"combine{level}", body + (store_rows(one, em) if last else []), names, str(one.programs))


def _outputs_by_step(p: Pieces, combined: list[str]) -> None:
    """A program a step of each block of rows."""
    if _rows_share(p):  # the rows' tiles at the same columns one after the other
        block, step = f"pid % {p.programs}", f"pid // {p.programs}"
    else:
        block, step = f"pid // {p.steps}", f"pid % {p.steps}"
    rows, row_walks = p.rows(block)
    columns, col_walks = p.columns(step)
    em = p.emitter(row_walks + col_walks)
    body = [_backwards(p, p.steps), *rows, *columns, *_combine(p, em, p.plan.passes, 1, "c")]
    for i in p.full_outputs:
        em.store(i)
    p.kernel("outputs", body + p.flush(em), combined, str(p.programs * p.steps))


def _combine(p: Pieces, em: Emitter, levels: int, splits: int, space: str = "w") -> list[str]:
    """Combine the partial results of the first `levels` levels."""
    return [line for level in range(1, levels + 1) for line in partial_loads(p, em, level, splits, space)]


def _backwards(p: Pieces, parts: int) -> str:
    """Number the programs, `parts` of each block of rows, from the last: what was read last is in the cache."""
    return f"pid = {p.programs * parts - 1} - tl.program_id(0)"


def _rows_share(p: Pieces) -> bool:
    """True where an input as long as a row is the same for several rows, so that they should not lie far apart."""
    columns, rows = ({a for group, _ in groups for a in group} for groups in (p.plan.columns, p.plan.rows))
    return any(e.op == "load" and columns <= e.depends and not rows <= e.depends for e in p.nest.exprs)


__all__ = ["print_split_row"]
