"""Checks that regions are a partition of a graph: all that is read or returned is computed, and before it is read.

Knows nothing about why a partition was made.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.region import Region


def partition_fault(graph: OpGraph, regions: Iterable[Region]) -> str:
    """What is wrong with `regions` as a partition of `graph`, as the end of a sentence; empty where nothing is."""
    given: set[Value] = set()
    names: set[str] = set()
    place = {name: number for number, name in enumerate(graph.nodes)}
    for region in regions:
        if not isinstance(region, Region):
            return f"holds a {type(region).__name__}, which is no region"
        if not all(name in graph.nodes for name in region.nodes):
            return f"holds {region.id} ({region.label()}), a region of another graph"
        places = [place[name] for name in region.nodes]
        if any(a >= b for a, b in pairwise(places)):
            return f"holds {region.id} ({region.label()}), whose operators are not in the graph's order"
        if region.id in names:
            return f"holds {region.id} ({region.label()}) twice"
        alien = next((v for v in region.outputs if not _computes(graph, region, v)), None)
        if alien is not None:
            return f"has {region.id} ({region.label()}), which does not compute result {alien.port} of {alien.node}"
        missing = next((v for v in region.inputs if graph.nodes[v.node].kind == "op" and v not in given), None)
        if missing is not None:
            return f"computes {missing.node} in no region before {region.id} ({region.label()}), which reads it"
        names.add(region.id)
        given.update(region.outputs)
    missing = next((v for v in graph.results() if graph.nodes[v.node].kind == "op" and v not in given), None)
    return "" if missing is None else f"computes {missing.node}, a result, in no region"


def _computes(graph: OpGraph, region: Region, value: Value) -> bool:
    metas = graph.nodes[value.node].metas if value.node in region.nodes else ()
    return 0 <= value.port < len(metas) and metas[value.port] is not None


__all__ = ["partition_fault"]
