"""A region as rows and columns: a tile of a kernel has some rows, and walks their columns.

Deals in axes and extents. Knows nothing about schedules, kernel text or about which axes a family makes columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from qimeng.coder.template.nest.ir import Nest, coalesce
from qimeng.coder.template.nest.loads import Loads
from qimeng.graph.region import Region

Group = tuple[tuple[int, ...], int]
"""Coalesced axes, outermost first, and their extent."""


@dataclass(frozen=True, eq=False)
class RowPlan:
    """A region as rows and columns.

    Attributes:
        region: the region.
        nest: its loop nest.
        loads: how its inputs reach the kernels.
        rows: groups of kept axes, outermost first.
        columns: groups of reduced or ordered axes, or, without any, the innermost kept ones.
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


MOST_REPEATS = 4
"""A reduction may be computed so many times over where its result is broadcast along axes that it does not have."""


def memory_of(nest: Nest, rows: Sequence[Group], columns: Sequence[Group]) -> tuple[int, int, str, int]:
    """The fields `full`, `tensors`, `contiguous` and `itemsize` of the plan with these rows and columns."""
    moved = any(e.access for e in nest.exprs)
    accesses = sorted(nest.accesses(), key=lambda a: -a[1])
    inside = {a for g, _ in columns for a in g}
    full = sum(bool({a for d in e.dims for a in d} & inside) for e, *_ in nest.outputs)
    contiguous, itemsize = "r", 4
    if accesses:
        steps, size = accesses[0]
        itemsize = size // nest.axes.extent(steps)
        nearest = min(steps, key=lambda a: (steps[a], moved and a in inside), default=None)
        contiguous = "r" if nearest in inside or not rows else "p"
    tensors = sum(1 for s, _ in accesses if inside & set(s)) or 1
    return full, tensors, contiguous, itemsize


def groups_of(nest: Nest, atoms: Sequence[int]) -> list[Group]:
    """`atoms`, outermost first, coalesced."""
    return [(tuple(g), nest.axes.extent(g)) for g in coalesce(nest, atoms)]


__all__ = ["MOST_REPEATS", "Group", "RowPlan", "groups_of", "memory_of"]
