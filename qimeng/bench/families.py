"""Finds the family of a whole computation from its captured graph.

Deals in operators and their connections. Knows nothing about names, files, programs or times. A computation belongs to
the family of its heaviest kind of loop nest; the scoreboards group by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import networkx as nx

from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.ops import VIEWS, category

FAMILIES = (
    "attention",
    "recurrent",
    "convolution",
    "pooling",
    "scan",
    "gemm",
    "other",
    "reduction",
    "pointwise",
)
"""From the heaviest to the lightest; a computation with several kinds of loop nests counts as the first."""

ATTENTION = ("scaled_dot_product", "_efficient_attention", "_flash_attention")
RECURRENT = frozenset("aten.lstm aten.gru aten.rnn_tanh aten.rnn_relu".split())
LINEAR_REDUCTIONS = frozenset({"aten.sum", "aten.mean"})
ELEMENTWISE_LINEAR = frozenset({"aten.mul", "aten.div", "aten.add", "aten.sub", "aten.neg"})
SELF_NORMALIZING = frozenset({"aten._softmax", "aten._log_softmax"})


@dataclass(frozen=True)
class Classification:
    """What kind of computation a graph is.

    Attributes:
        family: one of `FAMILIES`.
        collapsed: why algebra or structure makes a matrix product smaller than it looks; empty where it does not.
            Such programs are counted apart, because a speedup on them says little about matrix products.
        random: True where an operator draws random numbers; its region stays on PyTorch.
    """

    family: str
    collapsed: str = ""
    random: bool = False


def classify(graph: OpGraph) -> Classification:
    """The family of `graph`."""
    kinds = {_kind(node) for node in graph.ops()}
    if _composed_attention(graph):
        kinds.add("attention")
    heaviest = next((f for f in FAMILIES if f in kinds), "pointwise")
    collapsed = _collapse(graph) if heaviest == "gemm" else ""
    return Classification(heaviest, collapsed, random=any(category(n) == "random" for n in graph.ops()))


def _kind(node: Node) -> str:
    packet = node.packet
    if any(mark in packet for mark in ATTENTION):
        return "attention"
    if packet in RECURRENT:
        return "recurrent"
    if "pool" in packet:
        return "pooling"
    return {"view": "pointwise", "indexing": "pointwise", "random": "pointwise"}.get(category(node), category(node))


def _composed_attention(graph: OpGraph) -> bool:
    """A product of two activations, a softmax, a product with another activation."""
    for node in graph.ops():
        if category(node) != "gemm" or not _only_activations(graph, node):
            continue
        for value in node.operands():
            softmax = _through(graph, value, _is_light)
            if softmax.packet == "aten._softmax":
                producer = _through(graph, softmax.operands()[0], _is_light)
                if category(producer) == "gemm" and _only_activations(graph, producer):
                    return True
    return False


def _is_light(node: Node) -> bool:
    return category(node) in ("view", "pointwise")


def _only_activations(graph: OpGraph, node: Node) -> bool:
    roots = (_through(graph, v, lambda n: category(n) == "view") for v in node.operands())
    return all(root.kind not in ("parameter", "buffer") for root in roots)


def _through(graph: OpGraph, value: Value, passes: Callable[[Node], bool]) -> Node:
    """The first node upstream of `value`, along first operands, that does not pass."""
    node = graph.nodes[value.node]
    while node.kind == "op" and passes(node) and node.operands():
        node = graph.nodes[node.operands()[0].node]
    return node


# ---- where a matrix product is smaller than it looks


def _collapse(graph: OpGraph) -> str:
    for node in graph.ops():
        if reason := _constant_by_structure(graph, node):
            return reason
    users = graph.users()
    for node in graph.ops():
        if category(node) == "gemm":
            if _triangular(graph, users, node):
                return "triangular output"
            if _ends_in_linear_reduction(graph, users, Value(node.name)):
                return "product read only by a linear reduction"
    return ""


def _constant_by_structure(graph: OpGraph, node: Node) -> str:
    """A value minus itself, or a softmax over one element: the same for every input."""
    if node.packet in SELF_NORMALIZING:
        shape = graph.meta(node.operands()[0]).shape
        if shape[int(node.args[1])] == 1:
            return "softmax over one element"
    if node.packet == "aten.sub" and len(node.operands()) == 2:
        left, right = (_identity(graph, v) for v in node.operands())
        if left == right:
            return "a value minus itself"
    return ""


def _identity(graph: OpGraph, value: Value) -> Value:
    """The value that `value` equals: what is upstream of reductions over one element and of views that keep it."""
    while True:
        node = graph.nodes[value.node]
        if node.kind != "op" or not node.operands() or value.port:
            return value
        source = node.operands()[0]
        same_size = graph.meta(source).numel == graph.meta(value).numel
        if not same_size or (category(node) != "reduction" and node.packet not in VIEWS):
            return value
        if category(node) == "reduction" and node.packet not in ("aten.sum", "aten.mean", "aten.amax", "aten.amin"):
            return value
        value = source


def _triangular(graph: OpGraph, users: Mapping[Value, list[str]], node: Node) -> bool:
    """All that reads the product keeps one triangle of it: `triu`, `tril`, or a constant mask that gives zero."""
    readers = [graph.nodes[u] for u in users.get(Value(node.name), [])]
    return bool(readers) and all(
        r.packet in ("aten.triu", "aten.tril")
        or (r.packet == "aten.where" and isinstance(r.args[0], Value) and _is_constant(graph, r.args[0]))
        for r in readers
    )


def _is_constant(graph: OpGraph, value: Value) -> bool:
    upstream = {value.node, *nx.ancestors(graph.digraph, value.node)}
    return all(graph.nodes[name].kind in ("op", "constant") for name in upstream)


def _ends_in_linear_reduction(graph: OpGraph, users: Mapping[Value, list[str]], value: Value) -> bool:
    """Every reader leads, through maps linear in `value`, to a sum or mean over the product's last axis."""
    readers = users.get(value, [])
    return (
        bool(readers)
        and value not in graph.results()
        and all(_reader_collapses(graph, users, value, graph.nodes[r]) for r in readers)
    )


def _reader_collapses(graph: OpGraph, users: Mapping[Value, list[str]], value: Value, reader: Node) -> bool:
    shape = graph.meta(value).shape
    if reader.packet in LINEAR_REDUCTIONS:
        return len(shape) - 1 in set(_reduced_axes(reader, len(shape)))
    linear = reader.packet in ELEMENTWISE_LINEAR and reader.operands().count(value) == 1
    if reader.packet == "aten.div":
        linear = linear and reader.args[0] == value
    out = Value(reader.name)
    if not linear or graph.meta(out).shape != shape:
        return False
    downstream = nx.descendants(graph.digraph, value.node)
    if any(v.node in downstream for v in reader.operands() if v != value):
        return False
    return _ends_in_linear_reduction(graph, users, out)


def _reduced_axes(node: Node, rank: int) -> Iterator[int]:
    axes = node.args[1] if len(node.args) > 1 else None
    if axes is None or isinstance(axes, Value) or axes == ():
        return iter(range(rank))
    listed = axes if isinstance(axes, (tuple, list)) else (axes,)
    return (int(a) % rank for a in listed)


__all__ = ["FAMILIES", "Classification", "classify"]
