"""Layers of experts that sort rows by expert and multiply the rows of each one together (`torch._grouped_mm`).

Models of transformers compute so by default: ``perm = sort(chosen)``; ``y = grouped_mm(f(grouped_mm(x[perm // best],
u, ends)), d, ends) * w[perm]``, each product with a bias ``b[sorted]`` or without; and the sum over a row's experts of
``y`` put back in order. What is found is the same layer as in `dense_experts`. Deals in graphs. Knows nothing about
schedules or kernels.
"""

from __future__ import annotations

from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.ops import RESHAPES
from qimeng.vocabulary.irregular.dense_experts import Layer, added_of, base_of, inner_of
from qimeng.vocabulary.irregular.grouped import DTYPES, MOST_GROUPS

PRODUCTS = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
"""Products of the rows of each matrix; the second is what transformers calls where PyTorch has none for the dtype."""


def sorted_layer(graph: OpGraph, node: Node) -> Layer:
    """The layer whose results `node` adds up.

    Raises:
        NotConcerned: it adds up no results of experts that were sorted.
        Unsupported: it does, in a way that is not covered.
    """
    if node.packet != "aten.sum" or list(node.args[1:2]) not in ([(1,)], [[1]]) or True in node.args[2:3]:
        raise NotConcerned("no sum over a row's experts")
    walk = _Walk(graph)
    walk.taken.add(node.name)
    back = walk.picked(walk.plain(node.operands()[0]))
    sides = walk.through(back[0], "aten.mul")
    order = _Order(walk, back[1])
    added = [added_of(graph, v, walk.taken, PRODUCTS, order.vector) for v in sides]
    found = [i for i, v in enumerate(sides) if added[i] or graph.nodes[v.node].packet in PRODUCTS]
    if len(found) != 1 or len(sides) != 2:
        raise NotConcerned("no sum of weighted products of sorted rows")
    last, weight = added[found[0]], sides[1 - found[0]]
    product = last.product if last else sides[found[0]]
    if graph.meta(weight).shape != (graph.meta(product).shape[0], 1):
        raise Unsupported(f"weights {graph.meta(weight).shape} that are not one for each result")
    inner, second = walk.product(product, order)
    middle, ends, leaves, sources = inner_of(graph, inner, walk.taken, PRODUCTS, order.vector)
    for source in sources:
        walk.product(source, order)
    rows = {walk.rows(graph.nodes[s.node].operands()[0], order) for s in sources}
    weights = walk.weights(weight, order)
    bias = last.bias if last else None
    biases = [b for b in (bias, *(leaf.bias for leaf in leaves)) if b is not None]
    dtypes = {graph.meta(v).dtype for v in (*rows, second, *(leaf.weight for leaf in leaves), *biases)}
    experts, best = graph.meta(second).shape[0], graph.meta(order.chosen).shape[1]
    if len(rows) != 1 or len(dtypes) != 1 or not dtypes <= set(DTYPES) or experts > MOST_GROUPS:
        raise Unsupported(f"{experts} experts of {' and '.join(sorted(dtypes))} with {len(rows)} tensors of rows")
    if graph.meta(node.operands()[0]).shape[:2] != (*graph.meta(next(iter(rows))).shape[:1], best):
        raise Unsupported("a sum over other results than those of a row")
    return Layer(
        node, rows.pop(), leaves, middle, ends, inner, second, order.chosen, weights, frozenset(walk.taken),
        whole=False, bias=bias,
    )  # fmt: skip


