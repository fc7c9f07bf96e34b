"""Rows that are sorted, or of which the first ones of that order are taken: which operators do it, and on what.

Deals in nodes of a graph. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.rules.reductions import MOST_LARGEST
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.graph.region import Region

SORTS = {
    "aten.sort.default": ("dim", "descending"),
    "aten.sort.stable": ("stable", "dim", "descending"),
    "aten.topk.default": ("k", "dim", "largest", "sorted"),
}
"""Operators to the names of their arguments after the rows, by position or by keyword."""

DTYPES = ("float32", "float16", "bfloat16", "int32", "int16", "int8", "uint8", "bool")
"""Dtypes whose order 32 bits hold, so that 64 hold it with the place of an element."""

LONGEST = 4096
"""Elements of a row: a program holds one as a whole, 64 bits each."""


@dataclass(frozen=True, eq=False)
class SortPlan:
    """The order of the elements of rows.

    Attributes:
        meta: of the rows, contiguous.
        dim: along which they lie.
        count: elements of the order that are stored; all of a sort.
        descending: the largest comes first. NaN counts as larger than all else, as in PyTorch.
        outputs: of the region: 0 is the values, 1 the places.
    """

    meta: Meta
    dim: int
    count: int
    descending: bool
    outputs: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements of a row."""
        return self.meta.shape[self.dim]

    @property
    def inner(self) -> int:
        """Elements of memory from one element of a row to the next."""
        return prod(self.meta.shape[self.dim + 1 :])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.meta.numel // self.length

    @property
    def width(self) -> int:
        """Elements that a program holds of a row."""
        return power_of_two(self.length)

    @property
    def kept(self) -> int:
        """The least power of two that is no less than `count`."""
        return power_of_two(self.count)


def plan_sort(region: Region) -> SortPlan:
    """The plan of `region`.

    Raises:
        NotConcerned: it sorts nothing, or takes few enough of the largest that another family finds each by itself.
        Unsupported: it does more than that, or the rows are too long or lie apart.
    """
    found = [n for n in region.ops if n.target in SORTS]
    if not found:
        raise NotConcerned("nothing is sorted")
    if len(region.nodes) != 1:
        raise Unsupported(f"{found[0].packet} with other operators in one region; it is written alone")
    (node,) = found
    given = _arguments(node)
    meta = region.graph.meta(node.operands()[0])
    made = [m for m in node.metas if m is not None]
    if not meta.shape or not meta.numel:
        raise Unsupported("nothing to sort")
    dim = int(given.get("dim", -1)) % len(meta.shape)
    length = meta.shape[dim]
    count, largest = int(given.get("k", length)), bool(given.get("largest", True))
    if is_few(region.graph, node):
        raise NotConcerned(f"the {count} largest, one after another")
    if meta.dtype not in DTYPES:
        raise Unsupported(f"an order of {meta.dtype}: with their places, elements of 64 bits have no room in 64 bits")
    if length > LONGEST:
        raise Unsupported(f"rows of {length} elements; a program holds {LONGEST}")
    if not count:
        raise Unsupported("nothing to sort")
    if not (meta.is_contiguous and all(m.is_contiguous for m in made)):
        raise Unsupported("rows that do not lie side by side in memory")
    descending = largest if "k" in given else bool(given.get("descending", False))
    outputs = tuple(v.port for v in region.outputs)
    if any(v != Value(node.name, v.port) for v in region.outputs):
        raise Unsupported("other results")
    return SortPlan(meta, dim, count, descending, outputs)


def is_few(graph: OpGraph, node: Node) -> bool:
    """Whether `node` takes so few of the largest that the family tile finds each by itself."""
    given = _arguments(node)
    floats = is_float(graph.meta(node.operands()[0]).dtype)
    return "k" in given and floats and int(given["k"]) <= MOST_LARGEST and bool(given.get("largest", True))


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator that sorts, after the rows, by name."""
    return dict(zip(SORTS[node.target], node.args[1:], strict=False)) | dict(node.kwargs)


__all__ = ["LONGEST", "SORTS", "SortPlan", "is_few", "plan_sort"]
