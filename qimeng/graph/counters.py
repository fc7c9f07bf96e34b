"""Counters that a call raises, such as the `num_batches_tracked` of batch norms, as one operator for all.

A network has one a layer, and each would be a launch of its own. Deals in the operators that raise them. Knows nothing
about how buffers are written back.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from qimeng.graph.opgraph import Node, OpGraph, Value

RAISES, RAISE_ALL = "aten.add.Tensor", "aten._foreach_add.Scalar"


def counted_together(graph: OpGraph) -> OpGraph:
    """`graph` with one operator for all counters of a dtype that a call raises by the same number."""
    alike: dict[tuple[str, int], list[Node]] = defaultdict(list)
    for key, value in graph.mutations:
        node = graph.nodes[value.node]
        if _raises(graph, key, value):
            alike[graph.meta(value).dtype, node.args[1]].append(node)
    groups = {nodes[0].name: (number, nodes) for (_, number), nodes in alike.items() if len(nodes) > 1}
    instead = {
        Value(node.name): Value(_name(nodes), port) for _, nodes in groups.values() for port, node in enumerate(nodes)
    }
    if not instead:
        return graph
    nodes: dict[str, Node] = {}
    for node in graph.nodes.values():
        if Value(node.name) not in instead:
            nodes[node.name] = node
        elif node.name in groups:
            number, members = groups[node.name]
            given, metas = tuple(m.args[0] for m in members), tuple(m.metas[0] for m in members)
            nodes[_name(members)] = Node(_name(members), "op", RAISE_ALL, (given, number), metas=metas)
    return replace(graph, nodes=nodes, mutations=tuple((key, instead.get(v, v)) for key, v in graph.mutations))


def _raises(graph: OpGraph, key: str, value: Value) -> bool:
    """Whether `value`, which the buffer `key` gets, is what it held plus a number, and nothing else reads it."""
    node = graph.nodes[value.node]
    if node.target != RAISES or node.kwargs or not isinstance(node.args[0], Value):
        return False
    held, meta = graph.nodes[node.args[0].node], graph.meta(value)
    mine = held.kind == "buffer" and held.target == key and held.literal is None
    alone = value not in graph.users() and value not in graph.outputs
    return mine and alone and type(node.args[1]) is int and meta.shape == () and meta.dtype.startswith("int")


def _name(nodes: list[Node]) -> str:
    return f"{nodes[0].name}_and_others"


__all__ = ["counted_together"]
