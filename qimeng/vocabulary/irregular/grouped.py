"""Products of rows with the matrices that an index chooses for them, such as those of experts.

PyTorch copies a matrix for every row (``weight[index]``) and multiplies in a batch. What is found here is which row
meets which matrix, by following strides: the batch reads the copies through views alone. Deals in graphs. Knows
nothing about schedules or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.graph.ops import RESHAPES

PRODUCT, CHOICES = "aten.bmm", ("aten.index", "aten.index_select")
"""The batch of products, and the operators that copy matrices."""

DTYPES = ("float32", "float16", "bfloat16")
"""Of what is multiplied."""

MOST_GROUPS = 1024
"""Matrices at most: a program looks through where each one's rows begin."""


@dataclass(frozen=True, eq=False)
class Grouped:
    """A product of slots with matrices: ``y[s] = x[s // each] @ w[by[s]]``.

    Attributes:
        product: the batch of products.
        rows: [B, 1, K] or [B, K, 1]; a row for `each` slots that follow each other.
        row_strides: of `rows`, along the batch and along K.
        weight: [groups, …, …]; the matrices.
        weight_strides: of `weight`, along the groups, K and N.
        by: the matrix of each slot, in any shape.
        wraps: whether a negative index counts from the end.
        groups: number of matrices.
        slots: number of slots.
        each: slots of a row.
        depth: K.
        columns: N.
        copies: the operators from `weight` to the batch's operand.
    """

    product: Node
    rows: Value
    row_strides: tuple[int, int]
    weight: Value
    weight_strides: tuple[int, int, int]
    by: Value
    wraps: bool
    groups: int
    slots: int
    each: int
    depth: int
    columns: int
    copies: tuple[str, ...]


def grouped_product(graph: OpGraph, node: Node) -> Grouped:
    """What `node` multiplies.

    Raises:
        NotConcerned: it is no batch of products with matrices that an index chooses.
        Unsupported: it is, in a way that is not covered.
    """
    if node.packet != PRODUCT:
        raise NotConcerned("no batch of products")
    for side, value in enumerate(node.operands()):
        copies = _copies(graph, value)
        if copies:
            return _read(graph, node, side, copies)
    raise NotConcerned("a batch of products with matrices that no index chooses")


def _copies(graph: OpGraph, value: Value) -> tuple[str, ...]:
    """The operators from chosen matrices to `value`, the last first; none where it is not made of such."""
    found: list[str] = []
    while (node := graph.nodes[value.node]).packet in RESHAPES:
        found.append(node.name)
        (value,) = node.operands()
    if node.packet not in CHOICES or len(graph.meta(node.operands()[0]).shape) != 3:
        return ()
    return (*found, node.name)


def _read(graph: OpGraph, node: Node, side: int, copies: tuple[str, ...]) -> Grouped:
    chosen = graph.nodes[copies[-1]]
    weight, by = _chosen(graph, chosen)
    groups, high, wide = graph.meta(weight).shape
    operand, rows = graph.meta(node.operands()[side]), node.operands()[1 - side]
    batch, depth, columns, steps = _axes(operand, side)
    vector = graph.meta(rows)
    if vector.shape[1 if side else 2] != 1:
        raise Unsupported(f"a batch of products with {vector.shape} rows; one row for each matrix is covered")
    if not graph.meta(Value(chosen.name)).is_contiguous:
        raise Unsupported("chosen matrices that do not lie one after the other")
    along_k, along_n = steps[1], steps[2]
    size, slots = high * wide, graph.meta(by).numel
    if (depth, along_k) == (wide, 1) and along_n == wide and columns % high == 0:
        each, strides, width = columns // high, (2, 1), high
    elif (depth, along_k) == (high, wide) and (along_n == 1 or columns == 1) and columns == wide:
        each, strides, width = 1, (1, 2), wide
    else:
        raise Unsupported(f"a batch of products that reads {operand.shape} of matrices {high} x {wide} across them")
    if batch * each != slots or (batch > 1 and steps[0] != each * size):
        raise Unsupported(f"{batch} products with {each} matrices each of {slots} that were chosen")
    dtypes = {graph.meta(v).dtype for v in (rows, weight)}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES) or not 1 < groups <= MOST_GROUPS:
        raise Unsupported(f"products of {' and '.join(sorted(dtypes))} with {groups} matrices")
    if not graph.meta(Value(node.name)).numel or not depth:
        raise Unsupported("an empty tensor")
    meta = graph.meta(weight)
    row = vector.stride[0], vector.stride[2 if side else 1]
    whole = meta.stride[0], meta.stride[strides[0]], meta.stride[strides[1]]
    wraps = chosen.packet == "aten.index"
    return Grouped(node, rows, row, weight, whole, by, wraps, groups, slots, each, depth, width, copies)


def _chosen(graph: OpGraph, node: Node) -> tuple[Value, Value]:
    """The matrices and the index of an operator that copies them."""
    if node.packet == "aten.index_select":
        if node.args[1] != 0:
            raise Unsupported("an index that chooses parts of matrices")
        return node.args[0], node.args[2]
    weight, indices = node.args
    if len(indices) != 1 or indices[0] is None or graph.meta(indices[0]).dtype not in ("int64", "int32"):
        raise Unsupported("an index that chooses parts of matrices")
    return weight, indices[0]


def _axes(operand: Meta, side: int) -> tuple[int, int, int, tuple[int, int, int]]:
    """Batch, depth and columns of the matrices' operand, and its strides along them."""
    (batch, first, second), (a, b, c) = operand.shape, operand.stride
    return (batch, second, first, (a, c, b)) if side == 0 else (batch, first, second, (a, b, c))


__all__ = ["CHOICES", "DTYPES", "MOST_GROUPS", "PRODUCT", "Grouped", "grouped_product"]
