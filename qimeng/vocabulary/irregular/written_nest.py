"""A region with writes of rows by index as a loop nest: each element asks a table which row was written there last.

What makes the rows, and what reads the result, is computed where it is needed. Deals in regions and expressions. Knows
nothing about schedules, or about how a table is filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from qimeng.coder.template.families.tile.plan import TilePlan, cut_nest
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.ir import Source
from qimeng.coder.template.nest.loads import find_loads
from qimeng.coder.template.rules.base import operand, out_dtype
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.regions import check_region, nest_of
from qimeng.coder.template.rules.reindex import at, index, integer
from qimeng.coder.template.rules.shapes import size_of
from qimeng.coder.template.rules.table import RULES
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import Value, row_major
from qimeng.graph.region import Region
from qimeng.vocabulary.irregular.written import Table, arguments, chosen, table_of

TABLE = 1 << 10
"""The port of an operator under which its table is loaded; no operator has as many results."""


@dataclass(frozen=True, eq=False)
class WritePlan(TilePlan):
    """A region as rows and columns, and the tables that it reads.

    Attributes:
        tables: by the number of the source that each is.
    """

    tables: Mapping[int, Table]


def plan_writes(region: Region) -> WritePlan:
    """The plan of `region`.

    Raises:
        NotConcerned: nothing is written by index, or so few rows that another family compares them.
        Unsupported: no template covers it, or the index is computed in the region itself.
    """
    found = [t for n in region.ops if (t := table_of(region.graph, n)) is not None]
    if not found:
        raise NotConcerned("no rows are written by index")
    check_region(region)
    loads, tables = find_loads(region), dict[int, Table]()
    values, names = dict(loads.values), dict(loads.names)
    for table in found:
        for i in table.indices:
            if i.value not in values:
                raise Unsupported("a write by an index that is computed in the same region")
        number = len(values)
        tables[number], names[number] = table, f"last{number}"
        source = Source(number, row_major(table.shape), table.shape, "int32")
        values[Value(table.node.name, TABLE)] = source
    loads = replace(loads, values=values, names=names)
    by_node = {t.node.name: (t, values[Value(t.node.name, TABLE)]) for t in found}
    rules = {name: partial(_write, by_node, name) for name in ("aten.index_put", "aten.scatter")}
    plan = cut_nest(region, *nest_of(region, rules=RULES | rules, loads=loads))
    return WritePlan(**{f.name: getattr(plan, f.name) for f in fields(plan)}, tables=tables)


def _write(found: Mapping[str, tuple[Table, Source]], name: str, b: Builder, node: Any, *args: Any, **kw: Any) -> Expr:
    """The rule of an operator that writes; that of all families where it has no table."""
    if node.name not in found:
        made: Expr = RULES[name](b, node, *args, **kw)
        return made
    table, source = found[node.name]
    given = arguments(replace(node, args=args, kwargs=tuple(kw.items())))
    assert given is not None
    return (_index_put if name == "aten.index_put" else _scatter)(b, node, table, b.load(source), given)


def _index_put(b: Builder, node: Any, table: Table, last: Expr, given: Mapping[str, Any]) -> Expr:
    """`x` with `source` where the indices say; its dimensions stand in place of those that are indexed."""
    x, source = given["x"], given["source"]
    first, rank, count = chosen(given)[0][0], len(x.dims), len(table.shape)
    behind = rank - first - count
    hit, number = _hit(b, last), _number(b, last)
    missing = first + len(table.every) + behind - len(source.dims)
    if missing < 0:
        raise Unsupported("rows of more dimensions than they are written into")
    source = b.redim(source, [*[()] * missing, *source.dims])
    inner = row_major(table.every)
    for d in reversed(range(len(table.every))):
        into = last.dims if d == 0 else ()
        place = integer(b, "idiv", number, inner[d]) if inner[d] > 1 else number
        place = integer(b, "imod", place, table.every[d]) if d else place
        source = at(b, source, first + d, into, place, hit)
    return _chosen(b, node, x, source, b.redim(hit, [*[()] * first, *last.dims, *[()] * behind]))


def _scatter(b: Builder, node: Any, table: Table, last: Expr, given: Mapping[str, Any]) -> Expr:
    """`x` with elements of `source`, whose number along `dim` the table says; they lie as in `x` along the others."""
    x, source = given["x"], given["source"]
    d = given["dim"] % len(x.dims)
    if len(table.shape) < len(x.dims):
        last = b.redim(last, [last.dims[0] if i == d else () for i in range(len(x.dims))])
    hit, number = _hit(b, last), _number(b, last)
    if isinstance(source, Expr):
        for i in (i for i in range(len(x.dims)) if i != d and size_of(b, source, i) != size_of(b, x, i)):
            source = at(b, source, i, [x.dims[i]], index(b, x.dims[i]), hit)
        source = at(b, source, d, [last.dims[d]], number, hit)
    return _chosen(b, node, x, source, hit)


def _hit(b: Builder, last: Expr) -> Expr:
    return b.pw("gt", last, 0, dtype="bool")


def _number(b: Builder, last: Expr) -> Expr:
    return integer(b, "sub", last, 1)


def _chosen(b: Builder, node: Any, x: Expr, source: Any, hit: Expr) -> Expr:
    dtype = out_dtype(node)
    return b.pw("where", hit, operand(b, source, dtype), operand(b, x, dtype), dtype=dtype)


__all__ = ["WritePlan", "plan_writes"]
