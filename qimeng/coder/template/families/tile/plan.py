"""How the tile family cuts a nest: which axes are rows and which are columns.

Deals in axes and extents. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from qimeng.coder.template.families.common import special_functions
from qimeng.coder.template.nest.ir import Nest, by_stride
from qimeng.coder.template.nest.loads import Loads
from qimeng.coder.template.nest.rows import MOST_REPEATS, RowPlan, groups_of, memory_of
from qimeng.coder.template.rules.regions import nest_of, region_nest
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.region import Region


@dataclass(frozen=True, eq=False)
class TilePlan(RowPlan):
    """A region as rows and columns; the columns are reduced, or contiguous in memory where nothing is."""

    @cached_property
    def special(self) -> tuple[str, ...]:
        """Special functions that every element takes in fp32; those of a row's sums take no time."""
        return special_functions(self)


def plan_tile(region: Region) -> TilePlan:
    """The plan for `region`, with reductions over different axes made one where that is needed and possible.

    Raises:
        Unsupported: no template covers it; or a matrix product, reductions over different axes, or one whose result is
            broadcast so that it would be computed many times over.
    """
    region, nest, loads = region_nest(region)
    try:
        return cut_nest(region, nest, loads)
    except Unsupported as reason:
        if nest.dot is not None or nest.ordered:
            raise
        try:
            return cut_nest(region, *nest_of(region, joined=True))
        except Unsupported:
            raise reason from None


def cut_nest(region: Region, nest: Nest, loads: Loads) -> TilePlan:
    """The plan for one loop nest of `region`.

    Raises:
        Unsupported: as for `plan_tile`.
    """
    if nest.dot is not None:
        raise NotConcerned("a matrix product is not in the tile family")
    if nest.ordered:
        raise NotConcerned("a scan is not in the tile family")
    for e in nest.reductions():
        if frozenset(e.reduced) != nest.reduced:
            raise Unsupported("reductions over different axes in one region")
        repeats = nest.axes.extent(nest.kept - e.depends)
        if repeats > MOST_REPEATS:
            raise Unsupported(f"a reduction would be computed {repeats} times over, as its result is broadcast")
    if any(e.access for e in nest.exprs):
        _check_outputs(nest)
    rows = groups_of(nest, by_stride(nest, nest.kept))
    columns = groups_of(nest, by_stride(nest, nest.reduced))
    if not columns:
        rows, columns = rows[:-1], rows[-1:]
        while rows and prod(e for _, e in columns) < 64:
            rows, columns = rows[:-1], [rows[-1], *columns]
    passes = nest.passes if nest.reduced else 0
    return TilePlan(region, nest, loads, tuple(rows), tuple(columns), passes, *memory_of(nest, rows, columns))


def _check_outputs(nest: Nest) -> None:
    """Refuse a nest whose outputs are over different positions of one tensor: it would walk all pairs of them."""
    widest = max(nest.axes.extent({a for d in e.dims for a in d} - nest.reduced) for e, *_ in nest.outputs)
    if nest.axes.extent(nest.kept) > MOST_REPEATS * widest:
        raise Unsupported("outputs over different parts of a tensor in one region")


__all__ = ["MOST_REPEATS", "TilePlan", "cut_nest", "plan_tile"]
