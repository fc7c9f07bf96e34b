"""Decomposes an exported program by decomposing each kind of operator in it once.

torch.export traces the whole program a second time for its decompositions, and prepares for much that a graph without
gradients does not have. A loop over steps has thousands of operators and few kinds of them. Here one call of each kind
is traced by itself; what became of it then takes the place of every call of its kind. What is known to stay as it is
needs no such call. Deals in graphs of torch.fx. Knows nothing about which operators are taken apart.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree

from qimeng.graph.parts import IGNORED
from qimeng.spec.fake import fake_tensors

Trace = Callable[[Sequence[Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]], Sequence[torch.Tensor]], Any]
"""Runs functions of tensors and says what they become: see `qimeng.graph.decompose.traced`."""

RELATIVE = ("as_strided", "as_strided_scatter")
"""Operators that read where in its memory a tensor begins, which does not belong to the kind of a call here."""

UPDATING = ("batch_norm", "instance_norm")
"""Operators that update the statistics they are given, their arguments 3 and 4, if argument 5 says so."""

PLACES = (torch.ops.aten.select.int, torch.ops.aten.slice.Tensor)
"""Operators that read a place of a tensor, which stays as it is: the arguments after the second."""

DETACHING = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
"""Operators that change no value, also where they are said to change a tensor: `torch.tensor` in a module."""

LISTS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
"""Operators that do the same to each tensor of a list, and then one thing to all; `FEW` stand for a longer list."""

FEW = 2


class NotByKinds(Exception):
    """The program has nodes whose effect is not in their results, or whose parts depend on more than their kind."""


@dataclass
class _Call:
    """One kind of call.

    Attributes:
        node: the first of them.
        target: the operator.
        args: leaves of the arguments, with `_Input` where a tensor comes in.
        tree: how they are put together.
        inputs: facts about the tensors that come in.
        outputs: facts about those that it gives.
        moves: whether calls of this kind differ in the place that they read (`PLACES`).
        listed: whether calls of this kind differ in the length of their list (`LISTS`).
        stays: whether a call stays as it is, so that nothing takes its place.
        parts: nodes that take the place of a call, and those that nothing needs, for their names; filled in later, as
            the next one.
        results: what the call gives: nodes among the parts and among the inputs.
        sources: the inputs, as the parts know them.
    """

    node: Any
    target: Any
    args: list[Any]
    tree: Any
    inputs: list[tuple[Any, ...]]
    outputs: list[tuple[Any, ...]]
    moves: bool
    listed: bool
    stays: bool = False
    parts: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    sources: list[Any] = field(default_factory=list)

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the operator gives for `tensors`."""
        leaves = [tensors[x.number] if isinstance(x, _Input) else x for x in self.args]
        args, kwargs = _pytree.tree_unflatten(leaves, self.tree)
        return self.target(*args, **kwargs)


@dataclass(frozen=True)
class _Input:
    """Tensor `number` of a call."""

    number: int


def decompose_once(
    exported: Any,
    trace: Trace,
    stays: Callable[[Any], bool] = lambda operator: False,
) -> Any:
    """`exported`, a `torch.export.ExportedProgram`, decomposed in place.

    Args:
        exported: the program.
        trace: what calls become.
        stays: whether an operator is known to stay as it is.

    Raises:
        NotByKinds: not possible here. The program is as it was.
    """
    kinds: dict[Any, _Call] = {}
    calls: dict[Any, tuple[_Call, list[Any]]] = {}
    for node in exported.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and str(node.target) not in IGNORED:
            calls[node] = _kind_of(node, kinds)
        elif node.op == "get_attr":
            raise NotByKinds("a graph inside the graph")
    for kind in kinds.values():
        one = isinstance(kind.node.meta["val"], torch.Tensor)
        kind.stays = one and not kind.listed and stays(kind.target)
    others = [kind for kind in kinds.values() if not kind.stays]
    if others:
        _decompose(others, trace)
    graph, place = _expanded(exported.graph, calls)
    graph.eliminate_dead_code()
    signature = exported.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):  # a copy of `input` gets another name
        if (name := getattr(spec.arg, "name", None)) in place:
            spec.arg = replace(spec.arg, name=place[name])
    exported.graph_module.graph = graph
    return exported