class _Walk:
    """From the result back to what it is computed from.

    Attributes:
        graph: the graph.
        taken: names of the operators on the way.
    """

    def __init__(self, graph: OpGraph):
        self.graph, self.taken = graph, set[str]()

    def through(self, value: Value, packet: str) -> tuple[Value, ...]:
        """What the operator that makes `value`, which must be a `packet`, is computed from."""
        node = self.graph.nodes[value.node]
        if node.packet != packet:
            raise NotConcerned(f"{node.packet or node.kind} where {packet} is needed")
        self.taken.add(node.name)
        return node.operands()

    def picked(self, value: Value) -> tuple[Value, Value]:
        """A tensor and the rows of it that `value` picks along its first dimension."""
        source, *by = self.through(value, "aten.index")
        if len(by) != 1 or self.graph.nodes[value.node].args[1] != (by[0],):
            raise NotConcerned("an index along another dimension than the first")
        return source, by[0]

    def plain(self, value: Value) -> Value:
        """What `value` is a reshaped view of."""
        base, views = base_of(self.graph, value)
        self.taken |= views
        return base

    def number(self, value: Value, place: int) -> object:
        """An argument of the operator that makes `value`."""
        args = self.graph.nodes[value.node].args
        return args[place] if len(args) > place else None

    def product(self, value: Value, order: _Order) -> tuple[Value, Value]:
        """The operands of a product of sorted rows.

        Raises:
            Unsupported: its rows end elsewhere, or it adds something.
        """
        node = self.graph.nodes[value.node]
        left, right, *ends = node.operands()
        if ends != [order.ends] or len(self.graph.meta(right).shape) != 3 or node.kwargs:
            raise Unsupported(f"{node.name}: a product of rows with other ends than those of their experts")
        if self.graph.meta(right).shape[0] != order.experts:
            raise Unsupported(f"{node.name}: {self.graph.meta(right).shape[0]} matrices for {order.experts} experts")
        self.taken.add(node.name)
        return left, right

    def rows(self, value: Value, order: _Order) -> Value:
        """The rows [T, D] of which `value` has one for each slot in the order of experts."""
        rows, by = self.picked(value)
        (permuted,) = self.through(by, "aten.div")
        mode = dict(self.graph.nodes[by.node].kwargs).get("rounding_mode")
        best = self.graph.meta(order.chosen).shape[1]
        if permuted != order.permutation or self.number(by, 1) != best or mode != "floor":
            raise Unsupported("experts that multiply other rows than those that chose them")
        if (
            len(self.graph.meta(rows).shape) != 2
            or self.graph.meta(rows).shape[0] != self.graph.meta(order.chosen).shape[0]
        ):
            raise Unsupported("experts that multiply other rows than those that chose them")
        return rows

    def weights(self, value: Value, order: _Order) -> Value:
        """The weights [T, best] of which `value` has one for each slot in the order of experts."""
        weights, by = self.picked(self.plain(value))
        base = self.matrix(weights, order)
        if by != order.permutation:
            raise Unsupported("weights in another order than results")
        return base

    def matrix(self, value: Value, order: _Order | None = None) -> Value:
        """The matrix [T, best] whose elements `value` has in their order."""
        while len(self.graph.meta(value).shape) != 2:
            node = self.graph.nodes[value.node]
            if node.packet not in RESHAPES or not self.graph.meta(value).is_contiguous:
                raise Unsupported("experts or weights that are not one for each slot")
            self.taken.add(node.name)
            (value,) = node.operands()
        if order is not None and self.graph.meta(value).shape != self.graph.meta(order.chosen).shape:
            raise Unsupported("weights that are not one for each slot")
        return value


class _Order:
    """How slots are sorted by expert.

    Attributes:
        chosen: [T, best]; the expert of each slot.
        permutation: the slot of each place in the order of experts.
        ends: where each expert's slots end in it.
        experts: number of experts.

    Args:
        walk: takes the operators on the way.
        inverse: the place of each slot in the order.
    """

    def __init__(self, walk: _Walk, inverse: Value):
        graph = walk.graph
        operands = walk.through(inverse, "aten.index_put")
        if len(operands) != 3 or graph.nodes[inverse.node].args[3:] not in ((), (False,)):
            raise Unsupported("results that are not put back in order")
        empty, self.permutation, counted = operands
        count = graph.meta(self.permutation).numel
        if graph.nodes[counted.node].packet != "aten.arange" or graph.nodes[counted.node].args[:2] != (0, count):
            raise Unsupported("results that are not put back in order")
        walk.taken |= {empty.node, counted.node}
        (slots,) = walk.through(self.permutation, "aten.sort")
        options = graph.nodes[self.permutation.node].args[1:]
        if self.permutation.port != 1 or options not in ((), (-1,), (0,), (-1, False), (0, False)):
            raise Unsupported("slots that are not sorted by their experts")
        self.chosen = walk.matrix(slots)
        readers = graph.users().get(Value(self.permutation.node), [])
        self.ends, self.experts = self._found(walk, readers)

    def vector(self, graph: OpGraph, value: Value, taken: set[str]) -> Value | None:
        """The matrix [experts, N] of which `value` has the row of each slot's expert, in the order of experts."""
        node = graph.nodes[value.node]
        source, *by = node.operands() if node.packet == "aten.index" else (None,)
        if source is None or by != [Value(self.permutation.node)] or node.args[1] != (by[0],):
            return None
        if graph.meta(source).shape != (self.experts, graph.meta(value).shape[-1]):
            return None
        taken.add(node.name)
        return source

    def _found(self, walk: _Walk, names: list[str]) -> tuple[Value, int]:
        """Where each expert's slots end: a running sum of how many there are."""
        graph = walk.graph
        waiting, passed, experts = list(names), set[str](), 0
        while waiting:
            node = graph.nodes[waiting.pop()]
            if node.packet == "aten.histc":
                bins, low, high = (*node.args[1:], None, None, None)[:3]
                if not isinstance(bins, int) or (low, high) != (0, bins - 1):
                    raise Unsupported("slots that are counted otherwise than by expert")
                experts = bins
            if node.packet in ("aten._to_copy", "aten.histc"):
                passed.add(node.name)
                waiting += graph.users().get(Value(node.name), [])
            elif experts and node.packet == "aten.cumsum" and node.args[1] in (0, -1):
                walk.taken |= passed | {node.name}
                return Value(node.name), experts
        raise Unsupported("slots whose ends are found otherwise than by counting")


__all__ = ["PRODUCTS", "sorted_layer"]
