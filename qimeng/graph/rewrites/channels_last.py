"""Keeps a network of convolutions in channels-last memory, the layout of tensor-core kernels.

The first convolution reads a copy, what follows inherits its layout, and results are laid out as they were. Weights are
laid out once. Source: NVIDIA, Convolutional Layers User's Guide, section Tensor Layouts. Deals in layouts alone: the
values stay the same.
"""

from __future__ import annotations

import torch

from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
FEWEST = 2
"""Convolutions from which on a graph is a network: one alone would only get copies before and after it."""
CONVOLUTION = "aten.convolution"


class ChannelsLast(Rule):
    """``conv(x, w)`` on channels-last `x` and `w`; its result is channels last as well."""

    name = "channels_last"
    option = "channels-last"
    packets = (CONVOLUTION,)

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for convolutions of two or three dimensions in graphs that have several."""
        x, weight, *others = node.args
        shape = edit.meta(x).shape
        if len(shape) not in FORMATS or _count(edit.graph) < FEWEST:
            raise NoRewrite("")
        if all(n == 1 for n in edit.meta(Value(node.name)).shape[2:]):
            raise NoRewrite("")  # each layout is any other
        layout = FORMATS[len(shape)]
        given = [v if is_channels_last(edit.meta(v)) else _copied(edit, v, layout) for v in (x, weight)]
        if given == [x, weight]:
            raise NoRewrite("")
        edit.results_stay()
        edit.view_instead(Value(node.name), edit.op(node.target, *given, *others, **dict(node.kwargs)))


def is_channels_last(meta: Meta) -> bool:
    """Whether the channels of an element lie side by side, then places, then images."""
    batch, channels, *places = meta.shape
    order = [(batch, 0), *((n, d + 2) for d, n in enumerate(places)), (channels, 1)]
    step = 1
    for n, d in reversed(order):
        if n > 1 and meta.stride[d] != step:
            return False
        step *= n
    return True


def _copied(edit: Edit, value: Value, layout: torch.memory_format) -> Value:
    return edit.op("aten.clone.default", value, memory_format=layout)


def _count(graph: OpGraph) -> int:
    return sum(n.packet == CONVOLUTION for n in graph.ops())


__all__ = ["ChannelsLast", "is_channels_last"]
