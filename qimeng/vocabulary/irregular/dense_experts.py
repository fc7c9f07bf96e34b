"""Layers that compute all experts for all rows and weigh most results by zero: what the experts that count compute.

A layer is two batches of products with pointwise operators between them, ``y[e, t] = f(x[t] @ u[e] + b[e]) @ d[e] +
c[e]`` with biases or without, and the sum over e of ``y[e, t] * r[t, e]``, where r is zero but at the experts that
`topk` chose. Deals in graphs. Knows nothing about schedules or kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.ops import RESHAPES, category
from qimeng.vocabulary.irregular.grouped import DTYPES, MOST_GROUPS, PRODUCT
from qimeng.vocabulary.irregular.segments import number_of


@dataclass(frozen=True)
class Leaf:
    """Columns `start`, `start` + `step` … of the products with one tensor of matrices [experts, depth, …].

    Attributes:
        weight: the matrices.
        start: the first column.
        step: from one column to the next.
        bias: [experts, …], what is added to all columns of the products; None without.
    """

    weight: Value
    start: int
    step: int = 1
    bias: Value | None = None


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of experts.

    Attributes:
        node: the sum over experts.
        rows: [T, D].
        leaves: the first products.
        middle: pointwise operators from the first products to the second, in order.
        ends: value to the number of its leaf.
        inner: what the second product multiplies, in terms of `ends` and `middle`.
        second: [experts, F, N].
        chosen: [T, best]; numbers of experts, all different in a row.
        weights: [T, best].
        taken: all operators of it.
        whole: whether all experts are computed for all rows, most of them for nothing.
        bias: [experts, N], added to the second product; None without.
    """

    node: Node
    rows: Value
    leaves: tuple[Leaf, ...]
    middle: tuple[str, ...]
    ends: dict[Value, int]
    inner: Value
    second: Value
    chosen: Value
    weights: Value
    taken: frozenset[str]
    whole: bool = True
    bias: Value | None = None


def dense_layer(graph: OpGraph, node: Node) -> Layer:
    """The layer whose results `node` adds up.

    Raises:
        NotConcerned: it adds up no weighted results of experts.
        Unsupported: it does, in a way that is not covered.
    """
    if node.packet != "aten.sum" or list(node.args[1:2]) not in ([(0,)], [[0]]) or True in node.args[2:3]:
        raise NotConcerned("no sum over experts")
    times = graph.nodes[node.operands()[0].node]
    if times.packet != "aten.mul" or len(times.operands()) != 2:
        raise NotConcerned("no sum of weighted results")
    taken = {node.name, times.name}
    bases = [base_of(graph, v) for v in times.operands()]
    sums = [added_of(graph, v, taken, (PRODUCT,), expert_vector) for v, _ in bases]
    bases = [(a.product, views) if a else (v, views) for a, (v, views) in zip(sums, bases, strict=True)]
    packets = [graph.nodes[v.node].packet for v, _ in bases]
    if sorted(packets) != [PRODUCT, "aten.scatter"]:
        raise NotConcerned("no sum of products that a scatter weighs")
    which = packets.index(PRODUCT)
    (product, views), (scatter, more) = bases[which], bases[1 - which]
    taken |= views | more | {product.node, scatter.node}
    experts, rows, _ = graph.meta(product).shape
    if graph.meta(times.operands()[which]) != graph.meta(product):
        raise Unsupported("a sum over experts of results in another order")
    chosen, weights = _routing(graph, graph.nodes[scatter.node], rows, experts, taken)
    column = graph.meta(times.operands()[1 - which])
    if column.shape != (experts, rows, 1) or column.stride[:2] != (1, experts):
        raise Unsupported(f"weights of experts of shape {column.shape}, which are not those of each row and expert")
    inner, second = graph.nodes[product.node].operands()
    middle, ends, leaves, products = inner_of(graph, inner, taken, (PRODUCT,), expert_vector)
    last = sums[which]
    sources = {_rows(graph, graph.nodes[v.node].operands()[0], taken) for v in products}
    if len(sources) != 1:
        raise Unsupported(f"first products of experts with {len(sources)} tensors of rows")
    source = sources.pop()
    biases = tuple(b for b in (last.bias if last else None, *(leaf.bias for leaf in leaves)) if b is not None)
    found = {graph.meta(v).dtype for v in (source, second, *(leaf.weight for leaf in leaves), *biases)}
    if len(found) != 1 or not found <= set(DTYPES) or experts > MOST_GROUPS:
        raise Unsupported(f"{experts} experts of {' and '.join(sorted(found))}")
    bias = last.bias if last else None
    return Layer(node, source, leaves, middle, ends, inner, second, chosen, weights, frozenset(taken), bias=bias)


