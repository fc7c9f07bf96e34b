"""What regions take, found in stored trees, and what programs take that are put together from them.

A network has far more programs than any exploration judges, but few regions that differ, and networks share regions.
A program whose regions were all timed, in other programs or alone, takes about the sum of their times, as steps on
regions have it live (`qimeng.envs.steps.milestones`). So a planner can walk where nobody measured. Deals in trees,
regions and milliseconds. Knows nothing about sessions or planners.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol, TypeVar

from qimeng.errors import QimengError
from qimeng.graph.region import Region
from qimeng.interfaces import Asked, Evaluation, Gate, Patch, Timing
from qimeng.library import LANGUAGE
from qimeng.planner.data.programs import programs_of
from qimeng.planner.data.tree import Tree
from qimeng.program.implementation import Implementation
from qimeng.program.program import Program
from qimeng.store import evaluation_key

WHOLE, ALONE, COMPOSED = "step", Asked.REGION.value, "composed"
"""Purposes of what is stored: of a whole program, of a region, and of a program that is a sum of others' regions."""

LEAST = 0.2
"""A program takes this share of its regions' times at least."""

WRONG = Evaluation(Gate.PROGRAM, "the kernel is wrong", "wrong")
"""What a judge says of a kernel that a coder could not write."""

Captured = tuple[Tree, Program]
"""A tree with the names of today's programs (`Tree.today`), and its start program."""

K = TypeVar("K")

Key = tuple[str, str]
"""Signature of a region and digest of its implementation."""

Move = tuple[str, str]
"""Kind and option of an action on one region."""


class Writes(Protocol):
    """Which implementations a coder writes right."""

    def __call__(self, region: Region, implementation: Implementation, kind: str) -> bool:
        """Whether it writes this one of `region` right, where an action of this kind asks for it."""

    def chance(self, region: Region, implementation: Implementation, kind: str) -> float:
        """How likely that was, from 0 to 1."""


@dataclass(frozen=True)
class Outcome:
    """What came of an action on a region.

    Attributes:
        implementation: the one that was chosen.
        ratio: its time over that of the region on PyTorch; None where it was refused.
        evaluation: what the judge found.
    """

    implementation: Implementation
    ratio: float | None
    evaluation: Evaluation