def _kind_of(node: Any, kinds: dict[Any, _Call]) -> tuple[_Call, list[Any]]:
    """The kind of a call, entered into `kinds`, and the tensors that go in."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable and target not in DETACHING:
        raise NotByKinds(f"{target} is no operator of tensors that it leaves as they are")
    if target.overloadpacket.__name__ in UPDATING and node.args[5] and any(isinstance(x, Node) for x in node.args[3:5]):
        raise NotByKinds(f"{target} updates its statistics, though its schema does not say so")
    if target.overloadpacket.__name__ in RELATIVE:
        raise NotByKinds(str(target))
    moves, listed = _moves(node), _is_long_list(node)
    given = (node.args[0][:FEW], *node.args[1:]) if listed else node.args
    leaves, tree = _pytree.tree_flatten((given, node.kwargs))
    tensors = {x: _Input(i) for i, x in enumerate(dict.fromkeys(x for x in leaves if isinstance(x, Node)))}
    args = [tensors[x] if isinstance(x, Node) else x for x in leaves]
    inputs = [_facts(x.meta.get("val")) for x in tensors]
    outputs = [_facts(value) for value in _pytree.tree_leaves(node.meta.get("val"))]
    literals = tuple((type(x), repr(x)) for x in args[: 2 if moves else None])
    key = target, tree, tuple(inputs), tuple(outputs), moves, listed, literals
    if key not in kinds:
        kinds[key] = _Call(node, target, args, tree, inputs, outputs, moves, listed)
    return kinds[key], list(node.args[0] if listed else tensors)


def _facts(value: Any) -> tuple[Any, ...]:
    """What decides on the decomposition of an operator that is given `value`."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise NotByKinds("a value is no plain tensor")
    if not all(type(n) is int for n in (*value.shape, *value.stride())):
        raise NotByKinds("a size depends on data")
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _moves(node: Any) -> bool:
    """Whether `node` reads a place of a tensor that may be another in the next step of a loop."""
    if node.target not in PLACES or node.kwargs:
        return False
    first, *last = node.args[2:]
    size = node.args[0].meta["val"].shape[node.args[1]]
    return type(first) is int and 0 <= first < size and all(type(i) is int and first < i <= size for i in last)


def _is_long_list(node: Any) -> bool:
    """Whether `node` takes a list of many different tensors of which the same is known."""
    if node.target not in LISTS or node.kwargs:
        return False
    tensors = node.args[0]
    alike = len({_facts(x.meta.get("val")) for x in tensors}) == 1
    return alike and FEW < len(tensors) == len(set(tensors)) and node.meta["val"].is_contiguous()


