"""Graphs for measurements: edges drawn at random by a few laws, always the same ones for the same sizes.

Deals in tensors [2, edges] of sources and targets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CORNERS = (0.57, 0.19, 0.19, 0.05)
"""Shares of the four quarters of an R-MAT matrix (Chakrabarti, Zhan and Faloutsos, 2004; as in the Graph500 suite)."""

EXPONENT = 2.1
"""Of the power law of in-degrees."""


def rmat(nodes: int, edges: int) -> Tensor:
    """Recursive quarters: hubs, and clusters at every scale."""
    generator = torch.Generator().manual_seed(0)
    bits = max(1, (nodes - 1).bit_length())
    source, target = torch.zeros(edges, dtype=torch.int64), torch.zeros(edges, dtype=torch.int64)
    shares = torch.tensor(CORNERS)
    for _ in range(bits):
        corner = torch.multinomial(shares, edges, replacement=True, generator=generator)
        source, target = 2 * source + corner // 2, 2 * target + corner % 2
    return torch.stack([source % nodes, target % nodes])


def banded(nodes: int, edges: int) -> Tensor:
    """Nodes linked with their neighbours in number, each as often."""
    each = max(1, edges // nodes)
    target = torch.arange(edges) // each % nodes
    source = (target + torch.arange(edges) % each - each // 2) % nodes
    return torch.stack([source, target])


def power_law(nodes: int, edges: int) -> Tensor:
    """In-degrees by a power law, sources drawn evenly."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.arange(1, nodes + 1, dtype=torch.float64) ** (-1 / (EXPONENT - 1))
    ends = weights.cumsum(0) / weights.sum()
    target = torch.searchsorted(ends, torch.rand(edges, dtype=torch.float64, generator=generator)).clamp(max=nodes - 1)
    names = torch.randperm(nodes, generator=generator)
    return torch.stack([torch.randint(0, nodes, (edges,), generator=generator), names[target]])


GRAPHS: dict[str, Callable[[int, int], Tensor]] = {"rmat": rmat, "banded": banded, "powerlaw": power_law}
"""By name, from numbers of nodes and edges."""
