"""Operators that write in place, as operators that give a new tensor; torch.export records what the code calls.

`y += bias` and `relu_(y)` change a tensor that the program made itself. Where nothing else sees that memory, the same
operator without the underscore gives what later nodes read. Deals in nodes of an exported program. Knows nothing about
what becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg

FRESH = "linear matmul conv1d conv2d conv3d conv_transpose1d batch_norm layer_norm group_norm instance_norm".split()
"""Operators made of others that give memory of their own. Of the rest of that kind nobody says so: `dropout` may give
what it is given."""


def without_writes(exported: Any) -> None:
    """Replace what writes in place in a `torch.export.ExportedProgram`, where that changes nothing else."""
    graph, renamed = exported.graph, dict[str, str]()
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(place):
        pure = _pure(node.target) if node.op == "call_function" else None
        if pure is None or not _owned(node, place) or not _keeps_kind(pure, node):
            continue
        written = node.args[0]
        with graph.inserting_before(node):
            made = graph.call_function(pure, node.args, node.kwargs)
        made.meta, place[made] = copy(node.meta), place[node]
        for user in [u for u in written.users if u is not made and place[u] > place[node]]:
            user.replace_input_with(written, made)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        renamed |= {node.name: made.name, written.name: made.name}
    outputs = {n.name for n in graph.output_node().all_input_nodes}
    for spec in exported.graph_signature.output_specs:
        name = getattr(spec.arg, "name", None)
        while name in renamed and name not in outputs:
            name = renamed[name]
        if name is not None and name != spec.arg.name:
            spec.arg = replace(spec.arg, name=name)


def _pure(target: Any) -> Any:
    """The operator that gives what `target` writes into its first argument; None where `target` is no such operator."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or not target._schema.is_mutable:
        return None
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    pure = getattr(packet, target._overloadname, None)
    if pure is None or pure._schema.is_mutable or torch.Tag.nondeterministic_seeded in pure.tags:
        return None
    first, *others = target._schema.arguments
    same = [a.name for a in pure._schema.arguments] == [a.name for a in target._schema.arguments]
    writes = first.alias_info is not None and first.alias_info.is_write
    return pure if same and writes and not any(a.alias_info for a in others) else None


def _owned(node: Node, place: Mapping[Node, int]) -> bool:
    """Whether the tensor that `node` writes into is the program's own, and read only by name afterwards."""
    written = node.args[0]
    if not isinstance(written, Node) or written.op != "call_function" or _may_share(written):
        return False
    views = [u for u in written.users if place[u] < place[node] and _may_share(u)]
    while views:  # that were made before: they would show what is written
        view = views.pop()
        if any(place[u] > place[node] for u in view.users):
            return False
        views += [u for u in view.users if _may_share(u)]
    return True


def _keeps_kind(pure: Any, node: Node) -> bool:
    """Whether `pure` gives a tensor like the one that `node` writes into: another dtype is not written into it."""
    written = node.args[0].meta["val"]  # type: ignore[union-attr]
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with written.fake_mode if isinstance(written, FakeTensor) else nullcontext():
        found = pure(*args, **kwargs)
    return (found.shape, found.stride(), found.dtype) == (written.shape, written.stride(), written.dtype)


def _may_share(node: Node) -> bool:
    """Whether a node's result may lie in the memory of what it reads."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op != "output"
    if any(r.alias_info is not None for r in target._schema.returns):
        return True
    made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return made_of_others and target.overloadpacket.__name__ not in FRESH


__all__ = ["without_writes"]