def _decompose(calls: Sequence[_Call], trace: Trace) -> None:
    """Fill in what each call becomes."""
    pool: dict[tuple[Any, int], int] = {}
    numbers = []
    for call in calls:
        seen: Counter[Any] = Counter()
        number = []
        for facts in call.inputs:
            number.append(pool.setdefault((facts, seen[facts]), len(pool)))
            seen[facts] += 1
        numbers.append(number)

    def function(call: _Call, number: Sequence[int]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        return lambda tensors: _pytree.tree_leaves(call.run([tensors[i] for i in number]))

    try:
        with fake_tensors(), torch.no_grad():
            made = [torch.empty_strided(shape, stride, dtype=t, device=place) for (shape, stride, t, place), _ in pool]
            graph, parts = trace([function(c, n) for c, n in zip(calls, numbers, strict=True)], made)
    except Exception as error:  # torch's tracing raises many classes of its own, none public; the slow way is taken
        raise NotByKinds("the calls cannot be traced by themselves") from error
    if any(n.op == "get_attr" for n in graph.nodes):
        raise NotByKinds("an operator makes a tensor of its own")
    sources = [n for n in graph.nodes if n.op == "placeholder"]
    results = iter(graph.output_node().args[0])
    for call, number, own in zip(calls, numbers, parts, strict=True):
        call.results = [next(results) for _ in call.outputs]
        if not call.listed and [_facts(n.meta["val"]) for n in call.results] != call.outputs:
            raise NotByKinds(f"{call.target} gives another layout when taken apart")
        call.sources = [sources[i] for i in number]
        needed = _behind(call.results, set(call.sources))
        if not needed <= set(own):
            raise NotByKinds(f"{call.target} needs what belongs to another call")
        call.parts = [p for p in own if p in needed] if call.moves or call.listed else list(own)
        if call.moves and [(p.target, list(p.args[1:])) for p in call.parts] != [(call.target, call.args[1:])]:
            raise NotByKinds(f"{call.target} is taken apart")
        if call.listed and not _is_each_then_all(call):
            raise NotByKinds(f"{call.target} is taken apart in another way")


def _in_three(call: _Call) -> tuple[list[Any], Any, list[Any]]:
    """What became of a call with a list: an operator for each tensor or none, one of all these, a view or none."""
    join = next((i for i, p in enumerate(call.parts) if p.args and isinstance(p.args[0], (list, tuple))), None)
    if join is None:
        raise NotByKinds(f"{call.target} does not stay one operator of all tensors")
    return call.parts[:join], call.parts[join], call.parts[join + 1 :]


def _is_each_then_all(call: _Call) -> bool:
    """Whether what became of a call with a list says what becomes of one with a longer list."""
    each, join, after = _in_three(call)
    alike = all(
        p.target is each[0].target and p.args == (x, *each[0].args[1:])
        for p, x in zip(each, call.sources, strict=False)
    )
    view = [(p.target, p.args[0], tuple(p.args[1]) == tuple(p.meta["val"].shape)) for p in after]
    return (
        alike
        and len(each) in (0, FEW)
        and (join.target, list(join.args[0])) == (torch.ops.aten.cat.default, each or call.sources)
        and view in ([], [(torch.ops.aten.view.default, join, True)])
        and call.results == [(after or [join])[0]]
        and join.meta["val"].is_contiguous()
        and not any(p.kwargs for p in call.parts)
    )


def _behind(results: Iterable[Any], sources: set[Any]) -> set[Any]:
    """The operators that `results` are computed from, and these, down to `sources`."""
    found, waiting = set[Any](), list(results)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in sources:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _expanded(graph: Graph, calls: dict[Any, tuple[_Call, list[Any]]]) -> tuple[Graph, dict[str, str]]:
    """`graph` with the parts of every call in its place, and the new names of its nodes."""
    made = Graph()
    place: dict[Any, Any] = {}
    for node in graph.nodes:
        if node in calls:
            call, tensors = calls[node]
            results = _parts_of(made, node, call, [place[t] for t in tensors])
            place[node] = results if isinstance(node.meta["val"], (list, tuple)) else results[0]
        elif node.op == "call_function" and node.target is operator.getitem:
            place[node] = place[node.args[0]][node.args[1]]
        elif node.op in ("placeholder", "output"):
            place[node] = made.node_copy(node, place.__getitem__)
    return made, {n.name: p.name for n, p in place.items() if isinstance(p, Node)}


def _parts_of(graph: Graph, node: Any, call: _Call, tensors: Sequence[Any]) -> list[Any]:
    """Adds the parts of `node`, a call of the kind `call`, to `graph`; returns its results."""
    if call.listed:
        return [_joined(graph, node, call, tensors)]
    if call.stays:
        inside = dict(zip(dict.fromkeys(node.all_input_nodes), tensors, strict=True))
        args, kwargs = _pytree.tree_map_only(Node, inside.__getitem__, (node.args, node.kwargs))
        return [_call(graph, call.target, args, kwargs, node.meta["val"])]
    inside = dict(zip(call.sources, tensors, strict=True))
    for part in call.parts:
        args, kwargs = _pytree.tree_map_only(Node, inside.__getitem__, (part.args, part.kwargs))
        inside[part] = _copy(graph, part, (*args[:2], *node.args[2:]) if call.moves else args, kwargs)
    return [inside[n] for n in call.results]


def _joined(graph: Graph, node: Any, call: _Call, tensors: Sequence[Any]) -> Any:
    """Adds the parts of `node`, a call with a long list, to `graph`; returns its result."""
    each, join, after = _in_three(call)
    pieces = [_copy(graph, each[0], (x, *each[0].args[1:]), {}) for x in tensors] if each else tensors
    made = _copy(graph, join, (list(pieces), *join.args[1:]), {})
    shape = list(join.meta["val"].shape)
    dim = join.args[1] if len(join.args) > 1 else 0
    shape[dim] = shape[dim] // FEW * len(tensors)
    made.meta["val"] = join.meta["val"].new_empty(shape)
    for view in after:
        shape = list(node.meta["val"].shape)
        whole, made = made, _copy(graph, view, (made, shape), {})
        made.meta["val"] = whole.meta["val"].new_empty(shape)
    if _facts(made.meta["val"]) not in call.outputs:
        raise NotByKinds(f"{call.target} gives another layout when taken apart")
    return made


def _copy(graph: Graph, part: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The call `part` with other arguments, in `graph`."""
    return _call(graph, part.target, args, kwargs, part.meta.get("val"))


def _call(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any) -> Any:
    """A call in `graph` that gives what is like `value`, named as torch.export names what it traces."""
    packet = getattr(target, "overloadpacket", target)
    made = graph.create_node("call_function", target, args, dict(kwargs), graph._target_to_str(packet.__name__))
    made.meta["val"] = value
    return made


__all__ = ["DETACHING", "NotByKinds", "Trace", "decompose_once"]
