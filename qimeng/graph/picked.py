"""What a tensor of one number picks along a dimension, as a gather.

PyTorch asks the tensor i for its number in ``x[:, i]``, which waits for the GPU. Deals in exported graphs (torch.fx).
Knows nothing about what reads the result.
"""

from __future__ import annotations

from typing import Any

import torch

from qimeng.graph.experts.nodes import is_dynamic, is_node, made_node, size
from qimeng.graph.parts import IGNORED

aten = torch.ops.aten


def gather_picked(exported: Any) -> None:
    """Rewrite a decomposed `torch.export.ExportedProgram` in place; other uses of such numbers stay as they are."""
    graph = exported.graph
    picks = [n for n in graph.nodes if n.target is aten.select.int and _is_picked(n)]
    for node in picks:
        x, dim, number = node.args
        with graph.inserting_before(node):
            place = made_node(graph, aten.reshape.default, number.args[0], [])
            made = made_node(graph, aten.index.Tensor, x, [*[None] * (dim % len(size(x))), place])
        if _reads_alike(node, made.meta["val"]):
            node.target, node.args, node.meta["val"] = made.target, made.args, made.meta["val"]
    if picks:
        for node in [n for n in graph.nodes if str(n.target) in IGNORED]:
            graph.erase_node(node)
        graph.eliminate_dead_code()
        exported.graph_module.recompile()


def _is_picked(node: Any) -> bool:
    x, number = node.args[0], node.args[2]
    return (
        is_node(number)
        and number.target is aten._local_scalar_dense.default
        and number.args[0].meta["val"].dtype in (torch.int64, torch.int32)
        and not is_dynamic(x)
    )


def _reads_alike(node: Any, made: Any) -> bool:
    """Whether `made`, which lies in memory of its own, gives results of the same strides as `node`, a view."""
    value = node.meta["val"]
    if made.stride() == value.stride():
        return True
    computed = all(isinstance(u.target, torch._ops.OpOverload) and not u.target.is_view for u in node.users)
    with value.fake_mode:
        return computed and made.stride() == torch.empty_like(value).stride()


__all__ = ["gather_picked"]
