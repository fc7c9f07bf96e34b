"""Writes of one element in each row, as a choice between two tensors.

``y[torch.arange(n), labels] -= 1`` of n rows is ``torch.where(positions == labels[:, None], y - 1, y)``. No row is
meant twice, so that nothing races. Deals in exported graphs (torch.fx). Knows nothing about what reads the result.
"""

from __future__ import annotations

from typing import Any

import torch

from qimeng.graph.experts.nodes import is_dynamic, is_node, made_node, size

aten = torch.ops.aten


def choose_in_rows(exported: Any) -> None:
    """Rewrite a decomposed `torch.export.ExportedProgram` in place; other writes stay as they are."""
    graph = exported.graph
    puts = [n for n in graph.nodes if n.target is aten.index_put.default and _is_one_each(n)]
    for put in puts:
        _rewrite(put)
    if puts:
        graph.eliminate_dead_code()
        exported.graph_module.recompile()


def _is_one_each(put: Any) -> bool:
    """Whether it writes one element (or what lies behind it) in each row, in order."""
    into, indices, values = put.args[:3]
    if len(indices) != 2 or not all(map(is_node, indices)) or any(map(is_dynamic, (into, *indices, values))):
        return False
    rows, columns = indices
    counts_up = rows.target is aten.arange.start_step and list(rows.args) in ([0, n := size(into)[0]], [0, n, 1])
    whole = columns.meta["val"].dtype in (torch.int64, torch.int32)
    return counts_up and whole and size(columns) == size(rows)


def _rewrite(put: Any) -> None:
    graph, (into, (_, columns), values) = put.graph, put.args[:3]
    count, behind = size(into)[1], len(size(into)) - 2
    like = {"dtype": columns.meta["val"].dtype, "device": columns.meta["val"].device, "pin_memory": False}
    with graph.inserting_before(put):

        def made(target: Any, *args: Any, **kwargs: Any) -> Any:
            return made_node(graph, target, *args, **kwargs)

        turned = made(aten.add.Tensor, columns, count)
        places = made(aten.where.self, made(aten.lt.Scalar, columns, 0), turned, columns)
        every = made(aten.arange.start_step, 0, count, 1, layout=torch.strided, **like)
        hit = made(aten.eq.Tensor, made(aten.unsqueeze.default, places, 1), every)
        for _ in range(behind):
            hit = made(aten.unsqueeze.default, hit, -1)
        if len(size(values)) > behind:  # one for each row, or the same for all
            values = made(aten.unsqueeze.default, values, 1)
        if put.args[3:] == (True,) or put.kwargs.get("accumulate"):
            values = made(aten.add.Tensor, into, values)
        chosen = made(aten.where.self, hit, values, into)
    put.target, put.args, put.kwargs, put.meta["val"] = chosen.target, chosen.args, {}, chosen.meta["val"]


__all__ = ["choose_in_rows"]
