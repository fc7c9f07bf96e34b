"""Finds which regions of a partition become one each, greedily, for the whole partition at once.

Deals in edges between regions: pairs are joined one after the other, as TorchInductor's scheduler does (Ansel et al.,
PyTorch 2, ASPLOS 2024), without a new partition for each. Who may join, and in which order, is for the caller to say.
Knows nothing about kernels.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable

from qimeng.graph.opgraph import Value
from qimeng.graph.region import Region, region_digraph, region_of

Pair = tuple[Region, Region]
"""A producer and one that reads it."""


class Clusters:
    """Regions on their way to fewer, larger ones.

    A pair is joined unless another path leads from the producer to the consumer: the program would have a cycle. Groups
    are numbered; each knows its members, the region that it is, and what is reached from it, one bit a group.

    Args:
        regions: a partition.
        belongs: whether a region may be joined with others at all.
    """

    def __init__(self, regions: Iterable[Region], belongs: Callable[[Region], bool]):
        self._start = tuple(regions)
        self._results = {v for r in self._start[:1] for v in r.graph.results()}
        self._region = dict(enumerate(self._start))
        self._members = {n: 1 << n for n in self._region}
        self._number = number = {r.id: n for n, r in self._region.items()}
        flow = region_digraph(self._start)
        self._after = {number[a]: {number[b] for b in flow.successors(a)} for a in flow}
        self._before = {number[a]: {number[b] for b in flow.predecessors(a)} for a in flow}
        self._reached = self._closure()
        self._readers = self._read_by()
        held = Counter(name for r in self._start for name in r.nodes)
        shared = {v.node for r in self._start for v in r.outputs if held[v.node] > 1}  # moves as regions join
        self._free = {n for n, r in self._region.items() if shared.isdisjoint(r.nodes) and belongs(r)}

    def grow(
        self, rank: Callable[[Region, Region, int], tuple[float, ...]], fits: Callable[[Pair, Region], bool]
    ) -> None:
        """Join pairs, the least rank first, until none is left that may be joined.

        Args:
            rank: of a producer, a consumer and the bytes that pass between them.
            fits: whether a pair may become the region that is given besides.
        """
        waiting = [self._entry(a, b, rank) for a in self._free for b in self._after[a] & self._free]
        heapq.heapify(waiting)
        while waiting:
            _, a, b = heapq.heappop(waiting)
            if not {a, b} <= self._free or self._leads_around(a, b):
                continue
            both = self._joined(a, b)
            if not fits((self._region[a], self._region[b]), both):
                continue
            made = self._join(a, b, both)
            for other in self._before[made] & self._free:
                heapq.heappush(waiting, self._entry(other, made, rank))
            for other in self._after[made] & self._free:
                heapq.heappush(waiting, self._entry(made, other, rank))

    def groups(self) -> tuple[tuple[tuple[Region, ...], Region], ...]:
        """The members of each group in topological order, and the region that it is; a group may have one member."""
        members = ((self._regions_of(mask), self._region[n]) for n, mask in self._members.items())
        return tuple(sorted(members, key=lambda found: self._number[found[0][0].id]))

    def _entry(
        self, a: int, b: int, rank: Callable[[Region, Region, int], tuple[float, ...]]
    ) -> tuple[tuple[float, ...], int, int]:
        first, second = self._region[a], self._region[b]
        passed = sum(first.graph.meta(v).bytes for v in set(first.outputs).intersection(second.inputs))
        return rank(first, second, passed), a, b

    def _leads_around(self, a: int, b: int) -> bool:
        return any(self._reached[c] >> b & 1 for c in self._after[a] if c != b)

    def _joined(self, a: int, b: int) -> Region:
        first, second, inside = self._region[a], self._region[b], self._members[a] | self._members[b]
        position = first.graph.position
        kept = {v for v in (*first.outputs, *second.outputs) if v in self._results or self._readers[v] & ~inside}
        order = tuple(sorted({*first.nodes, *second.nodes}, key=position.__getitem__))
        return region_of(first.graph, order, tuple(sorted(kept, key=lambda v: (position[v.node], v.port))))

    def _join(self, a: int, b: int, both: Region) -> int:
        made = len(self._region)
        self._region[made] = both
        self._members[made] = self._members.pop(a) | self._members.pop(b)
        self._after[made] = (self._after.pop(a) | self._after.pop(b)) - {a, b}
        self._before[made] = (self._before.pop(a) | self._before.pop(b)) - {a, b}
        beyond = (self._reached.pop(a) | self._reached.pop(b)) & ~(1 << a | 1 << b)
        self._reached[made] = beyond
        for c in self._after[made]:
            self._before[c] = self._before[c] - {a, b} | {made}
        for c in self._before[made]:
            self._after[c] = self._after[c] - {a, b} | {made}
        for c, mask in self._reached.items():
            if mask & (1 << a | 1 << b):
                self._reached[c] = mask & ~(1 << a | 1 << b) | 1 << made | beyond
        self._free = self._free - {a, b} | {made}
        return made

    def _closure(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for n in reversed(range(len(self._start))):  # a partition is in topological order
            found[n] = 0
            for c in self._after[n]:
                found[n] |= found[c] | 1 << c
        return found

    def _read_by(self) -> dict[Value, int]:
        """Each value that leaves a region to the regions of the start that read it, one bit each."""
        table = {v: 0 for r in self._start for v in r.outputs}
        for n, r in enumerate(self._start):
            for v in r.inputs:
                if v in table:
                    table[v] |= 1 << n
        return table

    def _regions_of(self, mask: int) -> tuple[Region, ...]:
        return tuple(r for n, r in enumerate(self._start) if mask >> n & 1)


__all__ = ["Clusters", "Pair"]
