"""A graph that was captured on the CPU, made for the device where it will run.

Deals in the memory layout of values, and of outputs as the module itself returns them there. Knows nothing about
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils import _pytree

from qimeng.graph.device_strides import seen_on, with_strides
from qimeng.graph.layout import laid_out, order_of
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.spec import EXAMPLES, KernelSpec
from qimeng.spec.returned import opened
from qimeng.spec.seeding import seed_generators


def for_device(spec: KernelSpec, device: str, graph: OpGraph) -> OpGraph:
    """`graph` with the strides that its values have on `device`.

    Where an output lies otherwise there than on the CPU, the module is run on the device, once, for how its own lies.

    Raises:
        CaptureError: an operator does not run on the other layout.
    """
    if device == "cpu":
        return graph
    try:
        found = with_strides(graph, seen_on(device))
        pairs = list(enumerate(zip(graph.outputs, found.outputs, strict=True)))
        moved = [i for i, (a, b) in pairs if isinstance(a, Value) and graph.meta(a) != found.meta(b)]
        return laid_out(found, _orders(spec, device, found, moved)) if moved else found
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the judge's processes need the memory


def _orders(spec: KernelSpec, device: str, graph: OpGraph, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Of the outputs of these numbers that lie otherwise in the module's result than in `graph`: how they lie there.

    Empty where the module does not run on the device: the judge will say so.
    """
    try:
        module, inputs = spec.module(device), spec.inputs(0, device, EXAMPLES)
        with torch.no_grad():
            seed_generators(0)
            leaves = _pytree.tree_leaves(opened(module(*inputs)))
    except Exception:  # noqa: BLE001  the user's module may raise anything
        return {}
    found: dict[int, tuple[int, ...]] = {}
    for i in numbers:
        shape, mine, stride = tuple(leaves[i].shape), leaves[i].stride(), graph.meta(graph.outputs[i]).stride
        order = order_of(shape, mine)
        if order is not None and any(n > 1 and s != t for n, s, t in zip(shape, mine, stride, strict=True)):
            found[i] = order
    return found


__all__ = ["for_device"]
