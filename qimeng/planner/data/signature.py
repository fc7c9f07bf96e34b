"""Whether two captured graphs are the same computation: with their shapes, or as operators and wiring alone.

Deals in graphs. The structure ignores names, views, casts, numbers and the order of a sum's operands. A value that is
read twice differs from two values. Knows nothing about where a graph comes from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from qimeng.graph.opgraph import Node, OpGraph, Value, map_values
from qimeng.graph.ops import VIEWS

COMMUTATIVE = frozenset(
    "aten.add aten.mul aten.maximum aten.minimum aten.eq aten.ne aten.logical_and aten.logical_or aten.bitwise_and "
    "aten.bitwise_or".split()
)
"""Operators whose operands may change places."""

PASSED_THROUGH = VIEWS | {"aten.clone", "aten._to_copy", "aten.contiguous"}
"""Operators that change how memory is read or held, not what is computed."""


def structure(graph: OpGraph) -> str:
    """16 hexadecimal digits, equal where the same operators are wired in the same way, whatever the shapes."""
    return _Writer(graph, shapes=False).digest()


def signature(graph: OpGraph) -> str:
    """16 hexadecimal digits, equal where structure, views, numbers, shapes and dtypes are the same."""
    return _Writer(graph, shapes=True).digest()


class _Writer:
    """Writes a graph without its names: nodes get numbers in the order in which they are reached from the results."""

    def __init__(self, graph: OpGraph, shapes: bool):
        self.graph, self.shapes = graph, shapes
        self._trees: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._lines: list[str] = []

    def digest(self) -> str:
        results = [o for o in self.graph.outputs if isinstance(o, Value)]
        for name in self.graph.nodes:  # in topological order, so that what a node reads has its tree already
            node = self.graph.nodes[name]
            operands = [f"{self._trees[v.node]}.{v.port}" for v in self._operands(node)]
            self._trees[name] = _hash(f"{self._label(node)}({','.join(operands)})")
        ends = [self._number(v) for v in [*results, *(v for _, v in self.graph.mutations)]]
        return _hash("\n".join([*self._lines, f"return {ends}, {len(self.graph.mutations)} in place"]))

    def _number(self, value: Value) -> str:
        value = self._source(value)
        if value.node not in self._numbers:
            node = self.graph.nodes[value.node]
            operands = self._operands(node)
            if node.packet in COMMUTATIVE:
                operands = sorted(operands, key=lambda v: (self._trees[v.node], v.port))
            reads = [self._number(v) for v in operands]
            self._numbers[value.node] = len(self._numbers)
            self._lines.append(f"{self._label(node)}({','.join(reads)})")
        return f"{self._numbers[value.node]}.{value.port}"

    def _operands(self, node: Node) -> list[Value]:
        return [self._source(v) for v in node.operands()]

    def _source(self, value: Value) -> Value:
        """What `value` reads where views are passed through."""
        node = self.graph.nodes[value.node]
        while not self.shapes and node.packet in PASSED_THROUGH and node.operands():
            value = node.operands()[0]
            node = self.graph.nodes[value.node]
        return value

    def _label(self, node: Node) -> str:
        what = node.packet if node.kind == "op" else node.kind
        if not self.shapes:
            return what
        metas = [None if m is None else (m.shape, m.stride, m.dtype) for m in node.metas]
        kwargs = {k: map_values(v, lambda _: "value") for k, v in node.kwargs}
        plain = (map_values(node.args, lambda _: "value"), kwargs, node.literal)
        return f"{node.target if node.kind == 'op' else what} {metas} {_text(plain)}"


def _text(thing: Any) -> str:
    if isinstance(thing, Mapping):
        return str({k: _text(v) for k, v in sorted(thing.items())})
    if isinstance(thing, (tuple, list)):
        return f"[{','.join(map(_text, thing))}]"
    return str(thing)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


__all__ = ["COMMUTATIVE", "PASSED_THROUGH", "signature", "structure"]
