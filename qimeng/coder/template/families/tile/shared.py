"""Forms of the tile family in which several programs share a row in one launch.

``wave``: programs take tickets; even ones take the statistics of a tile, odd ones write a tile that lies behind, once
all statistics of its row are there, while the row's data is still in L2. ``cooperative``: a group of programs keeps a
row in registers, each its part, and exchanges statistics; the row is read once. All programs of such a launch run at
the same time, which CUDA guarantees (or refuses) for a cooperative launch, so that none waits for one that cannot
start. Deals in kernel text. Knows nothing about which schedule is good.
"""

from __future__ import annotations

from qimeng.coder.template.families.tile.partials import partial_loads, partial_stores, workspaces
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.triton.emitter import Emitter
from qimeng.coder.template.triton.row_pieces import Pieces
from qimeng.family import Unsupported

REGISTERS = 65536
"""32-bit registers of a multiprocessor (every CUDA GPU since compute capability 3.7)."""

PROCESSORS = """
def _processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
"""
"""Number of multiprocessors; 1 where there are none (Triton's interpreter)."""

TOGETHER = """
def _together(device):
    if device.type == "cpu":
        raise ValueError("programs of this kernel wait for each other; Triton's interpreter runs them one by one")
"""
"""Refuses the interpreter, where the first program would wait for ever."""


def print_shared_row(printer: Pieces) -> None:
    """Print the kernel of a ``wave`` or ``cooperative`` schedule, and its launch.

    Raises:
        Unsupported: more than one pass of reductions, or no output along the row.
    """
    form = printer.schedule.form
    if any(e.access for e in printer.nest.exprs):
        raise Unsupported(f"reads at computed positions in the {form} form")
    if printer.plan.passes != 1 or not printer.full_outputs:
        raise Unsupported(f"the {form} form is for one pass of reductions with outputs along the row")
    if form == "wave":
        _wave(printer)
    else:
        _cooperative(printer)


def _schedule(p: Pieces) -> TileSchedule:
    """The schedule, which has the fields of these forms."""
    assert isinstance(p.schedule, TileSchedule)
    return p.schedule


def _wave(p: Pieces) -> None:
    """One launch: even tickets take statistics of a tile, odd ones write the tile `lag` tiles behind."""
    splits, tiles = p.steps, p.programs * p.steps
    lag = min(splits - 1 + max(_schedule(p).lag, 1), tiles)
    names = workspaces(p, _slots(p))
    p.launches.append(f"flags_ptr = torch.zeros({p.programs + 1}, dtype=torch.int32, device=DEVICE)")
    first_rows, row_walks = p.rows(f"tile // {splits}")
    first_columns, col_walks = p.columns(f"tile % {splits}")
    em = p.emitter(row_walks + col_walks)
    em.load_hint = ', eviction_policy="evict_last"'
    statistics = [*first_rows, *first_columns, f"split = tile % {splits}", *_statistics(p, em)]
    statistics += _publish(f"tile // {splits}")
    em = p.emitter(row_walks + col_walks)
    em.load_hint, em.letter = ', eviction_policy="evict_first"', "u"
    whole = [e for e in _tiles(p, em) if e.depends >= {a for w in col_walks for a in w.atoms}]
    if len(whole) == 1:  # loaded before the wait, which is over at once as a rule, but takes as long as a load
        em.value(whole[0])  # two would fill the registers
    outputs = [*first_rows, *first_columns, f"split = tile % {splits}", *p.flush(em)]
    outputs += [*_await(f"tile // {splits}", splits), *partial_loads(p, em, 1, _slots(p)), *_stores(p, em)]
    body = [
        "ticket = tl.atomic_add(flags_ptr, 1)",
        "tile = ticket // 2",
        "if ticket % 2 == 0:",
        f"    if tile < {tiles}:",
        *[f"        {line}" for line in statistics],
        "else:",
        f"    tile = tile - {lag}",
        "    if tile >= 0:",
        *[f"        {line}" for line in outputs],
    ]
    limit = f", maxnreg={_registers(p)}" if _schedule(p).per_sm > 1 else ""
    p.kernel("wave", body, [*names, "flags_ptr"], str(2 * (tiles + lag)), limit)


