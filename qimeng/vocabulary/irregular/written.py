"""Writes of rows by index: which operators write, and for each position the number of the last row written there.

``y[i] = rows`` has as its value, at each position, either what was there or one of the rows. Which one is said by a
table of integers, so that an element is computed once and no two programs write the same one. Of equal positions the
last one counts, as on the CPU; PyTorch leaves it open. Deals in nodes of a graph and in the arithmetic that fills a
table. Knows nothing about loop nests or kernel text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from qimeng.coder.template.rules.scatters import MOST_POSITIONS
from qimeng.family import Unsupported
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, row_major

INTEGERS = ("int64", "int32")
"""Dtypes of an index; others are masks."""


@dataclass(frozen=True)
class Index:
    """One tensor of positions.

    Attributes:
        value: the tensor.
        stride: elements of it from one element of the write to the next, for each dimension of `Table.every`.
        size: positions along the dimension that it counts along.
        step: entries of the table from one of these to the next.
        wraps: whether a negative one counts from the end; elsewhere PyTorch refuses it.
    """

    value: Value
    stride: tuple[int, ...]
    size: int
    step: int
    wraps: bool


@dataclass(frozen=True)
class Table:
    """For each position that may be written, the number of the last row written there, from 1; 0 for none.

    Attributes:
        node: the operator that writes.
        shape: of the table: one dimension for each that is indexed, or all of them.
        every: sizes of the write: its elements are numbered in this order.
        indices: the tensors that say where an element of the write goes.
        beside: entries from one element to the next that no index decides, for each dimension of `every`.
        counts: the number of an element as a sum over its positions along `every`.
    """

    node: Node
    shape: tuple[int, ...]
    every: tuple[int, ...]
    indices: tuple[Index, ...]
    beside: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def entries(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def elements(self) -> int:
        """Number of elements of the write."""
        return prod(self.every)


def table_of(graph: OpGraph, node: Node) -> Table | None:
    """The table of `node`; None where it writes nothing by index, or so few rows that the family tile compares them.

    Raises:
        Unsupported: it writes in a way that is not covered.
    """
    given = arguments(node)
    if given is None:
        return None
    table = _of_index_put(graph, node, given) if node.packet == "aten.index_put" else _of_scatter(graph, node, given)
    if table is not None and max(table.entries, table.elements) >= 1 << 31:
        raise Unsupported(f"a write into {table.entries} positions; numbers of 32 bits count them")
    return table


def writes(graph: OpGraph, node: Node) -> bool:
    """Whether `node` writes by index, covered or not, and the family tile leaves it alone."""
    try:
        return table_of(graph, node) is not None
    except Unsupported:
        return True


def arguments(node: Node) -> dict[str, Any] | None:
    """The arguments of an operator that writes by index without adding, by name; None for any other."""
    names = {
        "aten.index_put": ("x", "indices", "source", "accumulate"),
        "aten.scatter": ("x", "dim", "index", "source", "reduce"),
    }.get(node.packet)
    if names is None:
        return None
    given = dict(zip(names, node.args, strict=False)) | {
        {"value": "source", "src": "source", "values": "source"}.get(k, k): v for k, v in dict(node.kwargs).items()
    }
    return None if given.get("accumulate") or given.get("reduce") else given


def chosen(given: Mapping[str, Any]) -> list[tuple[int, Value]]:
    """The dimensions that an `index_put` has an index for, each with it."""
    return [(d, i) for d, i in enumerate(given["indices"]) if i is not None]


def _of_index_put(graph: OpGraph, node: Node, given: Mapping[str, Any]) -> Table | None:
    meta, found = graph.meta(Value(node.name)), chosen(given)
    metas = [graph.meta(i) for _, i in found]
    if any(m.dtype not in INTEGERS for m in metas):
        return None
    if len(found) == 1 and len(metas[0].shape) == 1 and metas[0].shape[0] <= MOST_POSITIONS:
        return None
    if not any(m.shape for m in metas):
        return None
    dims = [d for d, _ in found]
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise Unsupported("a write by indices of dimensions that are not neighbours")
    every = _broadcast([m.shape for m in metas])
    shape = tuple(meta.shape[d] for d in dims)
    indices = tuple(
        Index(i, _spread(m, len(every)), n, step, True)
        for (_, i), m, n, step in zip(found, metas, shape, row_major(shape), strict=True)
    )
    return Table(node, shape, every, indices, (0,) * len(every), row_major(every))


def _of_scatter(graph: OpGraph, node: Node, given: Mapping[str, Any]) -> Table | None:
    """One entry for each row where the index is the same along all others, else one for each element."""
    meta, index = graph.meta(Value(node.name)), graph.meta(given["index"])
    if not meta.shape or not index.shape:
        raise Unsupported("a write into a tensor without dimensions")
    d = given["dim"] % len(meta.shape)
    others = [i for i in range(len(meta.shape)) if i != d]
    size, count = meta.shape[d], index.shape[d]
    whole = all(index.shape[i] == meta.shape[i] for i in others)
    source = graph.meta(given["source"]).shape if isinstance(given["source"], Value) else meta.shape
    if count <= MOST_POSITIONS and whole and all(source[i] == meta.shape[i] for i in others):
        return None
    if whole and all(index.shape[i] == 1 or index.stride[i] == 0 for i in others):
        return Table(node, (size,), (count,), (Index(given["index"], (index.stride[d],), size, 1, False),), (0,), (1,))
    steps = row_major(meta.shape)
    beside = tuple(0 if i == d else step for i, step in enumerate(steps))
    counts = tuple(int(i == d) for i in range(len(steps)))
    only = Index(given["index"], index.stride, size, steps[d], False)
    return Table(node, meta.shape, index.shape, (only,), beside, counts)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def _spread(meta: Meta, rank: int) -> tuple[int, ...]:
    """The strides of a tensor that is broadcast to `rank` dimensions."""
    steps = (0 if size == 1 else step for size, step in zip(meta.shape, meta.stride, strict=True))
    return (*(0,) * (rank - len(meta.shape)), *steps)


__all__ = ["Index", "Table", "arguments", "chosen", "table_of", "writes"]
