"""How many blocks of a mask that buffers hold have anything, found once when a computation is captured.

Kernels that leave out the blocks which a mask hides take time by what is left, which shapes do not say. Deals in values
of buffers and of what is computed from them alone. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from qimeng.graph.constant_masks import ATTENTION, constant, mask_of
from qimeng.graph.opgraph import BlockShares, Node, OpGraph, Value
from qimeng.graph.region import Region
from qimeng.graph.state import is_state

SIDES = (16, 32, 64, 128)
"""Sides of the blocks that are counted."""

MOST = 1 << 27
"""Elements of a mask up to which they are counted."""


COUNTED = 1 << 23
"""Elements of a mask that are looked at, about."""

WORD = 8
"""Elements of a mask in a word of 64 bits."""


def with_block_shares(graph: OpGraph, module: Callable[[], torch.nn.Module]) -> OpGraph:
    """`graph` with the shares of the blocks of its masks (`OpGraph.shares`); it itself where it has none.

    Args:
        graph: the graph.
        module: makes the module whose buffers are read; only called where there are masks.
    """
    masks = {m for n in graph.ops() for m, _ in _gates(graph, n)}
    if not masks:
        return graph
    held = {n.name: n.target for n in graph.nodes.values() if n.kind == "buffer"}
    buffers = dict(module().named_buffers(remove_duplicate=False))
    known: dict[Value, torch.Tensor | None] = {Value(n): buffers.get(key) for n, key in held.items()}
    found = {}
    with torch.no_grad():
        for mask in masks:
            try:
                value = constant(graph, mask, known, MOST)
            except (RuntimeError, TypeError):  # an operator that this machine does not have for the dtype
                continue
            if value is not None:
                found[mask.node] = shares_of(value)
    return replace(graph, shares=found)


def shares_of(mask: torch.Tensor) -> BlockShares:
    """The shares of the blocks of `mask`, of two dimensions or more, the last two cut into blocks.

    Of a large one, those of strips of rows as far apart as needed.
    """
    strips = mask.detach().reshape(-1, *mask.shape[-2:]).split(SIDES[-1], dim=1)
    whole = torch.cat(strips[:: -(-mask.numel() // COUNTED)], dim=1)
    counted = []
    for values in (whole != 0, whole == 0):
        shares, before = list[float](), 1
        for side in SIDES:  # larger blocks are made of smaller ones
            values, before = _any_of(values, side // before), side
            shares.append(float(values.float().mean()))
        counted.append(tuple(shares))
    return BlockShares(SIDES, *counted)


def _any_of(values: torch.Tensor, side: int) -> torch.Tensor:
    """Whether any of each block of the last two dimensions is true; the last blocks may overhang."""
    down, across = (-n % side for n in values.shape[1:])
    filled = torch.nn.functional.pad(values, (0, across, 0, down))
    count, high, wide = filled.shape
    if side % WORD == 0:  # as many at once
        words = filled.contiguous().view(torch.int64).view(count, high // side, side, wide // side, side // WORD)
        return (words != 0).any(2).any(-1)
    return filled.view(count, high // side, side, wide // side, side).any(2).any(-1)


def seen_share(region: Region, block: tuple[int, int]) -> float:
    """Share of the blocks of about `block` rows and columns that the masks in `region` leave; 1 where none is known."""
    graph = region.graph
    found = [
        graph.shares[mask.node].of(block, seen)
        for node in region.ops
        for mask, seen in _gates(graph, node)
        if mask.node in graph.shares
    ]
    return min(found, default=1.0)


def _gates(graph: OpGraph, node: Node) -> Iterator[tuple[Value, bool]]:
    """The masks of buffers that an operator reads, and whether what it computes is seen where they are not zero."""
    found: list[tuple[Value | None, bool]] = []
    if node.packet == ATTENTION:
        found = [(mask_of(node), True)]
    elif node.packet == "aten.masked_fill":
        found = [(node.operands()[1], False)]
    elif node.packet == "aten.where" and len(node.args) == 3:
        large = [isinstance(v, Value) and graph.meta(v).numel > 1 for v in node.args[1:]]
        found = [(node.operands()[0], large[0])] if large[0] != large[1] else []
    elif node.packet == "aten.mul" and len(node.operands()) == 2:
        masks = [v for v in node.operands() if is_state(graph, v)]
        found = [(masks[0], True)] if len(masks) == 1 else []
    for mask, seen in found:
        if mask is None or not is_state(graph, mask):
            continue
        shape = graph.meta(mask).shape
        if len(shape) >= 2 and min(shape[-2:]) >= SIDES[0] and graph.meta(mask).numel <= MOST:
            yield mask, seen


__all__ = ["SIDES", "seen_share", "shares_of", "with_block_shares"]
