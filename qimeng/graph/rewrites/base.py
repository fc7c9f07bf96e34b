"""What a rewrite of the graph is, and how it edits one.

Deals in operators that are added, values that take the place of others, and shapes. A rewrite changes what is computed
on the way, never what the computation means over real numbers. Knows nothing about regions, programs or actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qimeng.graph.loops.loop import PACKET, Loop
from qimeng.graph.memory import memory_of
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, map_values, row_major
from qimeng.graph.state import is_state
from qimeng.spec.fake import fake_tensors


@dataclass(frozen=True, order=True)
class Rewrite:
    """One rewrite of a graph, as data that makes it again.

    Attributes:
        rule: name of the rule.
        node: name of the operator that it was applied to.
    """

    rule: str
    node: str


class NoRewrite(Exception):
    """The rule does not apply to this operator; the message says why, with the numbers. Empty for another operator."""


class Rule(ABC):
    """One way to rewrite a graph; a pure function of the graph and one operator.

    The result must be equal over real numbers, and must be finite wherever the original is, unless a sum overflows.
    Rounding may differ: the judge decides about that.

    Attributes:
        name: unique name.
        option: option of the action `algebra` that applies it.
        packets: operators that it may apply to; empty for all.
    """

    name: str
    option: str
    packets: tuple[str, ...]

    @abstractmethod
    def rewrite(self, edit: Edit, node: Node) -> None:
        """Rewrite the graph at `node`, by calls of `edit`.

        Raises:
            NoRewrite: it does not apply.
        """


class Edit:
    """The graph in the hands of a rule.

    Args:
        graph: before.
        node: name of the operator that is rewritten; new operators stand before it.
        rule: name of the rule, for the names of new operators.
    """

    def __init__(self, graph: OpGraph, node: str, rule: str):
        self.graph, self._at, self._rule = graph, node, rule
        self._nodes, self._added = dict(graph.nodes), list[Node]()
        self._instead: dict[Value, Value] = {}
        self._results_stay, self._results = False, dict[Value, Value]()

    # -- what a rule asks

    def meta(self, value: Value) -> Meta:
        """Shape, stride and dtype of `value`, which may be new."""
        meta = self._nodes[value.node].metas[value.port]
        assert meta is not None
        return meta

    def maker(self, value: Any) -> Node:
        """The operator or source that yields `value`.

        Raises:
            NoRewrite: it is no tensor.
        """
        if not isinstance(value, Value):
            raise NoRewrite("")
        return self._nodes[value.node]

    def alone(self, value: Value, reader: str) -> None:
        """Make sure that nothing but `reader` needs `value`.

        Raises:
            NoRewrite: something does.
        """
        others = [n for n in self.graph.users().get(value, []) if n != reader]
        if value in self.graph.results():
            raise NoRewrite(f"{value.node} is a result itself")
        if others:
            raise NoRewrite(f"{value.node} is read by {len(others)} other operator(s), the first is {others[0]}")

    def is_state(self, value: Any) -> bool:
        """Whether it depends on parameters and buffers alone."""
        return isinstance(value, Value) and is_state(self.graph, value)

    # -- what a rule does

    def op(self, target: str, *args: Any, **kwargs: Any) -> Value:
        """A new operator with one result.

        Args:
            target: such as ``"aten.mul.Tensor"``.
            args: positional arguments.
            kwargs: keyword arguments.
        """
        name = f"{self._at}__{self._rule}{len(self._added)}"
        meta = self._meta_of(target, args, kwargs)
        node = Node(name, "op", target, args, tuple(kwargs.items()), (meta,))
        self._nodes[name] = node
        self._added.append(node)
        return Value(name)

    def loop(self, loop: Loop, values: Sequence[Value], packet: str = PACKET) -> tuple[Value, ...]:
        """A new loop over steps.

        Args:
            loop: what it computes.
            values: its inputs.
            packet: which kind of loop.
        """
        name = f"{self._at}__{self._rule}{len(self._added)}"
        node = loop.node(name, values, [self.meta(v) for v in values], packet)
        self._nodes[name] = node
        self._added.append(node)
        return tuple(Value(name, port) for port in range(len(node.metas)))

    def instead(self, old: Value, new: Value) -> None:
        """Have every reader of `old` read `new`.

        Raises:
            NoRewrite: their shapes, dtypes or strides differ.
        """
        was, now = self.meta(old), self.meta(new)
        if was.shape == now.shape and was.dtype == now.dtype and was.stride != now.stride:
            if not was.is_contiguous:
                new = self._laid_out(new, was)
            elif all(n == 1 or a == b for n, a, b in zip(was.shape, was.stride, now.stride, strict=True)):
                new = self.op("aten.view.default", new, was.shape)
            else:
                new = self.op("aten.clone.default", new, memory_format=torch.contiguous_format)
            now = self.meta(new)
        if was != now:
            raise NoRewrite(f"{old.node} has {was}, the rewritten one {now}")
        self._instead[old] = new

    def _laid_out(self, value: Value, like: Meta) -> Value:
        """A copy of `value` whose dimensions lie in memory in the order of those of `like`."""
        order = sorted(range(len(like.shape)), key=lambda d: (-like.stride[d], d))
        turned = self.op("aten.permute.default", value, order)
        copy = self.op("aten.clone.default", turned, memory_format=torch.contiguous_format)
        return self.op("aten.permute.default", copy, [order.index(d) for d in range(len(order))])

    def view_instead(self, old: Value, new: Value) -> None:
        """Have every reader of `old` read `new`, a view with other strides; what they yield may have others as well.

        Raises:
            NoRewrite: their shapes or dtypes differ.
        """
        was, now = self.meta(old), self.meta(new)
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            raise NoRewrite(f"{old.node} has {was}, the rewritten one {now}")
        self._instead[old] = new

    def results_stay(self) -> None:
        """Copy a result that would get other strides into those that it has."""
        self._results_stay = True

    def done(self) -> OpGraph:
        """The graph after it; operators that nothing needs any more are gone.

        Raises:
            NoRewrite: an operator does not take the strides that it would get, or a result would have others, or would
                share memory where it does not now.
        """
        added = {n.name for n in self._added}

        def current(value: Value) -> Value:
            return self._instead.get(value, value)

        nodes: dict[str, Node] = {}
        for node in self.graph.nodes.values():
            if node.name == self._at:
                nodes |= {n.name: n for n in self._added}
            if node.kind == "op":
                kwargs = tuple((k, map_values(v, current)) for k, v in node.kwargs)
                changed = replace(node, args=map_values(node.args, current), kwargs=kwargs)
                node = node if changed == node else changed
            nodes[node.name] = self._with_metas(node, nodes)
        assert added <= set(nodes)
        for value in self.graph.results():
            was, now = self.graph.meta(value), nodes[current(value).node].metas[current(value).port]
            if was != now and self._results_stay and now is not None and was.shape == now.shape:
                self._nodes |= {current(value).node: nodes[current(value).node]}
                nodes |= self._copied_back(value, current(value))
                continue
            if was != now:
                raise NoRewrite(f"the result {value.node} has {was}, the rewritten one {now}")

        def result(value: Value) -> Value:
            return self._results.get(value, current(value))

        self._check_memory([(v, memory_of(nodes, result(v))) for v in self.graph.results()], nodes)
        outputs = tuple(result(o) if isinstance(o, Value) else o for o in self.graph.outputs)
        mutations = tuple((key, result(v)) for key, v in self.graph.mutations)
        return without_dead(replace(self.graph, nodes=nodes, outputs=outputs, mutations=mutations, settles=True))

    # -- parts

    def _copied_back(self, old: Value, new: Value) -> dict[str, Node]:
        """A copy of `new` with the strides of the result `old`, in whose place it is; its readers keep what they read.

        Raises:
            NoRewrite: the result has gaps, or elements that share memory.
        """
        was, made = self.graph.meta(old), dict[str, Node]()
        order = sorted(range(len(was.shape)), key=lambda d: (-was.stride[d], d))
        shape = tuple(was.shape[d] for d in order)
        if any(n > 1 and was.stride[d] != step for n, d, step in zip(shape, order, row_major(shape), strict=True)):
            raise NoRewrite(f"the result {old.node} has strides {was.stride}")
        turned = Meta(shape, row_major(shape), was.dtype)

        def add(target: str, operand: Value, meta: Meta, *args: Any, **kwargs: Any) -> Value:
            name = f"{old.node}__{self._rule}{old.port}_{len(made)}"
            made[name] = Node(name, "op", target, (operand, *args), tuple(kwargs.items()), (meta,))
            return Value(name)

        if order == list(range(len(order))):
            self._results[old] = add("aten.clone.default", new, was, memory_format=torch.contiguous_format)
            return made
        now = self._metas_of("aten.permute.default", (new, order), {})[0]
        assert now is not None
        copy = add("aten.permute.default", new, now, order)
        copy = add("aten.clone.default", copy, turned, memory_format=torch.contiguous_format)
        self._results[old] = add("aten.permute.default", copy, was, [order.index(d) for d in range(len(order))])
        return made

    def _check_memory(self, results: Sequence[tuple[Value, Value]], nodes: dict[str, Node]) -> None:
        """Check that no result becomes a view of a source or of another result, given each with its memory afterwards.

        Raises:
            NoRewrite: one does.
        """
        held: dict[Value, Value] = {}
        for value, after in results:
            before = memory_of(self.graph.nodes, value)
            first = held.setdefault(after, before)
            if first != before or nodes[after.node].kind != "op" and after != before:
                raise NoRewrite(
                    f"the result {value.node} has memory of its own, the rewritten one that of {after.node}"
                )

    def _with_metas(self, node: Node, nodes: dict[str, Node]) -> Node:
        """`node` with the shapes and strides that it has where its operands are those of `nodes`."""
        if node.kind != "op" or node.name not in self.graph.nodes:
            return node
        before = self.graph.nodes[node.name].operands()
        was = [self.graph.nodes[v.node].metas[v.port] for v in before]
        if was == [nodes[v.node].metas[v.port] for v in node.operands()]:
            return node
        if node.literal is not None:
            raise NoRewrite(f"{node.name} is made for the strides of its operands")
        self._nodes |= {v.node: nodes[v.node] for v in node.operands()}
        metas = self._metas_of(node.target, node.args, dict(node.kwargs))
        if len(metas) != len(node.metas):
            raise NoRewrite(f"{node.name} yields {len(metas)} results for the rewritten operands")
        kept = [m if old is not None else None for m, old in zip(metas, node.metas, strict=True)]
        return replace(node, metas=tuple(kept))

    def _meta_of(self, target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Meta:
        (meta,) = self._metas_of(target, args, kwargs)
        assert meta is not None
        return meta

    def _metas_of(self, target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Meta | None, ...]:
        given = tuple(map_values(tuple(args), self.meta)), {k: map_values(v, self.meta) for k, v in kwargs.items()}
        key = f"{target} {given!r}"  # 2 and 2.0 are two keys
        if key not in _known:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[key] = _metas_computed(target, *given)
        return _known[key]


MOST_KNOWN = 10_000
"""Calls of operators whose shapes are kept: equal layers of a network ask for the same ones."""

_known: dict[str, tuple[Meta | None, ...]] = {}


def _metas_computed(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Meta | None, ...]:
    """What the operator yields for operands that are given by their `Meta`.

    Raises:
        NoRewrite: it does not take them.
    """
    packet, overload = target.removeprefix("aten.").rsplit(".", 1)
    function = getattr(getattr(torch.ops.aten, packet), overload)

    def fake(item: Any) -> Any:
        if isinstance(item, Meta):
            return torch.empty_strided(item.shape, item.stride, dtype=getattr(torch, item.dtype))
        return type(item)(fake(i) for i in item) if isinstance(item, (tuple, list)) else item

    with fake_tensors(), torch.no_grad():
        try:
            made = function(*fake(args), **{k: fake(v) for k, v in kwargs.items()})
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise NoRewrite(f"{target} does not fit: {str(error).splitlines()[0][:200]}") from error
    found = made if isinstance(made, (tuple, list)) else (made,)
    return tuple(_meta(t) if isinstance(t, torch.Tensor) else None for t in found)


def _meta(tensor: torch.Tensor) -> Meta:
    return Meta(tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))


def without_dead(graph: OpGraph) -> OpGraph:
    """Without operators and constants that no result needs; sources stay, since they are the module's interface."""
    needed = {v.node for v in graph.results()}
    for node in reversed(graph.nodes.values()):
        if node.name in needed:
            needed.update(v.node for v in node.operands())
    kept = {n.name: n for n in graph.nodes.values() if n.name in needed or n.kind not in ("op", "constant")}
    return replace(graph, nodes=kept)


def sites(graph: OpGraph, rule: Rule) -> Iterator[Node]:
    """The operators that `rule` may apply to, in topological order."""
    return (n for n in graph.ops() if not rule.packets or n.packet in rule.packets)


__all__ = ["Edit", "NoRewrite", "Rewrite", "Rule", "row_major", "sites", "without_dead"]
