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
    """`graph`, where each ``cat`` of all steps of a result of the operator `loop` is a view or one copy of it.

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
    """What `node`, a ``cat``, is of the stacked result; None where it is something else."""
    meta = node.metas[0]
    assert meta is not None
    parts = [nodes[v.node] for v in node.args[0]]
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(meta.shape)
    apart = all(n.target == "aten.unsqueeze.default" and n.args[1] % len(meta.shape) == dim for n in parts)
    steps = [nodes[n.args[0].node] for n in parts] if apart else parts
    whole = steps[0].args[0] if steps[0].args else None
    if not isinstance(whole, Value) or whole.node != loop:
        return None
    stacked = nodes[loop].metas[whole.port]
    if stacked is None or len(steps) != stacked.shape[0] or not meta.is_contiguous:
        return None
    if any(n.target != "aten.select.int" or n.args != (whole, 0, k) for k, n in enumerate(steps)):
        return None
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(stacked.shape)))
    found: list[Node] = []
    if dim:
        turned = Meta(tuple(stacked.shape[d] for d in order), tuple(stacked.stride[d] for d in order), stacked.dtype)
        copied = replace(turned, stride=row_major(turned.shape))
        found.append(Node(f"{node.name}__turned", "op", "aten.permute.default", (whole, order), metas=(turned,)))
        contiguous = (("memory_format", torch.contiguous_format),)
        whole = Value(f"{node.name}__copied")
        turn = (Value(found[0].name),)
        found.append(Node(whole.node, "op", "aten.clone.default", turn, contiguous, (copied,)))
    return [*found, Node(node.name, "op", "aten.view.default", (whole, meta.shape), metas=(meta,))]


__all__ = ["apart", "stacked_again"]
