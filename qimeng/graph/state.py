"""Finds what depends on no input, but on parameters and buffers at most, so that it can be computed once for all calls.

Deals in operators and their operands. Knows nothing about regions, and nothing about how a program keeps the results.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.ops import category

MOST = 1 << 22
"""Elements of a table that is made by positions up to which it is kept."""

UNSET = frozenset(("aten.empty", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"))
"""Operators whose results hold nothing certain."""

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
    """Names of the operators that depend on parameters and buffers alone; in rewritten graphs, tables of positions too.

    Such a table is a mask, for example, or the angles of a rotary embedding. What fills a tensor or counts is none,
    unless one is made of it. A program without parameters has none: it could not tell that it moved to another device.
    """
    if graph not in _found:
        updated = {key for key, _ in graph.mutations}
        state, fixed, plain, tables = set[str](), set[str](), set[str](), set[str]()
        for node in graph.nodes.values():
            if node.kind == "parameter" or node.kind == "buffer" and node.target not in updated:
                state.add(node.name)
            if node.kind != "op" or node.literal is not None or category(node) == "random" or node.packet in UNSET:
                continue
            sources = {v.node for v in node.operands() if graph.nodes[v.node].kind != "constant"}
            if not sources <= state | fixed or not sources and not graph.settles:
                continue
            (state if sources & state else fixed).add(node.name)
            if sources & (fixed | tables) or not sources:
                tables.add(node.name)
            if sources <= plain and (not sources or category(node) == "view"):
                plain.add(node.name)
        has_state = any(node.kind in ("parameter", "buffer") for node in graph.nodes.values())
        found, read = set[str](), set[str]()
        for node in reversed([graph.nodes[name] for name in graph.nodes if name in state | fixed]):
            worth = node.name not in tables or has_state and node.name not in plain and _is_small(node)
            if node.kind == "op" and (worth or node.name in read):
                found.add(node.name)
                read.update(v.node for v in node.operands())
        _found[graph] = frozenset(found)
    return _found[graph]


def _is_small(node: Node) -> bool:
    return sum(m.numel for m in node.metas if m is not None) <= MOST


__all__ = ["is_state", "settled_nodes", "updated_tables"]
