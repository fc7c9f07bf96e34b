"""How the tile family cuts a nest: which axes are rows and which are columns.

Deals in axes and extents. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from qimeng.coder.template.nest.ir import Nest, by_stride, coalesce
from qimeng.coder.template.nest.loads import Loads, nest_of
from qimeng.coder.template.nest.regions import region_nest
from qimeng.coder.template.triton.special import SPECIAL
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.region import Region

Group = tuple[tuple[int, ...], int]
"""Coalesced axes, outermost first, and their extent."""


@dataclass(frozen=True, eq=False)
class TilePlan:
    """A region as rows and columns.

    Attributes:
        region: the region.
        nest: its loop nest.
        loads: how its inputs reach the kernels.
        rows: groups of kept axes, outermost first.
        columns: groups of reduced axes, or, without reductions, the innermost kept ones.
        passes: passes over the columns before outputs that change along them can be written.
        full: number of outputs that change along the columns.
        tensors: number of tensors of the full size read or written.
        contiguous: ``"r"`` or ``"p"``: the side along which the largest tensor is contiguous.
        itemsize: bytes of an element of the largest tensor.
    """

    region: Region
    nest: Nest
    loads: Loads
    rows: tuple[Group, ...]
    columns: tuple[Group, ...]
    passes: int
    full: int
    tensors: int
    contiguous: str
    itemsize: int

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return prod(e for _, e in self.rows)

    @property
    def column_count(self) -> int:
        """Elements of one row."""
        return prod(e for _, e in self.columns)

    @property
    def dtype(self) -> str:
        """The dtype of the first input."""
        return next((self.region.graph.meta(v).dtype for v in self.region.inputs), "float32")

    @cached_property
    def special(self) -> tuple[str, ...]:
        """Special functions that every element takes in fp32; those of a row's sums take no time."""
        inside = {a for group, _ in self.columns for a in group}
        found = {e.op for e in self.nest.exprs if e.op in SPECIAL and e.dtype != "float64" and e.depends & inside}
        return tuple(sorted(found))


MOST_REPEATS = 4
"""A reduction may be computed so many times over where its result is broadcast along axes that it does not have."""


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
        if nest.dot is not None:
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
    for e in nest.reductions():
        if frozenset(e.reduced) != nest.reduced:
            raise Unsupported("reductions over different axes in one region")
        repeats = nest.axes.extent(nest.kept - e.depends)
        if repeats > MOST_REPEATS:
            raise Unsupported(f"a reduction would be computed {repeats} times over, as its result is broadcast")
    moved = any(e.access for e in nest.exprs)
    if moved:
        _check_outputs(nest)
    rows = _groups(nest, nest.kept)
    columns = _groups(nest, nest.reduced)
    accesses = sorted(nest.accesses(), key=lambda a: -a[1])
    if not columns:
        rows, columns = rows[:-1], rows[-1:]
        while rows and prod(e for _, e in columns) < 64:
            rows, columns = rows[:-1], [rows[-1], *columns]
    inside = {a for g, _ in columns for a in g}
    full = sum(bool({a for d in e.dims for a in d} & inside) for e, *_ in nest.outputs)
    contiguous, itemsize = "r", 4
    if accesses:
        steps, size = accesses[0]
        itemsize = size // nest.axes.extent(steps)
        nearest = min(steps, key=lambda a: (steps[a], moved and a in inside), default=None)
        contiguous = "r" if nearest in inside or not rows else "p"
    tensors = sum(1 for s, _ in accesses if inside & set(s)) or 1
    passes = nest.passes if nest.reduced else 0
    return TilePlan(region, nest, loads, tuple(rows), tuple(columns), passes, full, tensors, contiguous, itemsize)


def _check_outputs(nest: Nest) -> None:
    """Refuse a nest whose outputs are over different positions of one tensor: it would walk all pairs of them."""
    widest = max(nest.axes.extent({a for d in e.dims for a in d} - nest.reduced) for e, *_ in nest.outputs)
    if nest.axes.extent(nest.kept) > MOST_REPEATS * widest:
        raise Unsupported("outputs over different parts of a tensor in one region")


def _groups(nest: Nest, atoms: frozenset[int]) -> list[Group]:
    return [(tuple(g), nest.axes.extent(g)) for g in coalesce(nest, by_stride(nest, atoms))]


__all__ = ["Group", "MOST_REPEATS", "TilePlan", "cut_nest", "plan_tile"]