@dataclass(frozen=True)
class Parts:
    """What was found of regions, whatever network they are in.

    Attributes:
        moves: what was tried on regions with an implementation.
        refused: what the judge found of implementations that it refused.
        ratios: time of an implementation over that of its region on PyTorch.
        kinds: kind of the action that an implementation was written for; of several, one that wrote it from nothing.
        whole: milliseconds in programs that were judged as a whole.
        units: milliseconds on PyTorch of the regions that graphs begin with, by their signature.
        launches: how a program is launched, to the milliseconds that it takes for each region beside the regions' own;
            below 0 where events around a region take longer than its launch.
        writes: of the coder that is planned for, where that is another one than wrote the trees; what it does not write
            right counts as refused.
    """

    moves: Mapping[Key, Mapping[Move, Outcome]]
    refused: Mapping[Key, Evaluation]
    ratios: Mapping[Key, float]
    kinds: Mapping[Key, str]
    whole: Mapping[Key, float]
    units: Mapping[str, float]
    launches: Mapping[str, float]
    writes: Writes | None = None
    _on_torch: dict[str, float | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _written: dict[Key, Mapping[Move, Outcome]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def tried(self, region: Region, made: str) -> Mapping[Move, Outcome]:
        """What comes of actions on `region`, by kind and option.

        Args:
            region: any.
            made: digest of its implementation.
        """
        key = region.signature, made
        if self.writes is None or key not in self.moves:
            return self.moves.get(key, {})
        if key not in self._written:
            self._written[key] = {
                move: o if self._right(region, o.implementation) else replace(o, ratio=None, evaluation=WRONG)
                for move, o in self.moves[key].items()
            }
        return self._written[key]

    def refusal(self, region: Region, implementation: Implementation) -> Evaluation | None:
        """What a judge says of an implementation of `region` that it refuses; None where it is right."""
        if not self._right(region, implementation):
            return WRONG
        return self.refused.get((region.signature, implementation.digest))

    def _right(self, region: Region, implementation: Implementation) -> bool:
        kind = self.kinds.get((region.signature, implementation.digest))
        return self.writes is None or kind is None or self.writes(region, implementation, kind)

    def on_torch(self, region: Region) -> float | None:
        """Milliseconds of `region` on PyTorch, operator by operator; None where one of them was not timed."""
        if region.signature not in self._on_torch:
            self._on_torch[region.signature] = self._summed(region)
        return self._on_torch[region.signature]

    def _summed(self, region: Region) -> float | None:
        total, inside = 0.0, set(region.nodes)
        for unit in units_of(region):
            if inside.issuperset(unit.nodes):
                ms = self.units.get(unit.signature)
                if ms is None:
                    return None
                total += ms
        return total

    def milliseconds(self, region: Region, implementation: Implementation) -> float | None:
        """Of one region; None where nobody timed it."""
        on_torch = self.on_torch(region)
        if implementation.language == "torch":
            return on_torch
        key = region.signature, implementation.digest
        ratio = self.ratios.get(key)
        return ratio * on_torch if ratio is not None and on_torch is not None else self.whole.get(key)

    def start(self, program: Program) -> Evaluation | None:
        """Of a start program that nobody judged; None where one of its regions was not timed."""
        found = self.evaluation(program, Evaluation(Gate.PASSED, timing=Timing(0.0)))
        return None if found is None else replace(found, eager=found.timing)

    def evaluation(self, program: Program, start: Evaluation) -> Evaluation | None:
        """Of a program, by its regions; None where one of them was not timed.

        Args:
            program: the program.
            start: of the program that its search began with.
        """
        made = {r.id: program.implementation(r) for r in program.called}
        found = {r.id: self.milliseconds(r, made[r.id]) for r in program.called}
        times = {id_: ms for id_, ms in found.items() if ms is not None}
        if len(times) < len(found) or start.timing is None or program.launch not in self.launches:
            return None
        total = sum(times.values())
        own = sum(times[i] for i, m in made.items() if m.generated)
        library = sum(times[i] for i, m in made.items() if m.language == LANGUAGE)
        ms = max(total + self.launches[program.launch] * len(times), LEAST * total)
        return replace(
            start,
            timing=replace(start.timing, device_ms=ms, wall_ms=None),
            region_ms=times,
            generated_share=own / total if total else 0.0,
            library_share=library / total if total else 0.0,
        )


def units_of(region: Region) -> tuple[Region, ...]:
    """The regions that the graph of `region` begins with."""
    known = region.graph.memo
    if "units" not in known:
        known["units"] = Program.start(region.graph).regions
    found: tuple[Region, ...] = known["units"]
    return found


def parts_of(trees: Iterable[Captured]) -> Parts:
    """What trees tell of regions.

    Args:
        trees: what regions were explored in.
    """
    walks = [_Walk(tree, start) for tree, start in trees]
    whole, units = defaultdict[Key, list[float]](list), defaultdict[str, list[float]](list)
    launches = defaultdict[str, list[float]](list)
    for program, evaluation in (found for walk in walks for found in walk.wholes()):
        times = evaluation.region_ms
        if not all(r.id in times for r in program.called):
            continue
        beside = (evaluation.ms or 0.0) - sum(times[r.id] for r in program.called)
        launches[program.launch].append(beside / max(len(program.called), 1))
        for region in program.called:
            made = program.implementation(region)
            if made.language == "torch":
                units[region.signature].append(times[region.id])
            else:
                whole[region.signature, made.digest].append(times[region.id])
    middles = {key: median(ms) for key, ms in whole.items()}
    parts = Parts({}, {}, {}, {}, middles, _middles(units), _middles(launches))
    moves, ratios = defaultdict[Key, dict[Move, Outcome]](dict), defaultdict[Key, list[float]](list)
    refused, kinds = dict[Key, Evaluation](), dict[Key, str]()
    for step in (step for walk in walks for step in walk.steps()):
        outcome = _outcome(parts, step)
        key = step.before.signature, step.program.implementation(step.before).digest
        moves[key].setdefault(step.move, outcome)
        after = step.after.signature, outcome.implementation.digest
        if after not in kinds or not step.program.implementation(step.before).generated:
            kinds[after] = step.move[0]
        if outcome.ratio is not None:
            ratios[after].append(outcome.ratio)
        elif not outcome.evaluation.ok:
            refused[after] = outcome.evaluation
    return replace(parts, moves=moves, refused=refused, ratios=_middles(ratios), kinds=kinds)


@dataclass(frozen=True)
class _Step:
    """An action on one region: the program before it, the region in both programs, and what was found."""

    program: Program
    before: Region
    after: Region
    move: Move
    implementation: Implementation
    alone: bool
    evaluation: Evaluation


def _outcome(parts: Parts, step: _Step) -> Outcome:
    found, ratio = step.evaluation, None
    if found.ok and step.alone:
        ratio = 1 / found.speedup if found.speedup else None
    elif found.ok:
        on_torch, ms = parts.on_torch(step.after), found.region_ms.get(step.after.id)
        ratio = ms / on_torch if ms is not None and on_torch else None
    return Outcome(step.implementation, ratio, found)


class _Walk:
    """What was judged in a tree, with the programs."""

    def __init__(self, tree: Tree, start: Program):
        self._tree, self._programs = tree, programs_of(tree, start)
        self._judged = {s: e for purpose, s, e in tree.evaluations if purpose == WHOLE}

    def wholes(self) -> Iterator[tuple[Program, Evaluation]]:
        """Programs that were judged right as a whole, each once."""
        for digest, program in self._programs.items():
            found = self._judged.get(digest)
            if found is not None and found.ok:
                yield program, found

    def steps(self) -> Iterator[_Step]:
        """Actions on one region whose patch was judged."""
        conditions = self._tree.conditions
        purposes = {evaluation_key(conditions, s, p): (p, e) for p, s, e in self._tree.evaluations}
        for edge in self._tree.edges:
            parent, record = self._programs.get(edge.parent), self._tree.patches.get(edge.patch or "")
            if parent is None or record is None or edge.evaluation not in purposes or len(edge.action.regions) != 1:
                continue
            purpose, found = purposes[edge.evaluation]
            with suppress(QimengError, KeyError, IndexError):  # this version can no longer apply it
                patch: Patch = record.patch(parent.graph)
                if patch.target is None or not patch.alternatives:
                    continue
                after = patch.apply(parent, found.chosen).region(patch.target)
                made = patch.alternatives[found.chosen]
                move = edge.action.kind, edge.action.param
                before = parent.region(edge.action.regions[0])
                yield _Step(parent, before, after, move, made, purpose == ALONE, found)


def _middles(found: Mapping[K, list[float]]) -> dict[K, float]:
    return {key: median(values) for key, values in found.items()}


__all__ = [
    "ALONE",
    "COMPOSED",
    "WHOLE",
    "Captured",
    "Key",
    "Move",
    "Outcome",
    "Parts",
    "Writes",
    "parts_of",
    "units_of",
]
