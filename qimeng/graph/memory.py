"""Finds whose memory a value is: views share that of their operand.

Deals in operators that return a view. Knows nothing about what a program makes of that.
"""

from __future__ import annotations

from collections.abc import Mapping

from qimeng.graph.opgraph import REINTERPRETS, Node, Value
from qimeng.graph.ops import VIEWS

SHARES = VIEWS | {REINTERPRETS, "aten.view_as_complex", "aten._conj", "aten._neg_view", "aten.real", "aten.imag"}
"""Operators whose result may share the memory of their first operand."""


def memory_of(nodes: Mapping[str, Node], value: Value) -> Value:
    """The value that `value` is a view of, itself where it is none; ``reshape``, which may copy, counts as a view."""
    node = nodes[value.node]
    while node.kind == "op" and node.packet in SHARES:
        value = node.operands()[0]
        node = nodes[value.node]
    return value


__all__ = ["SHARES", "memory_of"]
