"""Finds the values of half types whose rounding is part of what a module computes and shows in its results.

Such a module converts finer numbers, or makes constants, of a half type by its own choice, and returns finer numbers
that are computed from them. Values of half inputs and parameters do not count: a kernel may keep more digits of them
than PyTorch, as the float64 reference does. Knows nothing about regions or kernels: what is found depends only on the
graph, so fusing or splitting regions changes no rounding.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from qimeng.graph.opgraph import Node, OpGraph, Value

HALVES = ("float16", "bfloat16")
FINER = ("float32", "float64", "complex64", "complex128")

_found: WeakKeyDictionary[OpGraph, frozenset[Value]] = WeakKeyDictionary()


def shown_halves(graph: OpGraph) -> frozenset[Value]:
    """Values of half types, by the module's own choice, that a finer result is computed from; kept for each graph."""
    if graph.around is not None:
        return graph.around.shows
    if graph not in _found:
        _found[graph] = _shown(graph)
    return _found[graph]


def _shown(graph: OpGraph) -> frozenset[Value]:
    chosen: set[Value] = set()
    for node in graph.nodes.values():
        if node.kind in ("op", "constant") and _is_chosen(graph, node, chosen):
            chosen.update(v for v in _values(node) if _dtype(graph, v) in HALVES)
    if not chosen:
        return frozenset()
    reached = {v for v in graph.results() if _dtype(graph, v) in FINER}
    for node in reversed(graph.nodes.values()):
        if any(v in reached for v in _values(node)):
            reached.update(node.operands())
    return frozenset(chosen & reached)


def _is_chosen(graph: OpGraph, node: Node, chosen: set[Value]) -> bool:
    """Whether halves that `node` yields are made from finer numbers, from such halves, or from no floating tensor."""
    below = [v for v in node.operands() if graph.nodes[v.node].kind != "scalar" and "float" in _dtype(graph, v)]
    if node.packet == "aten._to_copy" and any(_dtype(graph, v) in FINER for v in below):
        return True
    return all(v in chosen for v in below)


def _values(node: Node) -> list[Value]:
    return [Value(node.name, port) for port in range(len(node.metas))]


def _dtype(graph: OpGraph, value: Value) -> str:
    metas = graph.nodes[value.node].metas
    meta = metas[value.port] if value.port < len(metas) else None
    return meta.dtype if meta is not None else ""


__all__ = ["shown_halves"]
