"""Moves out of a loop over steps what needs no state, so that one operator computes it for all steps.

What remains is the recurrence itself: products of states with weights and pointwise operators, one part of a product at
a time. States that do not need each other get loops of their own, one after the other, such as the layers of a stack.
What only reads states comes after the loop, on all of them at once. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import networkx as nx

from qimeng.graph.loops.build import LoopBuilder
from qimeng.graph.loops.loop import At, Line, Name, loop_of, step_graph
from qimeng.graph.opgraph import Meta, Node, Value
from qimeng.graph.ops import category
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule
from qimeng.graph.rewrites.steps import AllSteps

Part = tuple[int, int] | None
"""Begin and end along the last dimension; None for all of it."""


class Hoist(Rule):
    """``for t: h = f(linear(cat(x[t], h), w))`` as ``u = linear(x, v)`` and ``for t: h = f(u[t] + linear(h, w))``."""

    name = "hoist"
    option = "layers"
    packets = ("torch.recurrence",)

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal where every operator that needs no state can be computed for all steps at once."""
        hoisting = _Hoisting(edit, node)
        if hoisting.is_plain:
            raise NoRewrite("")
        hoisting.run()


class _Hoisting:
    """One loop that is taken apart."""

    def __init__(self, edit: Edit, node: Node):
        self.edit, self.node, self.loop = edit, node, loop_of(node)
        self.lines = {line.name: line for line in self.loop.body}
        self.step = step_graph(self.loop, [edit.meta(v) for v in node.args])
        self.needs: dict[str, frozenset[str]] = {f"s{i}": frozenset((f"s{i}",)) for i in range(len(self.loop.starts))}
        for line in self.loop.body:
            self.needs[line.name] = frozenset(s for n in line.names() for s in self.needs.get(n, ()))
        self.outside = AllSteps(edit, self.loop, node.args, self.step)

    def meta(self, name: str) -> Meta:
        """Shape, stride and dtype of a value of a step."""
        return self.step.meta(Value(name))

    @cached_property
    def components(self) -> list[frozenset[str]]:
        """States that need each other, those that others need first."""
        flow = nx.DiGraph()
        for i, following in enumerate(self.loop.following):
            flow.add_node(f"s{i}")
            flow.add_edges_from((s, f"s{i}") for s in self.needs[following])
        whole = nx.condensation(flow)
        order = nx.lexicographical_topological_sort(whole, key=lambda c: min(whole.nodes[c]["members"]))
        return [frozenset(whole.nodes[c]["members"]) for c in order]

    def core(self, states: frozenset[str]) -> set[str]:
        """Lines that these states need and that need these states."""
        found, waiting = set[str](), [self.loop.following[int(s[1:])] for s in states]
        while waiting:
            name = waiting.pop()
            if name not in found and name in self.lines and self.needs[name] & states:
                found.add(name)
                waiting += self.lines[name].names()
        return found

    @property
    def is_plain(self) -> bool:
        """Whether nothing is left to do."""
        core = {n for states in self.components for n in self.core(states)}
        steps = {n for n, line in self.lines.items() if _is_step(line)}
        cut = any(self.lines[n].target in ("aten.slice.Tensor", "aten.cat.default") for n in core)
        return len(self.components) == 1 and not cut and set(self.lines) <= core | steps

    def run(self) -> None:
        """Write the loops, and what comes before and after them."""
        last: dict[str, Value] = {}
        for states in self.components:
            last |= self._component(sorted(states, key=lambda s: int(s[1:])), self.core(states))
        for port, (name, _) in enumerate(self.loop.stacked):
            self.edit.instead(Value(self.node.name, port), self.outside.varying(name))
        for i in range(len(self.loop.starts)):
            self.edit.instead(Value(self.node.name, len(self.loop.stacked) + i), last[f"s{i}"])

    def _component(self, states: Sequence[str], core: set[str]) -> dict[str, Value]:
        """The loop of `states`; what others read of it is known to `outside` afterwards. Gives the last states."""
        writer = _Writer(self, states, core)
        following = [self.loop.following[int(s[1:])] for s in states]
        for state, name in zip(states, following, strict=True):
            writer.follow(state, name)
        others = {n for line in self.loop.body if line.name not in core for n in line.names()}
        others |= {name for name, _ in self.loop.stacked}
        others |= {n for s, n in enumerate(self.loop.following) if f"s{s}" not in states}
        kept = sorted(n for n in core if n in others)
        before = [s for s in states if s in others]
        kept += [n for s, n in zip(states, following, strict=True) if s in before and n not in kept]
        for name in kept:
            writer.builder.keep(writer.emit(name))
        found = self.edit.loop(writer.builder.done(), writer.builder.values)
        self.outside.known |= dict(zip(kept, found, strict=False))
        for state in before:
            self.outside.shifted(state, self.loop.following[int(state[1:])], self.start(state))
        return dict(zip(states, found[len(kept) :], strict=True))

    def start(self, state: str) -> Value:
        """What a state begins with."""
        value: Value = self.node.args[int(self.loop.starts[int(state[1:])][1:])]
        return value


