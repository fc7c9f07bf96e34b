"""Gives outputs the module's memory layout if the captured operators give another one.

Deals in the order of dimensions in memory. PyTorch's eager mode may take another path than the exported graph, such as
the fast path of a transformer layer. Its values are the same, but its strides differ. The user gets the module's
strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, row_major


def order_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions, outermost in memory first; None where the elements do not fill their memory.

    >>> order_of((2, 3, 4), (4, 8, 1)), order_of((2, 3), (6, 2))
    ((1, 0, 2), None)
    """
    order = tuple(sorted(range(len(shape)), key=lambda d: (-stride[d], d)))
    dense = row_major(tuple(shape[d] for d in order))
    fits = all(shape[d] <= 1 or stride[d] == s for d, s in zip(order, dense, strict=True))
    return order if fits else None


def laid_out(graph: OpGraph, orders: Mapping[int, tuple[int, ...]]) -> OpGraph:
    """`graph` with its outputs of the given numbers copied into memory in that order of dimensions."""
    nodes, outputs = dict(graph.nodes), list(graph.outputs)
    for number, order in orders.items():
        value = outputs[number]
        meta = graph.meta(value)
        turned = tuple(meta.shape[d] for d in order)
        back = tuple(order.index(d) for d in range(len(order)))
        stride = row_major(turned)
        steps = (
            ("aten.permute.default", (order,), (), Meta(turned, tuple(meta.stride[d] for d in order), meta.dtype)),
            (
                "aten.clone.default",
                (),
                (("memory_format", torch.contiguous_format),),
                Meta(turned, stride, meta.dtype),
            ),
            ("aten.permute.default", (back,), (), Meta(meta.shape, tuple(stride[d] for d in back), meta.dtype)),
        )
        for step, (target, args, kwargs, made) in enumerate(steps):
            name = f"layout_{number}_{step}"
            while name in nodes:
                name += "_"
            nodes[name] = Node(name, "op", target, (value, *args), kwargs, (made,))
            value = Value(name)
        outputs[number] = value
    return replace(graph, nodes=nodes, outputs=tuple(outputs))


__all__ = ["laid_out", "order_of"]
