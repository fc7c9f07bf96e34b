"""Attention masks that depend on no input: those that hide nothing are dropped, causal ones are named so.

A module may compute such a mask from positions at every call: Hugging Face's models do, under torch.export even where
they pass none in eager mode. Without it, PyTorch and templates take faster kernels, which need not read a mask and skip
the half of the keys that a causal one hides. Deals in graphs. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from qimeng.graph.opgraph import Node, OpGraph, Value, map_values
from qimeng.graph.rewrites.base import without_dead

ATTENTION = "aten.scaled_dot_product_attention"
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Of that operator, those by position."""

MOST = 1 << 25
"""Elements of an operator's result from which on it is not computed here (a mask of 5,792 x 5,792)."""


def with_named_masks(graph: OpGraph) -> OpGraph:
    """`graph` without attention masks that are True everywhere, and with ``is_causal`` in place of those that it means.

    A mask stays where it depends on an input, a parameter or a buffer, where it is random, or where it is large.
    """
    masked = list(_masked(graph))
    if not masked:
        return graph
    known: dict[Value, torch.Tensor | None] = {}
    nodes = dict(graph.nodes)
    with torch.no_grad():
        for node, mask in masked:
            value = constant(graph, mask, known)
            if value is None or value.dtype is not torch.bool:
                continue
            if bool(value.all()):
                nodes[node.name] = _without_mask(node, causal=False)
            elif _is_causal(value, *(graph.meta(v).shape[-2] for v in node.operands()[:2])):
                nodes[node.name] = _without_mask(node, causal=True)
    return graph if nodes == graph.nodes else without_dead(replace(graph, nodes=nodes))


def _masked(graph: OpGraph) -> Iterator[tuple[Node, Value]]:
    """Attentions with a mask and nothing else that says which keys are seen, and their masks."""
    for node in graph.ops():
        if node.packet == ATTENTION and (mask := mask_of(node)) is not None:
            yield node, mask


def mask_of(attention: Node) -> Value | None:
    """The mask of an attention; None without one, or where something else says which keys are seen as well."""
    given = dict(zip(ARGUMENTS, attention.args, strict=False)) | dict(attention.kwargs)
    mask = given.get("attn_mask")
    return mask if isinstance(mask, Value) and not given.get("is_causal") else None


def _without_mask(node: Node, causal: bool) -> Node:
    """`node` with what comes after the values by keyword, so that the mask can be left out."""
    given = dict(zip(ARGUMENTS[3:], node.args[3:], strict=False)) | dict(node.kwargs)
    given.pop("attn_mask")
    if causal:
        given["is_causal"] = True
    return replace(node, args=node.args[:3], kwargs=tuple(given.items()))


def _is_causal(mask: torch.Tensor, rows: int, keys: int) -> bool:
    """Whether `mask` hides the keys after each row; only where rows and keys are as many, else kernels disagree."""
    if rows != keys or mask.ndim < 2 or tuple(mask.shape[-2:]) != (rows, keys):
        return False
    return bool((mask == torch.ones(rows, keys, dtype=torch.bool).tril()).all())


def constant(
    graph: OpGraph, value: Value, known: dict[Value, torch.Tensor | None], most: int = MOST
) -> torch.Tensor | None:
    """What `value` is at every call; None where that is not known.

    Args:
        graph: the graph.
        value: one of its values.
        known: values that are known, and those that are not; gets those that are found.
        most: elements of an operator's result up to which it is computed.
    """
    if value not in known:
        known[value] = _computed(graph, graph.nodes[value.node], value.port, known, most)
    return known[value]


def _computed(
    graph: OpGraph, node: Node, port: int, known: dict[Value, torch.Tensor | None], most: int
) -> torch.Tensor | None:
    meta = node.metas[port]
    if node.kind != "op" or node.literal is not None or port or len(node.metas) > 1 or meta is None:
        return None
    function = _function(node.target)
    if function is None or any(constant(graph, v, known, most) is None for v in node.operands()):
        return None
    if meta.numel > most and node.packet != "aten.expand":
        return None
    args = map_values(node.args, lambda v: known[v])
    kwargs = {k: map_values(x, lambda v: known[v]) for k, x in node.kwargs if k not in ("device", "pin_memory")}
    found: Any = function(*args, **kwargs)
    return found if isinstance(found, torch.Tensor) else None


def _function(target: str) -> Any:
    """The operator, where its result depends on its arguments alone."""
    packet, _, overload = target.removeprefix("aten.").partition(".")
    function = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if function is None or "empty" in packet or torch.Tag.nondeterministic_seeded in function.tags:
        return None
    return function


__all__ = ["ATTENTION", "constant", "mask_of", "with_named_masks"]
