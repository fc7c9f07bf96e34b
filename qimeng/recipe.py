"""Recipes: how a program was made, as data that makes it again.

Deals in accepted steps, each with its action and its whole patch. Knows nothing about coders, evaluators or clocks:
replaying applies stored patches, so it gives the same program anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from qimeng.errors import IllegalAction, ReplayError
from qimeng.family import schedule_from_data
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.partition_check import partition_fault
from qimeng.graph.region import Region, region_of
from qimeng.graph.rewrites import Rewrite, rewritten_graph
from qimeng.interfaces.steps import Action, Patch
from qimeng.program.identity import IDENTITY
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
            raise ReplayError(f"the graph has no node {missing[0]!r} (and {len(missing) - 1} more of this region)")
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


@dataclass(frozen=True)
class RecipeStep:
    """One accepted step.

    Attributes:
        action: what was done.
        digest: content hash of the patch (`Patch.digest`).
        patch: the patch, reduced to the implementation that was kept.
        ms: device milliseconds after the step; no part of the recipe's identity.
    """

    action: Action
    digest: str
    patch: PatchRecord
    ms: float | None = field(default=None, compare=False)

    @classmethod
    def of(cls, action: Action, patch: Patch, chosen: int = 0, ms: float | None = None) -> RecipeStep:
        """The step that applied alternative number `chosen` of `patch`."""
        return cls(action, patch.digest(chosen), PatchRecord.of(patch.only(chosen)), ms)


@dataclass(frozen=True)
class Recipe:
    """The accepted steps from the start program to a program; equality ignores times.

    Attributes:
        steps: in the order they were taken.
        program: digest of the program they lead to; empty where it is not known.
        identity: the rule that the digests were made by (`qimeng.program.identity.IDENTITY`).
    """

    steps: tuple[RecipeStep, ...] = ()
    program: str = ""
    identity: int = IDENTITY

    def __len__(self) -> int:
        return len(self.steps)

    def replay(self, graph: OpGraph) -> Program:
        """The program that the steps make of `graph`, whole on PyTorch at first; no coder is called.

        Raises:
            ReplayError: a step does not fit the graph, the program comes out another one, or a newer version of the
                library wrote the recipe. The program of an older one's has another digest today, and is not compared.
        """
        if self.identity not in _PATCH_DIGESTS:
            raise ReplayError(f"the recipe has digests of rule {self.identity}, this version knows {[*_PATCH_DIGESTS]}")
        program = Program.start(graph)
        for number, step in enumerate(self.steps):
            program = self._apply(program, step, number)
        if self.identity == IDENTITY and self.program and program.digest != self.program:
            raise ReplayError(f"the recipe leads to program {program.digest}, it was written for {self.program}")
        return program

    def _apply(self, program: Program, step: RecipeStep, number: int) -> Program:
        patch = step.patch.patch(program.graph)
        found = _PATCH_DIGESTS[self.identity](patch)
        if found != step.digest:
            raise ReplayError(f"step {number} ({step.action}): the stored patch has hash {found}, not {step.digest}")
        try:
            return patch.apply(program)
        except (KeyError, IllegalAction) as error:
            raise ReplayError(f"step {number} ({step.action}): {error.args[0]}") from None

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal recipe back."""
        steps = [{**asdict(s), "patch": s.patch.to_data()} for s in self.steps]
        return json.dumps({**asdict(self), "steps": steps}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that `to_json` wrote.

        Raises:
            ReplayError: `text` is no recipe.
        """
        try:
            data = json.loads(text)
            steps = tuple(
                RecipeStep(action_from_data(s["action"]), s["digest"], PatchRecord.from_data(s["patch"]), s["ms"])
                for s in data["steps"]
            )
            return cls(steps, data["program"], data.get("identity", 1))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ReplayError(f"not a recipe: {type(error).__name__}: {error}") from None


def _digest_of_text(patch: Patch) -> str:
    """What `Patch.digest` was under rule 1."""
    parts = [patch.target or ""]
    if patch.regions is not None:
        parts += [" ".join(r.nodes) for r in patch.regions]
    if patch.alternatives:
        parts.append(patch.alternatives[0].source)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


_PATCH_DIGESTS: dict[int, Callable[[Patch], str]] = {1: _digest_of_text, IDENTITY: lambda patch: patch.digest()}


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
    "Recipe",
    "RecipeStep",
    "RegionRecord",
    "action_from_data",
    "implementation_from_data",
    "program_from_json",
    "program_to_json",
]
