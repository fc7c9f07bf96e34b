"""Makes programs right whatever strides the results of PyTorch's operators have where a program runs.

Kernels are printed for the strides that were captured. PyTorch may lay a result out otherwise on another device or in
another version. Then a kernel reads a copy, and a view that cannot be had is a copy as well. Deals in source text.
Knows nothing about what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region
from qimeng.program.implementation import Implementation

STRIDES = '''
def _with_strides(tensor, stride):
    """`tensor`, or a copy of it with the strides that kernels were made for, where PyTorch laid it out otherwise."""
    if tensor.stride() == stride or all(n <= 1 or s == t for n, s, t in zip(tensor.shape, stride, tensor.stride())):
        return tensor
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
    copy[once].copy_(tensor[once])
    return copy

'''


def runs_anywhere(implementation: Implementation) -> str:
    """The text of `implementation`; on PyTorch, views in it copy where they cannot be had."""
    text = implementation.source
    if implementation.language == "torch":
        for view in ("view", "_unsafe_view"):
            text = text.replace(f"torch.ops.aten.{view}.default(", "torch.ops.aten.reshape.default(")
    return text


def uncertain(parts: Sequence[tuple[Region, Implementation]]) -> set[Value]:
    """Results of PyTorch's operators that a kernel reads, or that other operators of PyTorch's make its operands from.

    `parts` are in topological order.
    """
    read, found = set[Value](), set[Value]()
    for region, implementation in reversed(parts):
        if implementation.generated:
            read.update(region.inputs)
        elif not read.isdisjoint(region.outputs):
            if any(n.packet not in VIEWS for n in region.ops):
                found.update(read.intersection(region.outputs))
            read.update(region.inputs)
    return found


def with_strides(graph: OpGraph, value: Value, name: str) -> str:
    """The text of the tensor called `name` with the strides of `value`."""
    return f"_with_strides({name}, {graph.meta(value).stride})"


__all__ = ["STRIDES", "runs_anywhere", "uncertain", "with_strides"]
