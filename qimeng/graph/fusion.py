"""Decides which two regions of a partition may be fused, for many pairs of the same partition.

Deals in one partition, analysed once: edges, paths, readers. `qimeng.graph.region` makes the fused partition, and
agrees with this module. Knows nothing about kernels.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import networkx as nx

from qimeng.errors import IllegalAction
from qimeng.graph.opgraph import Value
from qimeng.graph.region import Region, merge, merge_recomputing, region_digraph, region_of


class Fusions:
    """The fusions of one partition.

    A merge creates a cycle if a second path, through a third region, leads from the producer to the consumer.
    Recomputing the producer never does, since its sources come before it. Both rules hold if each value stays with its
    region. If several regions compute a value, it may move to another one; then the new partition is built to check.

    Args:
        regions: the partition, as `qimeng.graph.region.repartition` makes it.

    Attributes:
        digraph: an edge from each region to those that read it.
    """

    def __init__(self, regions: tuple[Region, ...]):
        self._regions = regions
        self._by_id = {r.id: r for r in regions}
        self.digraph = region_digraph(regions)

    def merged(self, producer: str, consumer: str) -> Region:
        """The region that the two become.

        Raises:
            IllegalAction: there is no such edge, or the program would have a cycle.
        """
        a, b = self._edge(producer, consumer)
        if self._moves_values(a, b):
            return _made(merge(self._regions, (producer, consumer)), a, b)
        for between in self.digraph.successors(producer):
            if between != consumer and self._follows(between, consumer):
                cycle = " -> ".join([producer, *nx.shortest_path(self.digraph, between, consumer)])
                raise IllegalAction(f"these regions cannot be one: the program would have a cycle ({cycle})")
        kept = {v for v in (*a.outputs, *b.outputs) if v in self._results or self._readers[v] - {producer, consumer}}
        return _region(a, b, kept)

    def merged_recomputing(self, producer: str, consumer: str) -> Region:
        """What the consumer becomes where it computes the producer again for itself.

        Raises:
            IllegalAction: there is no such edge, or the program would have a cycle.
        """
        a, b = self._edge(producer, consumer)
        if self._moves_values(a, b):
            return _made(merge_recomputing(self._regions, producer, consumer), a, b)
        return _region(a, b, set(b.outputs))

    def changed(self, producer: str, consumer: str, recompute: bool) -> tuple[Region, ...]:
        """Other regions that then yield other values: of those that compute a value too, the first yields it."""
        a, b = self._edge(producer, consumer)
        if not self._moves_values(a, b):
            return ()
        merged = merge_recomputing if recompute else lambda regions, *both: merge(regions, both)
        before, wanted = {(r.nodes, r.outputs) for r in self._regions}, {*a.nodes, *b.nodes}
        after = merged(self._regions, producer, consumer)
        return tuple(r for r in after if (r.nodes, r.outputs) not in before and set(r.nodes) != wanted)

    def _edge(self, producer: str, consumer: str) -> tuple[Region, Region]:
        if not self.digraph.has_edge(producer, consumer):
            raise IllegalAction(f"{consumer} does not read {producer}")
        return self._by_id[producer], self._by_id[consumer]

    def _follows(self, first: str, second: str) -> bool:
        return bool(self._below[first] >> self._number[second] & 1)

    def _moves_values(self, a: Region, b: Region) -> bool:
        return not self._shared.isdisjoint(a.nodes) or not self._shared.isdisjoint(b.nodes)

    @cached_property
    def _results(self) -> frozenset[Value]:
        return frozenset(v for r in self._regions[:1] for v in r.graph.results())

    @cached_property
    def _number(self) -> dict[str, int]:
        return {r.id: i for i, r in enumerate(self._regions)}

    @cached_property
    def _below(self) -> dict[str, int]:
        """Region to the regions that can be reached from it, one bit each."""
        table: dict[str, int] = {}
        for name in reversed(list(nx.topological_sort(self.digraph))):
            table[name] = 0
            for successor in self.digraph.successors(name):
                table[name] |= table[successor] | 1 << self._number[successor]
        return table

    @cached_property
    def _readers(self) -> dict[Value, set[str]]:
        table: dict[Value, set[str]] = {v: set() for r in self._regions for v in r.outputs}
        for r in self._regions:
            for v in r.inputs:
                if v in table:
                    table[v].add(r.id)
        return table

    @cached_property
    def _shared(self) -> frozenset[str]:
        """Nodes that one region yields and others compute too."""
        held = Counter(n for r in self._regions for n in r.nodes)
        return frozenset(v.node for r in self._regions for v in r.outputs if held[v.node] > 1)


def _region(a: Region, b: Region, outputs: set[Value]) -> Region:
    position = a.graph.position
    order = tuple(sorted({*a.nodes, *b.nodes}, key=position.__getitem__))
    return region_of(a.graph, order, tuple(sorted(outputs, key=lambda v: (position[v.node], v.port))))


def _made(regions: tuple[Region, ...], a: Region, b: Region) -> Region:
    wanted = {*a.nodes, *b.nodes}
    for r in regions:
        if set(r.nodes) == wanted:
            return r
    raise IllegalAction(f"{a.id} and {b.id} cannot be one: other regions compute all that they would yield")


__all__ = ["Fusions"]