def _routing(graph: OpGraph, scatter: Node, rows: int, experts: int, taken: set[str]) -> tuple[Value, Value]:
    """The experts of each row and their weights, which the operator puts into zeros."""
    base, dim, chosen, weights = scatter.args[:4] if len(scatter.args) == 4 else (None, None, None, None)
    if not isinstance(weights, Value) or dim not in (1, -1) or graph.meta(Value(scatter.name)).shape != (rows, experts):
        raise Unsupported("weights of experts that are not scattered along each row")
    assert isinstance(base, Value) and isinstance(chosen, Value)
    top = graph.nodes[chosen.node]
    along = top.args[2] if len(top.args) > 2 else dict(top.kwargs).get("dim", -1)
    if top.packet != "aten.topk" or chosen.port != 1 or along not in (1, -1):
        raise Unsupported("experts that no topk chooses: one may be chosen twice")
    if number_of(graph, base) != 0 or graph.meta(weights).shape != graph.meta(chosen).shape:
        raise Unsupported("weights of experts that are not scattered into zeros")
    taken.add(base.node)
    return chosen, weights


Vector = Callable[[OpGraph, Value, set[str]], Value | None]
"""The matrix [experts, N] of which a value has each row's or expert's own row, and the operators on the way taken; None
where it is something else."""


@dataclass(frozen=True)
class Added:
    """A product, and the bias that is added to it."""

    product: Value
    bias: Value


def expert_vector(graph: OpGraph, value: Value, taken: set[str]) -> Value | None:
    """The matrix [experts, N] that `value` [experts, 1 or T, N] is a view of, the same for all rows."""
    meta = graph.meta(value)
    base, views = base_of(graph, value)
    source = graph.meta(base)
    rows_share = len(meta.shape) == 3 and (meta.shape[1] == 1 or meta.stride[1] == 0)
    if not rows_share or source.shape != (meta.shape[0], meta.shape[2]):
        return None
    if source.stride != (meta.stride[0], meta.stride[2]):
        return None
    taken |= views
    return base


def added_of(graph: OpGraph, value: Value, taken: set[str], packets: tuple[str, ...], vector: Vector) -> Added | None:
    """The product and the bias whose sum `value` is, and the operators on the way taken; None where it is no such."""
    node = graph.nodes[value.node]
    if node.packet != "aten.add" or len(node.args) != 2 or node.kwargs or len(node.operands()) != 2:
        return None
    for mine, other in (node.operands(), node.operands()[::-1]):
        product, passed = plain(graph, mine), {node.name} | _views(graph, mine)
        if graph.nodes[product.node].packet in packets and graph.meta(product) == graph.meta(value):
            bias = vector(graph, other, passed)
            if bias is not None:
                taken |= passed
                return Added(product, bias)
    return None