class _Writer:
    """Writes the loop of some states, values of one part of a product at a time."""

    def __init__(self, hoisting: _Hoisting, states: Sequence[str], core: set[str]):
        self._h, self._edit, self._core = hoisting, hoisting.edit, core
        self.builder = LoopBuilder(hoisting.loop.count)
        self._states = {s: self.builder.state(hoisting.start(s)) for s in states}
        self._made: dict[tuple[str, Part], Name] = {}

    def follow(self, state: str, name: str) -> None:
        """Say what `state` is in the next step."""
        self.builder.follow(self._states[state], self.emit(name))

    def emit(self, name: str, part: Part = None) -> Name:
        """The value `name` of the step, or a part of it."""
        key = name, part
        if key not in self._made:
            self._made[key] = self._emit(name, part)
        return self._made[key]

    def _emit(self, name: str, part: Part) -> Name:
        if name in self._states:
            if part not in (None, (0, self._h.meta(name).shape[-1])):
                raise NoRewrite(f"{self._h.node.name} reads a part of a state")
            return self._states[name]
        if name not in self._core:
            return self._given(name, part)
        line = self._h.lines[name]
        shape = self._h.meta(name).shape
        if line.target == "aten.linear.default":
            return self._linear(line, part)
        if line.target == "aten.slice.Tensor" and line.args[1] % len(shape) == len(shape) - 1 and len(line.args) == 4:
            whole = self._h.meta(line.args[0].text).shape[-1]
            begin, end = (min(max(i if i >= 0 else i + whole, 0), whole) for i in line.args[2:4])
            first, last = part or (0, end - begin)
            return self.emit(line.args[0].text, (begin + first, begin + last))
        if part is not None and category(Node("", "op", line.target)) != "pointwise":
            raise NoRewrite(f"{self._h.node.name} reads a part of {line.target}")

        def current(item: Any) -> Any:
            if isinstance(item, Name):
                size = self._h.meta(item.text).shape[-1:]
                return self.emit(item.text, part if size == shape[-1:] else None)
            return tuple(current(i) for i in item) if isinstance(item, (tuple, list)) else item

        if any(isinstance(a, At) for a in line.args):
            raise NoRewrite(f"{self._h.node.name} reads a part of a state that changes from step to step")
        kwargs = {k: current(v) for k, v in line.kwargs}
        return self.builder.op(line.target, *(current(a) for a in line.args), **kwargs)

    def _given(self, name: str, part: Part) -> Name:
        """A value that needs none of the states."""
        if self._h.outside.is_fixed(name):
            value = self._h.outside.fixed(name)
            return self.builder.input(self._cut(value, part))
        return self.builder.step(self._cut(self._h.outside.varying(name), part))

    def _cut(self, value: Value, part: Part, dim: int = -1) -> Value:
        rank = len(self._edit.meta(value).shape)
        return value if part is None else self._edit.op("aten.slice.Tensor", value, dim % rank, *part)

    def _linear(self, line: Line, part: Part) -> Name:
        """A product with a weight; of pieces put together, the sum of their products."""
        given, weight, *rest = line.args
        bias = next((b for b in rest if b is not None), None)
        if not all(self._h.outside.is_fixed(w.text) for w in (weight, bias) if w is not None):
            raise NoRewrite(f"{self._h.node.name} multiplies by a weight that changes")
        matrix = self._cut(self._h.outside.fixed(weight.text), part, 0)
        vector = None if bias is None else self._cut(self._h.outside.fixed(bias.text), part)
        source = self._h.lines.get(given.text)
        pieces = [given.text]
        if source is not None and source.target == "aten.cat.default" and _along_last(source, self._h):
            pieces = [n.text for n in source.args[0]]
        begin, terms = 0, list[Name]()
        for piece in pieces:
            end = begin + self._h.meta(piece).shape[-1]
            columns = matrix if len(pieces) == 1 else self._cut(matrix, (begin, end), 1)
            begin = end
            more = () if vector is None or terms else (vector,)
            if piece in self._core or piece in self._states:
                inputs = [self.builder.input(v) for v in (columns, *more)]
                terms.append(self.builder.op("aten.linear.default", self.emit(piece), *inputs))
            elif self._h.outside.is_fixed(piece):
                value = self._edit.op("aten.linear.default", self._h.outside.fixed(piece), columns, *more)
                terms.append(self.builder.input(value))
            else:
                value = self._edit.op("aten.linear.default", self._h.outside.varying(piece), columns, *more)
                terms.append(self.builder.step(value))
        total = terms[0]
        for term in terms[1:]:
            total = self.builder.op("aten.add.Tensor", total, term)
        return total


def _along_last(line: Line, hoisting: _Hoisting) -> bool:
    rank = len(hoisting.meta(line.name).shape)
    return (line.args[1] if len(line.args) > 1 else 0) % rank == rank - 1


def _is_step(line: Line) -> bool:
    """Whether the line reads a part of an input along its first dimension."""
    return line.target == "aten.select.int" and line.args[0].text[0] == "x" and line.args[1] == 0


__all__ = ["Hoist"]
