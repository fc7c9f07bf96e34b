"""Finds what depends on parameters and buffers alone, so that it can be computed once for all calls.

Deals in operators and their operands. Knows nothing about regions, and nothing about how a program keeps the results.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.ops import category

_found: WeakKeyDictionary[OpGraph, frozenset[str]] = WeakKeyDictionary()


def settled_nodes(graph: OpGraph) -> frozenset[str]:
    """Names of the operators whose results change only when a parameter or buffer changes.

    Empty for a graph as it was captured: only rewritten graphs (`OpGraph.settles`) compute such operators once.
    """
    return _of_state(graph) if graph.settles else frozenset()


def updated_tables(graph: OpGraph) -> tuple[str, ...]:
    """Names of the buffers outside the state_dict that a call updates."""
    tables = {n.target for n in graph.nodes.values() if n.kind == "buffer" and n.literal is not None}
    return tuple(key for key, _ in graph.mutations if key in tables)


def is_state(graph: OpGraph, value: Value) -> bool:
    """Whether `value` is a parameter, a buffer that no call updates, or computed from such values alone."""
    node = graph.nodes[value.node]
    if node.kind in ("parameter", "buffer"):
        return node.kind == "parameter" or node.target not in {key for key, _ in graph.mutations}
    return node.kind == "op" and value.node in _of_state(graph)


def _of_state(graph: OpGraph) -> frozenset[str]:
    """Names of the operators that depend on parameters and buffers alone."""
    if graph not in _found:
        updated = {key for key, _ in graph.mutations}
        known: set[str] = set()
        for node in graph.nodes.values():
            if node.kind != "op":
                if node.kind == "parameter" or node.kind == "buffer" and node.target not in updated:
                    known.add(node.name)
                continue
            sources = [v.node for v in node.operands() if graph.nodes[v.node].kind != "constant"]
            if sources and known.issuperset(sources) and node.literal is None and category(node) != "random":
                known.add(node.name)
        _found[graph] = frozenset(name for name in known if graph.nodes[name].kind == "op")
    return _found[graph]


__all__ = ["is_state", "settled_nodes", "updated_tables"]
