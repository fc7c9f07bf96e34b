"""Whether two captured graphs are the same computation: with their shapes, or as operators and wiring alone.

Deals in graphs. The structure ignores names, views, casts, numbers, the order of a sum's operands, and in which of
several ways an operator is written. A value that is read twice differs from two values. Knows nothing about where a
graph comes from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qimeng.graph.opgraph import Node, OpGraph, Value, map_values
from qimeng.graph.ops import VIEWS
from qimeng.planner.data.spelling import COMMUTATIVE, Call, Term, spelled

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
        self._passed: dict[str, Value] = {}  # nodes that pass a value through
        self._reads: dict[str, tuple[Value, ...]] = {}  # operands that may change places are sorted
        self._labels: dict[str, str] = {}
        self._trees: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._lines: list[str] = []

    def digest(self) -> str:
        results = [o for o in self.graph.outputs if isinstance(o, Value)]
        for name in self.graph.nodes:  # in topological order, so that what a node reads has its tree already
            term = self._term(self.graph.nodes[name])
            if isinstance(term, Value):
                self._passed[name] = term
            else:
                self._enter(name, term)
        ends = [self._number(v) for v in [*results, *(v for _, v in self.graph.mutations)]]
        return _hash("\n".join([*self._lines, f"return {ends}, {len(self.graph.mutations)} in place"]))

    def _term(self, node: Node) -> Term:
        """What a node computes; a value where it passes one through."""
        if self.shapes:
            return Call(self._label(node), node.operands(), node.packet in COMMUTATIVE)
        if node.packet in PASSED_THROUGH and node.operands():
            return self._source(node.operands()[0])
        kwargs = tuple((key, map_values(v, self._source)) for key, v in node.kwargs)
        return spelled(replace(node, args=map_values(node.args, self._source), kwargs=kwargs))

    def _source(self, value: Value) -> Value:
        """What `value` is where it is passed through."""
        return self._passed.get(value.node, value)

    def _enter(self, name: str, call: Call) -> None:
        """Take a call in under a name, and the calls that it reads under others."""
        values: list[Value] = []
        for place, operand in enumerate(call.operands):
            if not isinstance(operand, Value):
                self._enter(f"{name}/{place}", operand)
                operand = Value(f"{name}/{place}")
            values.append(operand)
        in_order = sorted(values, key=self._tree) if call.commutes else values
        self._labels[name], self._reads[name] = call.label, tuple(in_order)
        trees = map(self._tree, values if self.shapes else in_order)
        self._trees[name] = _hash(f"{call.label}({','.join(trees)})")

    def _tree(self, value: Value) -> str:
        return f"{self._trees[value.node]}.{value.port}"

    def _number(self, value: Value) -> str:
        """The number of a value, after a line for each call that it needs, in the order in which they are reached."""
        value = self._source(value)
        waiting = [value.node]
        while waiting:
            name = waiting[-1]
            missing = next((v.node for v in self._reads[name] if v.node not in self._numbers), None)
            if missing is not None:
                waiting.append(missing)
                continue
            waiting.pop()
            if name not in self._numbers:
                self._numbers[name] = len(self._lines)
                reads = ",".join(f"{self._numbers[v.node]}.{v.port}" for v in self._reads[name])
                self._lines.append(f"{self._labels[name]}({reads})")
        return f"{self._numbers[value.node]}.{value.port}"

    def _label(self, node: Node) -> str:
        what = node.packet if node.kind == "op" else node.kind
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


__all__ = ["PASSED_THROUGH", "signature", "structure"]