def _cooperative(p: Pieces) -> None:
    """One launch of as many groups as fit the device at once; each group takes rows in turn.

    How many they are is not passed: a kernel is compiled anew for some numbers, and it is compiled before the device is
    asked. What does not change from row to row is loaded once. With two stages the tiles of the group's next row are
    loaded before this one's statistics are waited for.
    """
    splits, ahead = p.steps, _schedule(p).stages > 1
    names = workspaces(p, _slots(p))
    p.helpers.append(PROCESSORS)
    if splits > 1:
        p.helpers.append(TOGETHER)
        p.launches.append("_together(DEVICE)")
    fit = f"{_schedule(p).per_sm} * _processors(DEVICE) // {splits}"
    p.launches.append(f"groups = max(1, min({p.programs}, {fit}))")
    p.launches.append(f"flags_ptr = torch.zeros({p.programs + 1}, dtype=torch.int32, device=DEVICE)")
    first_rows, row_walks = p.rows(f"pid // {splits}")
    rows, next_rows = p.rows("row_block")[0], p.rows(f"tl.minimum(row_block + groups, {p.programs - 1})")[0]
    columns, col_walks = p.columns("split")
    if p.edges:  # where a row's columns begin is the row's
        rows, next_rows = rows + columns, next_rows + columns
    em, following = p.emitter(row_walks + col_walks), p.emitter(row_walks + col_walks)
    em.load_hint = following.load_hint = ', eviction_policy="evict_first"'
    following.letter = "n"
    tiles = _tiles(p, em)
    moving = [e for e in tiles if e.depends & {a for w in row_walks for a in w.atoms}]
    for e in tiles if ahead else [e for e in tiles if e not in moving]:
        em.value(e)
    before = p.flush(em)
    each = [*rows, *_statistics(p, em), *_publish("row_block")]
    if ahead:
        for e in moving:
            following.value(e)
        each += [*next_rows, *p.flush(following), *rows]
    each += [*_await("row_block", splits), *partial_loads(p, em, 1, _slots(p)), *_stores(p, em)]
    if ahead:
        each += [f"{em.value(e)} = {following.value(e)}" for e in moving]
    body = [
        "pid = tl.program_id(0)",
        f"groups = tl.num_programs(0) // {splits}",
        f"split = pid % {splits}",
        *first_rows,
        *columns,
        *before,
        f"for row_block in tl.range(pid // {splits}, {p.programs}, groups):",
        *[f"    {line}" for line in each],
    ]
    together = "" if splits == 1 else f", maxnreg={_registers(p)}, launch_cooperative_grid=True"
    p.kernel("group", body, [*names, "flags_ptr"], f"groups * {splits}", together)


def _registers(p: Pieces) -> int:
    """Most registers a thread with which as many programs run on a multiprocessor as the schedule says."""
    return min(REGISTERS // (32 * _schedule(p).warps * _schedule(p).per_sm) // 8 * 8, 248)


def _tiles(p: Pieces, em: Emitter) -> list[Expr]:
    """The loads that change along a row."""
    return [e for e in p.nest.exprs if e.op == "load" and not p.nest.sources[e.param].scalar and "r" in em.side(e)]


def _slots(p: Pieces) -> int:
    """Partial results of a row: one a program, and one of its edge."""
    return p.steps + (1 if p.edges else 0)


def _statistics(p: Pieces, em: Emitter) -> list[str]:
    """Reduce the tile at hand and store the partial results."""
    accumulators = p.accumulators(1)
    for e, acc in accumulators:
        x = em.value(e.args[0])
        em.lines += acc.whole(x, em.masks.get("r", ""), "inside", p.index(em, e))
    lines = [f"inside = {p.inside('split')}", *p.flush(em), *partial_stores(p, accumulators, 1, _slots(p))]
    if p.edges:
        edge, accumulators = p.edges.emitter(em), p.accumulators(1, "h")
        for e, acc in accumulators:
            x = edge.value(e.args[0])
            edge.lines += acc.whole(x, "e_mask", f"({p.edges.columns} - main)", p.index(edge, e))
        found = [*p.flush(edge), *partial_stores(p, accumulators, 1, _slots(p), str(p.steps))]
        lines += _first(p.edges.narrow([*p.edges.lanes(), *found]))
    return lines


def _first(lines: list[str]) -> list[str]:
    """Lines for the first of the programs that share a row."""
    return ["if split == 0:", *[f"    {line}" for line in lines]]


def _publish(row: str) -> list[str]:
    """Say that this program's partial results of `row` are stored."""
    return ["tl.debug_barrier()", f'tl.atomic_add(flags_ptr + 1 + {row}, 1, sem="release")']


def _await(row: str, splits: int) -> list[str]:
    """Wait until all partial results of `row` are stored."""
    ask = f'tl.atomic_add(flags_ptr + 1 + {row}, 0, sem="acquire")'
    return [f"done = {ask}", f"while done < {splits}:", f"    done = {ask}", "tl.debug_barrier()"]


def _stores(p: Pieces, em: Emitter) -> list[str]:
    """Store every output of the tile at hand."""
    for i in p.row_outputs:
        em.store(i, sides="p")
    for i in p.full_outputs:
        em.store(i, hint=', eviction_policy="evict_first"')
    lines = p.flush(em)
    if p.edges:
        edge = p.edges.emitter(em)
        for e, acc in p.accumulators(1):
            p.define(edge, e, acc)
        for i in p.full_outputs:
            edge.store(i)
        lines += _first(p.edges.narrow([*p.edges.lanes(), *p.flush(edge)]))
    return lines


__all__ = ["print_shared_row"]
