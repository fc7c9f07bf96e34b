"""Takes stacks of the steps of a loop for what the loop has stacked already.

Deals in operators that read the steps of a loop, and in their memory. Knows nothing about how loops are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, map_values, row_major
from qimeng.graph.ops import VIEWS


def stacked_again(graph: OpGraph, loop: str) -> OpGraph:
    """`graph`, where all steps of a result of the operator `loop` in a ``cat`` are a view or one copy of that result.

    Args:
        graph: with the loop.
        loop: name of the loop, whose steps are read by ``select``.
    """
    nodes: dict[str, Node] = {}
    for node in graph.nodes.values():
        made = _whole(nodes, node, loop) if node.target == "aten.cat.default" else None
        nodes |= {n.name: n for n in made} if made else {node.name: node}
    read = {v.node for v in graph.results()}
    for node in reversed(nodes.values()):
        if node.kind != "op" or node.name in read:
            read.update(v.node for v in node.operands())
    kept = {name: n for name, n in nodes.items() if n.kind != "op" or name in read}
    return replace(graph, nodes=kept)


def apart(graph: OpGraph, steps: Sequence[str], last: Mapping[str, Value]) -> OpGraph:
    """`graph`, where no result shares the memory of stacked steps.

    Args:
        graph: with a loop.
        steps: operators that take one step of a stacked result.
        last: those of them that take the last step of a state, to the loop's own result for that.
    """
    users, results = graph.users(), set(graph.results())
    instead, nodes = dict[Value, Value](), dict[str, Node]()
    for node in graph.nodes.values():
        value = Value(node.name)
        if node.name not in steps:
            kwargs = tuple((k, map_values(v, lambda v: instead.get(v, v))) for k, v in node.kwargs)
            args = map_values(node.args, lambda v: instead.get(v, v))
            nodes[node.name] = replace(node, args=args, kwargs=kwargs) if node.kind == "op" else node
        elif node.name in last:
            instead[value] = last[node.name]
        elif value in results or any(graph.nodes[u].packet in VIEWS for u in users.get(value, ())):
            instead[value] = Value(f"{node.name}__copied")
            copy = Node(instead[value].node, "op", "aten.clone.default", (value,), metas=node.metas)
            nodes |= {node.name: node, copy.name: copy}
        else:
            nodes[node.name] = node
    outputs = tuple(instead.get(o, o) if isinstance(o, Value) else o for o in graph.outputs)
    mutations = tuple((key, instead.get(v, v)) for key, v in graph.mutations)
    return replace(graph, nodes=nodes, outputs=outputs, mutations=mutations)


def _whole(nodes: dict[str, Node], node: Node, loop: str) -> list[Node] | None:
    """What `node`, a ``cat``, is of the stacked result; None where it is something else.

    Where it joins all steps with others before or after them, the steps are one piece of it.
    """
    meta = node.metas[0]
    assert meta is not None
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(meta.shape)
    found = _run(nodes, node, loop, dim)
    if found is None or not meta.is_contiguous:
        return None
    begin, end, whole, back = found
    stacked = nodes[loop].metas[whole.port]
    assert stacked is not None
    made = [Node(f"{node.name}__back", "op", "aten.flip.default", (whole, (0,)), metas=(stacked,))] if back else []
    first = Value(made[0].name) if back else whole
    if end - begin == len(node.args[0]):
        return [*made, *_turned(node.name, first, stacked, dim, meta)]
    shape = (*meta.shape[:dim], _size(nodes, node.args[0][begin:end], dim), *meta.shape[dim + 1 :])
    piece = Meta(shape, row_major(shape), meta.dtype)
    made += _turned(f"{node.name}__steps", first, stacked, dim, piece)
    parts = (*node.args[0][:begin], Value(made[-1].name), *node.args[0][end:])
    return [*made, replace(node, args=(parts, *node.args[1:]))]


def _size(nodes: Mapping[str, Node], values: Sequence[Value], dim: int) -> int:
    metas = [nodes[v.node].metas[v.port] for v in values]
    return sum(m.shape[dim] for m in metas if m is not None)


def _run(nodes: Mapping[str, Node], node: Node, loop: str, dim: int) -> tuple[int, int, Value, bool] | None:
    """Which parts of a ``cat`` are all steps of a stacked result, of which, and whether the last step comes first."""
    parts = [nodes[v.node] for v in node.args[0]]
    meta = node.metas[0]
    rank = len(meta.shape) if meta is not None else 0
    apart = [n.target == "aten.unsqueeze.default" and n.args[1] % rank == dim for n in parts]
    steps = [nodes[n.args[0].node] if a else n for n, a in zip(parts, apart, strict=True)]
    read = [n.args if n.target == "aten.select.int" and n.args[0].node == loop else None for n in steps]
    for begin, first in enumerate(read):
        if first is None:
            continue
        whole = first[0]
        stacked = nodes[loop].metas[whole.port]
        count = stacked.shape[0] if stacked is not None else 0
        end = begin + count
        if end <= len(read) and len(set(apart[begin:end])) == 1 and first[2] in (0, count - 1):
            back = first[2] > 0
            if read[begin:end] == [(whole, 0, count - 1 - k if back else k) for k in range(count)]:
                return begin, end, whole, back
    return None


def _turned(name: str, whole: Value, stacked: Meta, dim: int, meta: Meta) -> list[Node]:
    """The stacked result with its steps in dimension `dim`, as an operator called `name`, and what goes before."""
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(stacked.shape)))
    found: list[Node] = []
    if dim:
        turned = Meta(tuple(stacked.shape[d] for d in order), tuple(stacked.stride[d] for d in order), stacked.dtype)
        copied = replace(turned, stride=row_major(turned.shape))
        found.append(Node(f"{name}__turned", "op", "aten.permute.default", (whole, order), metas=(turned,)))
        contiguous = (("memory_format", torch.contiguous_format),)
        whole = Value(f"{name}__copied")
        turn = (Value(found[0].name),)
        found.append(Node(whole.node, "op", "aten.clone.default", turn, contiguous, (copied,)))
    return [*found, Node(name, "op", "aten.view.default", (whole, meta.shape), metas=(meta,))]


__all__ = ["apart", "stacked_again"]
