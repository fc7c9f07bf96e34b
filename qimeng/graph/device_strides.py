"""Gives a graph the memory layout that its attentions have on a GPU.

A graph is captured on the CPU. There PyTorch's attention returns the layout of the queries; on a GPU it depends on the
kernel that PyTorch chooses: the memory-efficient one, taken for fp32 and for masks, always puts the heads of one
position side by side. What reads or writes such a tensor must know, and so must what is computed from it. Deals in
strides. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from qimeng.graph.convert import CaptureError
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, map_values, row_major
from qimeng.spec.fake import fake_tensors

ATTENTION = "aten.scaled_dot_product_attention"
"""The operator, which is captured whole."""

Metas = tuple[Meta | None, ...]

Rule = Callable[[OpGraph, Node], Metas]
"""What an attention returns on the device, given a graph with the layouts of what it reads."""


def with_strides(graph: OpGraph, rule: Rule) -> OpGraph:
    """`graph` with its attentions laid out by `rule`, and what is computed from them laid out as PyTorch then does.

    Raises:
        CaptureError: an operator does not run on the other layout; the message names it.
    """
    nodes, moved = dict(graph.nodes), set[Value]()
    found = replace(graph, nodes=nodes)
    for node in graph.ops():
        if node.packet == ATTENTION:
            metas = rule(found, node)
        elif moved.intersection(node.operands()) and node.literal is None:
            node, metas = _run_again(found, node)
        else:
            continue
        nodes[node.name] = replace(node, metas=metas)
        moved |= {Value(node.name, i) for i, m in enumerate(metas) if m != graph.nodes[node.name].metas[i]}
    return found if moved else graph


def seen_on(device: str) -> Rule:
    """The rule of `device`, learnt from one call of each attention with operands of the same layout."""

    def rule(graph: OpGraph, node: Node) -> Metas:
        try:
            with torch.no_grad():
                return _metas(node, _call(graph, node, device))
        except torch.OutOfMemoryError:  # the judge will say so
            return node.metas

    return rule


def heads_inside(graph: OpGraph, node: Node) -> Metas:
    """The memory-efficient kernel's rule where PyTorch takes it on recent GPUs: for fp32 operands and for masks.

    It stands in for a GPU that is not there, as when stored answers of one are replayed.
    """
    found, query = node.metas[0], graph.meta(node.operands()[0])
    masked = len(node.args) > 3 and node.args[3] is not None or dict(node.kwargs).get("attn_mask") is not None
    grouped = dict(node.kwargs).get("enable_gqa", False)
    if found is None or len(found.shape) != 4 or grouped or not (masked or query.dtype == "float32"):
        return node.metas
    batch, heads, rows, columns = found.shape
    b, s, h, d = row_major((batch, rows, heads, columns))
    return (Meta(found.shape, (b, h, s, d), found.dtype), *node.metas[1:])


def _run_again(graph: OpGraph, node: Node) -> tuple[Node, Metas]:
    """The operator, and the layouts of its results; one that copies where a view cannot be had any more."""
    try:
        with fake_tensors():
            return node, _metas(node, _call(graph, node, "cpu"))
    except Exception as error:  # noqa: BLE001 - operators raise errors of any class
        if node.target == "aten.view.default":
            return _run_again(graph, replace(node, target="aten.reshape.default"))
        raise CaptureError(
            f"{node.target} does not run on the memory layout that attention has here: {error}"
        ) from None


def _call(graph: OpGraph, node: Node, device: str) -> Any:
    def tensor(value: Value) -> Any:
        source, meta = graph.nodes[value.node], graph.meta(value)
        if source.kind == "scalar":
            return 1.0
        if source.kind == "constant":
            return torch.scalar_tensor(source.literal, dtype=getattr(torch, meta.dtype))
        return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype), device=device)

    namespace, name, overload = node.target.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return operator(*map_values(node.args, tensor), **{k: map_values(v, tensor) for k, v in node.kwargs})


def _metas(node: Node, results: Any) -> Metas:
    """The metas of `node` with the strides of `results`."""
    tensors = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(
        replace(meta, stride=tuple(x.stride())) if meta is not None and isinstance(x, torch.Tensor) else meta
        for meta, x in zip(node.metas, tensors, strict=True)
    )


__all__ = ["Rule", "heads_inside", "seen_on", "with_strides"]
