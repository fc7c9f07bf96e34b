"""Which operators reduce rows by segment: what they reduce, how, and where it says which segment a row belongs to.

Reads one node at a time, as it is captured: sums and extremes by index (`index_add`, `scatter_add`, `scatter_reduce`,
`index_reduce`), `segment_reduce`, and bags of a table's rows. Deals in graphs. Knows nothing about regions, schedules
or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import Node, OpGraph, Value

FEW = 8
"""Rows up to which the tile family compares every position with each, which needs no order."""

KINDS = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}
"""Names of reductions in PyTorch to those here."""

DTYPES = ("float32", "float16", "bfloat16")
"""Of what is reduced, in fp32."""

FILLS = ("aten.full", "aten.full_like", "aten.zeros_like", "aten.ones_like")
"""Operators that make a tensor of one number."""

SPREADS = ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze", "aten.expand", "aten.alias")
"""Views that may repeat an index along columns."""

DIFFERS = "a scatter by an index that may differ from column to column"
"""Why a scatter is not covered."""


@dataclass(frozen=True, eq=False)
class Segments:
    """A reduction of rows by segment.

    Where a row belongs is said by one of `by` (any order), `offsets`, `lengths` and `even` (rows of a segment are
    neighbours).

    Attributes:
        node: the operator.
        kind: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        made: what rows are made of: the rows [E, …] themselves, or a table, the numbers [E] of its rows, and perhaps a
            weight [E] for each.
        size: number of rows.
        count: number of segments.
        by: [E]; the segment of each row.
        offsets: [count] or one more; where each segment begins.
        lengths: [count]; rows of each segment.
        even: rows of every segment; 0 where they differ.
        wraps: whether a negative index counts from the end; elsewhere PyTorch refuses it.
        base: [count, …]; what results begin with; None where that is `fill` everywhere.
        fill: a number.
        joins: whether what a segment begins with is reduced with its rows; else only empty segments keep it.
    """

    node: Node
    kind: str
    made: tuple[Value, ...]
    size: int
    count: int
    by: Value | None = None
    offsets: Value | None = None
    lengths: Value | None = None
    even: int = 0
    wraps: bool = False
    base: Value | None = None
    fill: float = 0.0
    joins: bool = True

    @property
    def plain(self) -> bool:
        """Whether a segment is the sum of its rows alone."""
        return self.kind == "sum" and self.base is None and self.fill == 0

    @property
    def gathers(self) -> bool:
        """Whether the operator itself takes its rows from a table."""
        return len(self.made) > 1

    @property
    def place(self) -> Value | None:
        """The tensor that says where rows belong; None where numbers do."""
        return next((v for v in (self.by, self.offsets, self.lengths) if v is not None), None)


def segments_of(graph: OpGraph, node: Node) -> Segments:
    """What `node` reduces.

    Raises:
        NotConcerned: it reduces nothing by segment, or so few rows that the tile family does it.
        Unsupported: it does so in a way that is not covered.
    """
    reader = READERS.get(node.packet)
    if reader is None:
        raise NotConcerned("no reduction by segment")
    if not graph.meta(Value(node.name)).shape:
        raise NotConcerned("a number has no rows")
    found = reader(graph, node)
    meta, out = graph.meta(found.made[0]), graph.meta(Value(node.name))
    if found.by is not None and found.size <= FEW:
        raise NotConcerned(f"a reduction of {found.size} rows needs no order")
    if meta.dtype not in DTYPES or out.dtype not in DTYPES:
        raise Unsupported(f"a reduction by segment of {meta.dtype}; it is made for {', '.join(DTYPES)}")
    if not meta.numel or not out.numel:
        raise Unsupported("an empty tensor")
    return found


def reduces(graph: OpGraph, node: Node) -> bool:
    """Whether `node` reduces rows by segment, covered or not."""
    try:
        segments_of(graph, node)
    except NotConcerned:
        return False
    except Unsupported:
        return True
    return True


def _index_put(graph: OpGraph, node: Node) -> Segments:
    """`index_add` is captured as an `index_put` that accumulates."""
    base, indices, rows = node.args[:3]
    accumulates = node.args[3] if len(node.args) > 3 else dict(node.kwargs).get("accumulate", False)
    chosen = [i for i in indices if i is not None]
    if not accumulates or len(chosen) != 1 or indices[0] is None:
        raise NotConcerned("an index_put that adds no rows")
    if graph.meta(chosen[0]).dtype not in ("int64", "int32"):
        raise NotConcerned("an index_put by a mask")
    return _made(graph, node, "sum", base, chosen[0], rows, wraps=True)


def _scatter(graph: OpGraph, node: Node) -> Segments:
    """`scatter_add` and `scatter_reduce` whose index is the same along all columns."""
    base, dim, index, rows = node.args[:4]
    options = dict(node.kwargs)
    name = "sum" if node.packet == "aten.scatter_add" else node.args[4] if len(node.args) > 4 else options["reduce"]
    joins = options.get("include_self", node.args[5] if len(node.args) > 5 else True)
    if name not in KINDS or dim % len(graph.meta(rows).shape):
        raise NotConcerned(f"a scatter of {name} along dimension {dim}; rows are reduced by segment along the first")
    if graph.meta(index).shape != graph.meta(rows).shape:
        raise NotConcerned("a scatter of a part of what it is given")
    return _made(graph, node, KINDS[name], base, spread_from(graph, index), rows, joins=joins)


def _index_reduce(graph: OpGraph, node: Node) -> Segments:
    base, dim, index, rows, name = node.args[:5]
    joins = dict(node.kwargs).get("include_self", node.args[5] if len(node.args) > 5 else True)
    if name not in KINDS or dim % len(graph.meta(rows).shape):
        raise NotConcerned(f"an index_reduce of {name} along dimension {dim}")
    return _made(graph, node, KINDS[name], base, index, rows, joins=joins)


def _segment_reduce(graph: OpGraph, node: Node) -> Segments:
    """`segment_reduce` along the first dimension; PyTorch leaves NaN in an empty mean, infinities in empty extremes."""
    names = ("data", "reduce", "lengths", "indices", "offsets", "axis", "unsafe", "initial")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **dict(node.kwargs)}
    rows, name, lengths, offsets = given["data"], given["reduce"], given.get("lengths"), given.get("offsets")
    kind = {"sum": "sum", "mean": "mean", "max": "max", "min": "min"}.get(name)
    place = offsets if lengths is None else lengths
    if kind is None or given.get("axis", 0) != 0 or place is None or len(graph.meta(place).shape) != 1:
        raise Unsupported(f"a segment_reduce of {name} other than along the first dimension by lengths or offsets")
    initial = given.get("initial")
    if initial is not None and kind == "mean":
        raise Unsupported("a segment_reduce of means with an initial value")
    empty = {"sum": 0.0, "mean": math.nan, "max": -math.inf, "min": math.inf}[kind]
    out, size = graph.meta(Value(node.name)).shape, graph.meta(rows).shape[0]
    fill, joins = (empty, False) if initial is None else (float(initial), True)
    by = {"offsets": offsets} if lengths is None else {"lengths": lengths}
    return Segments(
        node, kind, (rows,), size, out[0], **by, fill=fill, joins=joins and not (kind == "sum" and not fill)
    )


def _embedding_bag(graph: OpGraph, node: Node) -> Segments:
    """Rows of a table by number; an empty bag is 0."""
    names = ("weight", "indices", "offsets", "scale", "mode", "sparse", "per_sample_weights", "last", "padding_idx")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **dict(node.kwargs)}
    if given.get("padding_idx", -1) >= 0:
        raise Unsupported(f"an embedding bag that leaves out row {given['padding_idx']} (padding_idx)")
    kind = ("sum", "mean", "max")[given.get("mode", 0)]
    weights = given.get("per_sample_weights")
    made = (given["weight"], given["indices"], *(() if weights is None else (weights,)))
    size, count = graph.meta(made[1]).shape[0], graph.meta(Value(node.name)).shape[0]
    even = _even(graph.nodes[given["offsets"].node], size, count)
    offsets = None if even else given["offsets"]
    return Segments(node, kind, made, size, count, offsets=offsets, even=even, joins=False)


def _even(node: Node, size: int, count: int) -> int:
    """Rows of each bag where `node` makes offsets of bags of one size; 0 elsewhere."""
    if node.packet != "aten.arange" or count == 0 or size % count:
        return 0
    return size // count if tuple(node.args[:3]) == (0, size, size // count) else 0


READERS: dict[str, Callable[[OpGraph, Node], Segments]] = {
    "aten.index_put": _index_put,
    "aten.scatter_add": _scatter,
    "aten.scatter_reduce": _scatter,
    "aten.index_reduce": _index_reduce,
    "aten.segment_reduce": _segment_reduce,
    "aten._embedding_bag_forward_only": _embedding_bag,
    "aten._embedding_bag": _embedding_bag,
}
"""How each operator is read."""


def _made(
    graph: OpGraph,
    node: Node,
    kind: str,
    base: Value,
    by: Value,
    rows: Value,
    *,
    wraps: bool = False,
    joins: bool = True,
) -> Segments:
    shape, given = graph.meta(Value(node.name)).shape, graph.meta(rows).shape
    if not given or not shape or graph.meta(by).shape != (given[0],) or given[1:] != shape[1:]:
        raise Unsupported(f"rows {given} by an index {graph.meta(by).shape} into {shape}")
    fill = number_of(graph, base)
    joins = joins and not (kind == "sum" and fill == 0)
    first = base if fill is None else None
    return Segments(node, kind, (rows,), given[0], shape[0], by, wraps=wraps, base=first, fill=fill or 0.0, joins=joins)


def number_of(graph: OpGraph, value: Value) -> float | None:
    """The number that all elements of `value` are; None where they may differ."""
    node = graph.nodes[value.node]
    if node.packet not in FILLS:
        return None
    made: Any = {"aten.zeros_like": 0, "aten.ones_like": 1}.get(
        node.packet, node.args[1] if len(node.args) > 1 else None
    )
    return float(made) if isinstance(made, (int, float)) else None


def spread_from(graph: OpGraph, index: Value) -> Value:
    """The index of rows [E] that `index` [E, …] repeats along its columns.

    Raises:
        Unsupported: it may differ from column to column.
    """
    value, size = index, graph.meta(index).shape[0]
    while len(graph.meta(value).shape) != 1:
        node = graph.nodes[value.node]
        if node.packet not in SPREADS:
            raise Unsupported(DIFFERS)
        rank, (value,) = len(graph.meta(value).shape), node.operands()
        shape = graph.meta(value).shape
        repeats = node.packet == "aten.expand" and len(shape) == rank
        if not shape or shape[0] != size or (not repeats and any(n != 1 for n in shape[1:])):
            raise Unsupported(DIFFERS)
    return value


__all__ = [
    "DTYPES", "FEW", "FILLS", "KINDS", "READERS", "Segments", "number_of", "reduces", "segments_of", "spread_from",
]  # fmt: skip
