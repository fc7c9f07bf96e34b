"""Programs whose independent parts run at the same time, each on a stream of its own while they are recorded.

A CUDA graph keeps what waits for what, and so starts a branch of a network beside the others. Deals in which stream
each region gets and in the text of its call. Source: NVIDIA, CUDA C++ Programming Guide, section CUDA Graphs
(cross-stream dependencies). Knows nothing about what the regions compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import Region
from qimeng.program.settled import is_settled

MOST = 4
"""Streams of a program."""

RUNTIME = '''
class _Lanes:
    """Streams that independent parts of a program run on; all begin after what was launched before."""

    def __init__(self, device, count):
        self.streams, self.events = [], {}
        if device.type == "cuda":
            here = torch.cuda.current_stream(device)
            self.streams = [here, *(torch.cuda.Stream(device) for _ in range(count - 1))]
            for stream in self.streams[1:]:
                stream.wait_stream(here)

    def run(self, number, lane, after, function):
        """What `function` returns, launched on a stream after parts on other streams; others may wait for `number`."""
        if not self.streams:
            return function()
        stream = self.streams[lane]
        for other in after:
            stream.wait_event(self.events[other])
        with torch.cuda.stream(stream):
            found = function()
        self.events[number] = stream.record_event()
        return found

    def join(self):
        for stream in self.streams[1:]:
            self.streams[0].wait_stream(stream)

'''


@dataclass(frozen=True)
class Lanes:
    """Which stream each region runs on.

    Attributes:
        lane: of each region, by its number in the program; regions that are computed once have none.
        after: numbers of the regions on other streams that it waits for.
    """

    lane: dict[int, int]
    after: dict[int, tuple[int, ...]]

    @property
    def count(self) -> int:
        """Number of streams."""
        return max(self.lane.values(), default=0) + 1

    def call(self, number: int, text: str) -> str:
        """The text of a region's call on its stream."""
        return f"lanes.run({number}, {self.lane[number]}, {self.after[number]}, lambda: {text})"

    def begin(self) -> str:
        """The line before the first call."""
        return f"lanes = _Lanes(device, {self.count})"


def lanes_of(graph: OpGraph, regions: Sequence[Region]) -> Lanes:
    """Streams for regions in topological order: a region continues that of the region before it, or begins a new one.

    It continues a stream whose last region it needs, or else one whose last region it needs by way of others.
    """
    made = {v: k for k, r in enumerate(regions) for v in r.outputs}
    lane: dict[int, int] = {}
    after: dict[int, tuple[int, ...]] = {}
    before: dict[int, frozenset[int]] = {}
    last: list[int] = []
    for k, region in enumerate(regions):
        if is_settled(graph, region):
            continue
        needed = {made[v] for v in region.inputs if v in made and made[v] in lane}
        before[k] = frozenset(needed).union(*(before[n] for n in needed))
        direct, behind = ([i for i, n in enumerate(last) if n in found] for found in (needed, before[k]))
        chosen = max(direct or behind, key=lambda i: last[i], default=len(last))
        if chosen == MOST:
            chosen = min(range(MOST), key=lambda i: last[i])
        if chosen == len(last):
            last.append(k)
        last[chosen] = k
        lane[k] = chosen
        after[k] = tuple(sorted(n for n in needed if lane[n] != chosen))
    return Lanes(lane, after)


__all__ = ["MOST", "RUNTIME", "Lanes", "lanes_of"]