def inner_of(
    graph: OpGraph, goal: Value, taken: set[str], packets: tuple[str, ...], vector: Vector
) -> tuple[tuple[str, ...], dict[Value, int], tuple[Leaf, ...], tuple[Value, ...]]:
    """What is between the two products of a layer.

    Args:
        graph: the graph.
        goal: what the second product multiplies.
        taken: gets the operators on the way.
        packets: operators that are a first product.
        vector: finds biases.

    Returns:
        Pointwise operators, their ends, and the first products as leaves and as values.

    Raises:
        Unsupported: there are other operators between them.
    """
    middle, ends, leaves = set[str](), dict[Value, int](), list[Leaf]()
    products, waiting, shape = dict[Value, None](), [goal], graph.meta(goal).shape
    while waiting:
        value = waiting.pop()
        if graph.nodes[value.node].kind == "constant":
            continue
        taken |= _views(graph, value)
        value = plain(graph, value)
        node = graph.nodes[value.node]
        if value in ends or node.name in middle:
            continue
        if graph.meta(value).shape != shape:
            raise Unsupported(f"{node.packet or node.kind} between the products of experts")
        found = _columns(graph, value, taken, packets, vector)
        if found is not None:
            product, leaf = found
            products[Value(product.name)] = None
            leaves += [] if leaf in leaves else [leaf]
            ends[value] = leaves.index(leaf)
        elif category(node) == "pointwise" and len(node.metas) == 1:
            middle.add(node.name)
            taken.add(node.name)
            waiting += node.operands()
        else:
            raise Unsupported(f"{node.packet or node.kind} between the products of experts")
    order = tuple(sorted(middle, key=graph.position.__getitem__))
    return order, ends, tuple(leaves), tuple(products)


def _columns(
    graph: OpGraph, value: Value, taken: set[str], packets: tuple[str, ...], vector: Vector
) -> tuple[Node, Leaf] | None:
    """The first product, with its bias, that `value` is columns of, and which; None where it is computed."""
    start, step, passed, last = 0, 1, set[str](), len(graph.meta(value).shape) - 1
    while (node := graph.nodes[value.node]).packet == "aten.slice":
        dim, first = node.args[1:3]
        stride = node.args[4] if len(node.args) > 4 else 1
        if dim % (last + 1) != last or not isinstance(stride, int) or not isinstance(first, int) or first < 0:
            return None
        start, step = first + stride * start, stride * step
        passed |= {node.name} | _views(graph, node.operands()[0])
        value = plain(graph, node.operands()[0])
    added = added_of(graph, value, passed, packets, vector)
    if added is not None:
        value, node = added.product, graph.nodes[added.product.node]
    if node.packet not in packets or not graph.meta(value).is_contiguous:
        return None
    taken |= passed | {node.name}
    return node, Leaf(node.operands()[1], start, step, added.bias if added else None)


def _rows(graph: OpGraph, left: Value, taken: set[str]) -> Value:
    """The rows [T, D] that every expert multiplies, which are expanded or repeated to [experts, T, D]."""
    value, meta, passed, repeats = left, graph.meta(left), set[str](), False
    while len(graph.meta(value).shape) == 3 or graph.meta(value).shape != meta.shape[1:]:
        node = graph.nodes[value.node]
        repeats = repeats or (node.packet == "aten.repeat" and tuple(node.args[1]) == (meta.shape[0], 1))
        if node.packet not in RESHAPES and not (node.packet == "aten.repeat" and repeats):
            raise Unsupported("experts that multiply other rows each")
        passed.add(node.name)
        (value,) = node.operands()
    shown = meta.is_contiguous if repeats else meta.stride == (0, *graph.meta(value).stride)
    if not shown:
        raise Unsupported("experts that multiply other rows each")
    taken |= passed
    return value


def plain(graph: OpGraph, value: Value) -> Value:
    """`value` without the views that change nothing of it."""
    while (node := graph.nodes[value.node]).packet in RESHAPES and graph.meta(node.operands()[0]) == graph.meta(value):
        (value,) = node.operands()
    return value


def _views(graph: OpGraph, value: Value) -> set[str]:
    """The views that `plain` leaves out."""
    found, goal = set[str](), plain(graph, value)
    while value != goal:
        found.add(value.node)
        (value,) = graph.nodes[value.node].operands()
    return found


def base_of(graph: OpGraph, value: Value) -> tuple[Value, set[str]]:
    """What `value` is a reshaped view of, and the views."""
    passed = set[str]()
    while (node := graph.nodes[value.node]).packet in RESHAPES:
        passed.add(node.name)
        (value,) = node.operands()
    return value, passed


__all__ = ["Added", "Layer", "Leaf", "added_of", "base_of", "dense_layer", "expert_vector", "inner_of", "plain"]
