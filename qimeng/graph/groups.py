"""Finds groups of regions that may all become one, for a whole partition at once.

Deals in edges between regions. A group is convex: no path leaves it and returns, so it can be one region. Knows nothing
about kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import networkx as nx

from qimeng.graph.ops import category
from qimeng.graph.region import Region, region_digraph
from qimeng.graph.state import settled_nodes


def pointwise_groups(regions: Iterable[Region], most: int = 200) -> Iterator[tuple[Region, ...]]:
    """Groups of two or more connected pointwise regions, in topological order.

    Args:
        regions: a partition, in topological order.
        most: operators of a group; a larger one is cut into several.
    """
    return groups_of(regions, is_pointwise, most)


def groups_of(regions: Iterable[Region], belongs: Callable[[Region], bool], most: int) -> Iterator[tuple[Region, ...]]:
    """Groups of two or more connected regions that belong to a kind, in topological order.

    Every region has a depth: how many regions of another kind lie on the longest path to it. It never falls along an
    edge, and rises past a region of another kind; so a path between two regions of the kind and of one depth passes
    through regions of the kind and of that depth only, and these are in the group as well.

    Args:
        regions: a partition, in topological order.
        belongs: whether a region is of the kind.
        most: operators of a group; a larger one is cut into several.
    """
    regions = tuple(regions)
    flow = region_digraph(regions)
    plain = {r.id for r in regions if belongs(r)}
    depth: dict[str, int] = {}
    for name in nx.topological_sort(flow):
        depth[name] = max((depth[p] + (p not in plain) for p in flow.predecessors(name)), default=0)
    near = nx.Graph()
    near.add_nodes_from(plain)
    near.add_edges_from((a, b) for a, b in flow.edges if a in plain and b in plain and depth[a] == depth[b])
    for names in nx.connected_components(near):
        group = [r for r in regions if r.id in names]
        size = max(2, most * len(group) // max(1, sum(len(r.nodes) for r in group)))
        for start in range(0, len(group), size):
            if len(group[start : start + size]) > 1:
                yield tuple(group[start : start + size])


def is_pointwise(region: Region) -> bool:
    """Whether it computes each element from elements at the same place."""
    if settled_nodes(region.graph).issuperset(region.nodes):
        return False  # computed once
    families = {category(n) for n in region.ops}
    return "pointwise" in families and families <= {"pointwise", "view"}


__all__ = ["groups_of", "is_pointwise", "pointwise_groups"]
