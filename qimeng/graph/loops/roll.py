"""Finds Python loops that a capture has unrolled, and makes each one operator again.

A loop over steps becomes as many copies of its operators as it has steps. Here equal operators at equal distances are
found first; then every operator of every copy is compared with the first copy's: each operand must be the value of the
same place in the same copy, of the same place in the copy before (a state), or the same value from outside; a number
must be the same, or grow by the same amount from copy to copy. So the loop computes what the copies computed, operator
by operator. What is no such loop stays as it is: neither is a row of copies that only moves values. A first state of
another dtype is converted before the loop where the first step does so. Knows nothing about where graphs come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from qimeng.graph.loops.loop import At, Line, Loop, Name
from qimeng.graph.loops.unstack import apart, stacked_again
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, map_values, row_major
from qimeng.graph.ops import VIEWS, category

FEWEST_STEPS = 8
"""Copies that are made a loop; fewer are as well off apart."""

FEWEST_OPERATORS = 128
"""Operators of all copies together from which on a loop is worth it: fewer can be fused and written one by one."""

NEARLY = 0.9
"""Share of the most operators that a shorter period may cover and still come first."""

MOST_PERIODS, MOST_STARTS = 64, 256
"""Distances and first operators that are tried."""

PLACES = {"aten.select.int": (2,), "aten.slice.Tensor": (2, 3)}
"""Operators with a number that may change from step to step: where among the arguments it is."""

MOVES = VIEWS | {"aten.clone"}
"""Operators that compute nothing."""

CONVERTS = frozenset(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))
"""Operators that first convert both tensors to the dtype of the result."""


def rolled(graph: OpGraph) -> OpGraph:
    """`graph` with every loop over steps in it as one operator."""
    while (found := _once(graph)) is not None:
        graph = found
    return graph


def _once(graph: OpGraph) -> OpGraph | None:
    """`graph` with its longest unrolled loop as one operator; None where there is none."""
    if sum(1 for _ in graph.ops()) < FEWEST_OPERATORS:
        return None
    ops = _late_views(graph)
    kinds: dict[Any, int] = {}
    keys = np.array([kinds.setdefault(_key(n), len(kinds)) for n in ops])
    for begin, period, length in _repeats(keys):
        starts = sorted(range(min(period, MOST_STARTS)), key=lambda r: (_states(ops, begin + r, period), r))
        for start in starts:
            copies = (length - start) // period
            if copies >= FEWEST_STEPS and copies * period >= FEWEST_OPERATORS:
                rolling = _Rolling(graph, ops, begin + start, period, copies)
                if rolling.loop is not None:
                    return rolling.graph_with_loop()
    return None


def _late_views(graph: OpGraph) -> list[Node]:
    """The operators; a piece of a value that is cut into many stands right before what reads it."""
    readers = graph.users()
    results = {v.node for v in graph.results()}
    waiting: dict[str, Node] = {}
    order: list[Node] = []

    def emit(node: Node) -> None:
        for v in node.operands():
            if v.node in waiting:
                emit(waiting.pop(v.node))
        order.append(node)

    for node in graph.ops():
        whole = node.operands()[0] if node.packet in VIEWS else None
        piece = whole is not None and (len(readers.get(whole, ())) >= FEWEST_STEPS or whole.node in waiting)
        if piece and node.name not in results:
            waiting[node.name] = node
        else:
            emit(node)
    return order


def _key(node: Node) -> Any:
    """What two copies of an operator share."""
    places = PLACES.get(node.target, ())
    args = tuple(None if i in places else a for i, a in enumerate(node.args))
    return node.target, repr(map_values(args, lambda v: Value(""))), _keywords(node), node.metas


def _keywords(node: Node) -> str:
    return repr([(k, map_values(v, lambda v: Value(""))) for k, v in node.kwargs])


def _repeats(keys: Any) -> Iterator[tuple[int, int, int]]:
    """Begin, period and length of runs in which every key is that of one period before.

    The shortest period of those that cover nearly the most operators comes first.
    """
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i, key in enumerate(keys.tolist()):
        if key in last:
            distances[i - last[key]] += 1
        last[key] = i
    found = []
    for period, _ in distances.most_common(MOST_PERIODS):
        same = np.concatenate(([False], keys[:-period] == keys[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            copies = (end - begin + period) // period
            if copies >= FEWEST_STEPS and copies * period >= FEWEST_OPERATORS:
                found.append((copies * period, period, begin, end - begin + period))
    most = max((covered for covered, *_ in found), default=0)
    found.sort(key=lambda f: (0, f[1]) if f[0] >= NEARLY * most else (1, -f[0]))
    for _, period, begin, length in found[:MOST_PERIODS]:
        yield begin, period, length


def _states(ops: Sequence[Node], start: int, period: int) -> int:
    """Values that the second copy from `start` on reads of the first."""
    first = {n.name for n in ops[start : start + period]}
    return len({v for n in ops[start + period : start + 2 * period] for v in n.operands() if v.node in first})


class _Different(Exception):
    """The copies do not compute the same."""


@dataclass
class _Rolling:
    """The copies of a loop that start at one operator.

    Attributes:
        graph: before.
        ops: its operators in an order in which copies lie together.
        start: number of the first operator.
        period: operators of a copy.
        copies: number of copies.
        loop: the loop; None where the copies differ.
    """

    graph: OpGraph
    ops: Sequence[Node]
    start: int
    period: int
    copies: int
    loop: Loop | None = None
    _conversions: dict[Value, Node] = field(default_factory=dict)
    _inputs: list[Value] = field(default_factory=list)
    _carried: dict[tuple[int, Value], int] = field(default_factory=dict)
    _kept: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._end = self.start + self.period * self.copies
        inside = self.ops[self.start : self._end]
        self._place = {n.name: divmod(i, self.period) for i, n in enumerate(inside)}
        try:
            lines = [self._line(j) for j in range(self.period)]
        except _Different:
            return
        moves = any(isinstance(a, At) for line in lines for a in line.args)
        if not self._carried or not moves:  # layers of a network, or one function again and again
            return
        if all(line.target.rpartition(".")[0] in MOVES for line in lines):  # as what reads the steps of a loop
            return
        if not all(self._converts(start, Name(f"s{i}"), lines) for (_, start), i in self._carried.items()):
            return
        read = self._read_outside()
        if not all(self.graph.meta(v).is_contiguous for v in read):  # what is stacked is
            return
        carried = {j for j, _ in self._carried}
        places = [self._place[v.node] for v in read]
        self._kept = sorted({j for k, j in places if k < self.copies - 1 or j not in carried})
        states = sorted(self._carried, key=lambda c: self._carried[c])
        starts = tuple(self._input(value).text for _, value in states)
        following = tuple(f"v{j}" for j, _ in states)
        stacked = tuple((f"v{j}", False) for j in self._kept)
        self.loop = Loop(self.copies, len(self._inputs), starts, tuple(lines), following, stacked)

    def _line(self, number: int) -> Line:
        copies = [self.ops[self.start + k * self.period + number] for k in range(self.copies)]
        node = copies[0]
        plain = node.target.startswith("aten.") and node.literal is None and category(node) != "random"
        if not plain or len(node.metas) != 1 or not node.operands():
            raise _Different
        args = tuple(self._same([n.args[i] for n in copies]) for i in range(len(node.args)))
        kwargs = tuple((k, self._same([n.kwargs[i][1] for n in copies])) for i, (k, _) in enumerate(node.kwargs))
        return Line(f"v{number}", node.target, args, kwargs)

    def _same(self, items: Sequence[Any]) -> Any:
        """What an argument is in every copy, from what it is in each.

        Raises:
            _Different: it is no one thing.
        """
        first = items[0]
        if any(type(i) is not type(first) for i in items):
            raise _Different
        if isinstance(first, Value):
            return self._value(items)
        if isinstance(first, (tuple, list)):
            if any(len(i) != len(first) for i in items):
                raise _Different
            return tuple(self._same([i[n] for i in items]) for n in range(len(first)))
        if type(first) is int:
            step = items[1] - first
            if any(i != first + k * step for k, i in enumerate(items)):
                raise _Different
            return At(step, first) if step else first
        if any(repr(i) != repr(first) for i in items):
            raise _Different
        return first

    def _value(self, values: Sequence[Value]) -> Name:
        places = [self._place.get(v.node) for v in values]
        if places[0] is not None:  # of the same copy
            number = places[0][1]
            if any(p != (k, number) for k, p in enumerate(places)):
                raise _Different
            return Name(f"v{number}")
        if all(v == values[0] for v in values):
            return self._input(values[0])
        place = places[1]
        if place is None or any(p != (k, place[1]) for k, p in enumerate(places[1:])):
            raise _Different
        start = self._converted(values[0], self.graph.meta(Value(self.ops[self.start + place[1]].name)))
        return Name(f"s{self._carried.setdefault((place[1], start), len(self._carried))}")

    def _converted(self, start: Value, later: Meta) -> Value:
        """What a state begins with, in the dtype of the later steps."""
        meta = self.graph.meta(start)
        if meta.dtype == later.dtype:
            return start
        if meta.shape != later.shape or not meta.shape:
            raise _Different
        made = Value(f"{start.node}_{start.port}__{later.dtype}")
        dtype = (("dtype", getattr(torch, later.dtype)),)
        metas = (replace(meta, stride=row_major(meta.shape), dtype=later.dtype),)
        self._conversions[made] = Node(made.node, "op", "aten._to_copy.default", (start,), dtype, metas)
        return made

    def _converts(self, start: Value, state: Name, lines: Sequence[Line]) -> bool:
        """Whether a start that was converted is so by everything that reads the state."""
        if start not in self._conversions:
            return True
        dtype = self._meta(start).dtype
        return all(
            line.target in CONVERTS
            and state in line.args
            and self.graph.meta(Value(self.ops[self.start + number].name)).dtype == dtype
            for number, line in enumerate(lines)
            if state.text in line.names()
        )

    def _meta(self, value: Value) -> Meta:
        made = self._conversions.get(value)
        meta = self.graph.meta(value) if made is None else made.metas[0]
        assert meta is not None
        return meta

    def _input(self, value: Value) -> Name:
        if value not in self._conversions and self.graph.nodes[value.node].kind in ("scalar", "constant"):
            raise _Different
        if value not in self._inputs:
            self._inputs.append(value)
        return Name(f"x{self._inputs.index(value)}")

    def _read_outside(self) -> list[Value]:
        """Values of the copies that something else reads."""
        rest = [n for n in self.ops if n.name not in self._place]
        read = [v for n in rest for v in n.operands()] + list(self.graph.results())
        return [v for v in dict.fromkeys(read) if v.node in self._place]

    def graph_with_loop(self) -> OpGraph:
        """The graph with the loop in the place of the copies."""
        assert self.loop is not None
        name = f"{self.ops[self.start].name}__loop"
        node = self.loop.node(name, self._inputs, [self._meta(v) for v in self._inputs])
        states = {
            j: len(self._kept) + i for i, (j, _) in enumerate(sorted(self._carried, key=self._carried.__getitem__))
        }
        instead: dict[Value, Value] = {}
        parts: list[Node] = []
        last: dict[str, Value] = {}
        for value in self._read_outside():
            step, number = self._place[value.node]
            if number not in self._kept:  # of the last step alone
                instead[value] = Value(name, states[number])
                continue
            whole = Value(name, self._kept.index(number))
            part = Node(f"{value.node}__step", "op", "aten.select.int", (whole, 0, step), metas=(_part(node, whole),))
            parts.append(part)
            instead[value] = Value(part.name)
            if step == self.copies - 1 and number in states:
                last[part.name] = Value(name, states[number])

        def current(value: Value) -> Value:
            return instead.get(value, value)

        before = [n for n in self.graph.nodes.values() if n.kind != "op"]
        after = [n for n in (*self.ops[: self.start], *self.ops[self._end :])]
        conversions = [self._conversions[v] for v in self._inputs if v in self._conversions]
        early = self._needed([v.node for n in conversions for v in n.operands()])
        early |= self._needed([v.node for v in self._inputs if v not in self._conversions])
        made = {n.name for n in (*conversions, node, *parts)}
        order = [*before, *(n for n in after if n.name in early), *conversions, node, *parts]
        order += [n for n in after if n.name not in early]
        nodes = {
            n.name: n
            if n.kind != "op" or n.name in made
            else replace(
                n,
                args=map_values(n.args, current),
                kwargs=tuple((k, map_values(v, current)) for k, v in n.kwargs),
            )
            for n in order
        }
        outputs = tuple(current(o) if isinstance(o, Value) else o for o in self.graph.outputs)
        mutations = tuple((key, current(v)) for key, v in self.graph.mutations)
        graph = replace(self.graph, nodes=nodes, outputs=outputs, mutations=mutations)
        return apart(stacked_again(graph, name), [n.name for n in parts], last)

    def _needed(self, names: Sequence[str]) -> set[str]:
        """Operators that `names` are computed from, and these."""
        found, waiting = set[str](), list(names)
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                waiting += [v.node for v in self.graph.nodes[name].operands()]
        return found


def _part(node: Node, whole: Value) -> Meta:
    meta = node.metas[whole.port]
    assert meta is not None
    return Meta(meta.shape[1:], meta.stride[1:], meta.dtype)


__all__ = ["FEWEST_OPERATORS", "FEWEST_STEPS", "rolled"]
