"""Patches, partitions and programs as plain data that makes them again on a graph.

Deals in JSON and the checks that what is read fits the graph. Knows nothing about coders, evaluators or clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from qimeng.errors import IllegalAction, ReplayError
from qimeng.family import schedule_from_data
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.partition_check import partition_fault
from qimeng.graph.region import Region, region_of
from qimeng.graph.rewrites import Rewrite, rewritten_graph
from qimeng.interfaces.steps import Action, Patch
from qimeng.program.program import Implementation, Program


@dataclass(frozen=True)
class RegionRecord:
    """A region without its graph: node names, and the values read outside it as (node, port)."""

    nodes: tuple[str, ...]
    outputs: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, region: Region) -> RegionRecord:
        """The record of `region`."""
        return cls(region.nodes, tuple((v.node, v.port) for v in region.outputs))

    def region(self, graph: OpGraph) -> Region:
        """The region in `graph`.

        Raises:
            ReplayError: the graph lacks one of the nodes.
        """
        missing = [n for n in self.nodes if n not in graph.nodes]
        if missing:
            raise ReplayError(
                f"the graph has no node {missing[0]!r}, so this was made for another computation: give the one that "
                "it was made from"
            )
        return region_of(graph, self.nodes, tuple(Value(node, port) for node, port in self.outputs))


@dataclass(frozen=True)
class PatchRecord:
    """A patch without its graph, reduced to what was kept or whole.

    Attributes:
        regions: the new partition; None where it stays.
        target: id of the region with a new implementation; None for a change of the graph alone.
        alternatives: the implementations to choose from; one in a recipe.
        note: the patch's note; no part of its identity.
        rewrites: of the graph, made before anything else.
        launch: how the program is launched from now on; None where that stays.
        others: ids of further regions with their new implementations.
    """

    regions: tuple[RegionRecord, ...] | None = None
    target: str | None = None
    alternatives: tuple[Implementation, ...] = ()
    note: str = field(default="", compare=False)
    rewrites: tuple[Rewrite, ...] = ()
    launch: str | None = None
    others: tuple[tuple[str, Implementation], ...] = ()

    @classmethod
    def of(cls, patch: Patch) -> PatchRecord:
        """The record of `patch`."""
        regions = None if patch.regions is None else tuple(RegionRecord.of(r) for r in patch.regions)
        return cls(regions, patch.target, patch.alternatives, patch.note, patch.rewrites, patch.launch, patch.others)

    def patch(self, graph: OpGraph) -> Patch:
        """The patch on `graph`.

        Raises:
            ReplayError: it names nodes that the graph lacks, regions that are no partition of it, or a rewrite that
                does not apply to it.
        """
        graph = _rewritten(graph, self.rewrites)
        regions = None if self.regions is None else _partition(self.regions, graph)
        return Patch(regions, self.target, self.alternatives, self.note, self.rewrites, self.launch, self.others)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_data(), sort_keys=True)

    def to_data(self) -> dict[str, Any]:
        """What JSON holds; without what few patches have where there is none, so that the others keep their hash."""
        data = asdict(self)
        unused = [name for name in ("rewrites", "launch", "others") if not data[name] and data[name] != ""]
        return {name: value for name, value in data.items() if name not in unused}

    @classmethod
    def from_json(cls, text: str) -> PatchRecord:
        """The record that `to_json` wrote."""
        return cls.from_data(json.loads(text))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> PatchRecord:
        """The record from the decoded JSON.

        Raises:
            ReplayError: another version wrote it, and this one cannot read it.
        """
        regions = data["regions"]
        if regions is not None:
            regions = tuple(
                RegionRecord(tuple(r["nodes"]), tuple((n, int(p)) for n, p in r["outputs"])) for r in regions
            )
        alternatives = tuple(implementation_from_data(a) for a in data["alternatives"])
        rewrites = tuple(Rewrite(**r) for r in data.get("rewrites", ()))
        others = tuple((region, implementation_from_data(i)) for region, i in data.get("others", ()))
        return cls(regions, data["target"], alternatives, data["note"], rewrites, data.get("launch"), others)


def action_from_data(data: dict[str, Any]) -> Action:
    """The action from its decoded JSON (`dataclasses.asdict`)."""
    return Action(data["kind"], tuple(data["regions"]), data["param"])


def implementation_from_data(data: dict[str, Any]) -> Implementation:
    """The implementation from its decoded JSON (`dataclasses.asdict`).

    Raises:
        ReplayError: its schedule has a field that this version does not know.
    """
    try:
        schedule = None if data["schedule"] is None else schedule_from_data(data["schedule"])
    except ValueError as error:
        raise ReplayError(f"the schedule is another version's: {error}") from None
    return Implementation(**{**data, "prepare_inputs": tuple(data["prepare_inputs"]), "schedule": schedule})


def program_to_json(program: Program) -> str:
    """The partition and implementations of `program` as one line of JSON; its graph is not in it."""
    held = {s: asdict(i) for s, i in sorted(program.implementations.items())}
    data: dict[str, Any] = {
        "regions": [asdict(RegionRecord.of(r)) for r in program.regions],
        "implementations": held,
    }
    if program.rewrites:
        data["rewrites"] = [asdict(r) for r in program.rewrites]
    if program.launch:
        data["launch"] = program.launch
    return json.dumps(data)


def program_from_json(text: str, graph: OpGraph) -> Program:
    """The program on `graph`, as it was captured, that `program_to_json` wrote.

    Raises:
        ReplayError: it does not fit the graph.
    """
    data = json.loads(text)
    rewrites = tuple(Rewrite(**r) for r in data.get("rewrites", ()))
    made = _rewritten(graph, rewrites)
    records = [RegionRecord(tuple(r["nodes"]), tuple((n, p) for n, p in r["outputs"])) for r in data["regions"]]
    held = {s: implementation_from_data(i) for s, i in data["implementations"].items()}
    program = Program(made, _partition(records, made), held, captured=graph if rewrites else None, rewrites=rewrites)
    try:
        return program.with_launch(data.get("launch", ""))
    except IllegalAction as error:
        raise ReplayError(str(error)) from None


def _rewritten(graph: OpGraph, rewrites: tuple[Rewrite, ...]) -> OpGraph:
    try:
        return rewritten_graph(graph, rewrites)
    except IllegalAction as error:
        raise ReplayError(str(error)) from None


def _partition(records: Iterable[RegionRecord], graph: OpGraph) -> tuple[Region, ...]:
    regions = tuple(r.region(graph) for r in records)
    if text := partition_fault(graph, regions):
        raise ReplayError(f"the stored partition {text}")
    return regions


__all__ = [
    "PatchRecord",
    "RegionRecord",
    "action_from_data",
    "implementation_from_data",
    "program_from_json",
    "program_to_json",
]
