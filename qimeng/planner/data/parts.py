"""What programs of a network take, put together from what was found of its regions.

A network has far more programs than any exploration judges, but few regions that differ. A program whose regions were
all timed, in other programs or alone, has the sum of their times, as steps on regions have it live
(`qimeng.envs.steps.milestones`). So a planner can walk where nobody measured. Deals in trees, regions and milliseconds.
Knows nothing about planners.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

from qimeng.device import Device
from qimeng.envs.steps.caching import FINAL, UNKNOWN
from qimeng.envs.steps.milestones import shared_out
from qimeng.envs.steps.time_shares import by_operator
from qimeng.errors import ReplayError
from qimeng.graph.region import Region
from qimeng.interfaces import Asked, Evaluation, EvaluationRequest, Gate, Patch, Scope, SerialEvaluator
from qimeng.library import LANGUAGE
from qimeng.planner.data.tree import Tree
from qimeng.program.implementation import Implementation
from qimeng.program.program import Program
from qimeng.store import ACCIDENT, StoredStep, evaluation_key, subject_of

WHOLE, ALONE = "step", "region"
"""Purposes of what is stored: of a whole program, and of a region."""

Key = tuple[str, str]
"""Signature of a region and digest of its implementation."""


@dataclass(frozen=True)
class Parts:
    """What was found of the regions of a network.

    Attributes:
        start: what the judge said of the start program.
        alone: of implementations that were judged on their region.
        whole: milliseconds in programs that were judged as a whole.
        operators: milliseconds of each operator on PyTorch, by its name in the graph.
        launches: how a program is launched, to its time over the sum of its regions'.
        device: the device.
    """

    start: Evaluation
    alone: Mapping[Key, Evaluation]
    whole: Mapping[Key, float]
    operators: Mapping[str, float]
    launches: Mapping[str, float]
    device: Device

    def milliseconds(self, region: Region, implementation: Implementation) -> float | None:
        """Of one region; None where nobody timed it."""
        key = region.signature, implementation.digest
        on_torch = [self.operators.get(name) for name in by_operator(region, 1.0, self.device)]
        summed = None if None in on_torch else sum(ms for ms in on_torch if ms is not None)
        if implementation.language == "torch":
            return self.whole.get(key, summed)
        found = self.alone.get(key)
        if found is not None and found.speedup and summed:
            return summed / found.speedup
        return self.whole.get(key)

    def evaluation(self, program: Program) -> Evaluation | None:
        """Of a program, by its regions; None where one of them was not timed."""
        made = {r.id: program.implementation(r) for r in program.called}
        times = {r.id: self.milliseconds(r, made[r.id]) for r in program.called}
        known = {id_: ms for id_, ms in times.items() if ms is not None}
        if len(known) < len(times) or self.start.timing is None or program.launch not in self.launches:
            return None
        total = sum(known.values())
        own = sum(known[i] for i, m in made.items() if m.generated)
        library = sum(known[i] for i, m in made.items() if m.language == LANGUAGE)
        return replace(
            self.start,
            timing=replace(self.start.timing, device_ms=total * self.launches[program.launch], wall_ms=None),
            region_ms=known,
            generated_share=own / total if total else 0.0,
            library_share=library / total if total else 0.0,
        )


class PartsEvaluator(SerialEvaluator):
    """Answers what a tree holds, and what follows from its parts; else a failure of class ``"unknown"``.

    Args:
        tree: of a network, with the names of today's programs (`Tree.today`).
        start: its start program.
        device: the device that it was explored on.

    Attributes:
        parts: what was found of regions.
    """

    def __init__(self, tree: Tree, start: Program, device: Device):
        self._known = {s: e for purpose, s, e in tree.evaluations if purpose not in (FINAL, ACCIDENT)}
        self.parts = parts_of(tree, start, device)

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """Of a region or of a whole program; the fastest alternative that is known is chosen."""
        patch = request.patch
        if request.asked is Asked.REGION and patch is not None and patch.target is not None:
            found = self._known.get(request.region_subject) or self._region(request.program, patch)
            if found is not None:
                return replace(found, scope=Scope.REGION)
        subject = subject_of(request.program, patch)
        found = self._known.get(subject) or self._fastest(request)
        return found or Evaluation(Gate.WRITE, f"nothing is known of {subject}", UNKNOWN)

    def _region(self, program: Program, patch: Patch) -> Evaluation | None:
        signature = patch.apply(program).region(patch.target or "").signature
        found = [(i, self.parts.alone.get((signature, a.digest))) for i, a in enumerate(patch.alternatives)]
        right = [(i, e) for i, e in found if e is not None and e.ok and e.speedup]
        if right:
            chosen, best = max(right, key=lambda each: each[1].speedup or 0.0)
            return replace(best, chosen=chosen)
        return next((e for _, e in found if e is not None), None)

    def _fastest(self, request: EvaluationRequest) -> Evaluation | None:
        found = [(i, self.parts.evaluation(p)) for i, p in enumerate(request.candidates)]
        timed = [(e.ms, i, e) for i, e in found if e is not None and e.ms is not None]
        if not timed:
            return None
        _, chosen, best = min(timed, key=lambda each: each[:2])
        return replace(best, chosen=chosen)


def parts_of(tree: Tree, start: Program, device: Device) -> Parts:
    """What `tree` tells of regions.

    Raises:
        KeyError: it does not hold its start program.
    """
    walked = _Walk(tree, start)
    alone, whole, operators = dict[Key, Evaluation](), dict[Key, list[float]](), dict[str, float]()
    launches: dict[str, list[float]] = {}
    for program, evaluation in walked.wholes():
        times = evaluation.region_ms
        if all(r.id in times for r in program.called) and (total := sum(times[r.id] for r in program.called)):
            launches.setdefault(program.launch, []).append((evaluation.ms or 0.0) / total)
        else:
            times = shared_out(program, evaluation, device)
        for region in program.called:
            made = program.implementation(region)
            whole.setdefault((region.signature, made.digest), []).append(times[region.id])
            if made.language == "torch":
                for name, ms in by_operator(region, times[region.id], device).items():
                    operators.setdefault(name, ms)
    for region, made, evaluation in walked.alone():
        alone.setdefault((region.signature, made.digest), evaluation)
    return Parts(
        walked.judged[start.digest],
        alone,
        {key: median(ms) for key, ms in whole.items()},
        operators,
        {launch: median(ratios) for launch, ratios in launches.items()},
        device,
    )


class _Walk:
    """The programs of a tree, made again by applying its patches.

    Attributes:
        judged: digest of each program that was judged as a whole, to what was found.
    """

    def __init__(self, tree: Tree, start: Program):
        self.judged = {s: e for purpose, s, e in tree.evaluations if purpose == WHOLE}
        self._steps: list[tuple[Program, Patch, str, Evaluation | None]] = []
        self._programs = {start.digest: start}
        purposes = {evaluation_key(tree.conditions, s, p): (p, e) for p, s, e in tree.evaluations}
        leading: dict[str, list[StoredStep]] = {}
        for edge in tree.edges:
            leading.setdefault(edge.parent, []).append(edge)
        waiting = deque([start.digest])
        while waiting:
            parent = self._programs[waiting.popleft()]
            for edge in leading.get(parent.digest, ()):
                purpose, found = purposes.get(edge.evaluation or "", ("", None))
                if edge.patch is None or edge.patch not in tree.patches:
                    continue
                patch = tree.patches[edge.patch].patch(parent.graph)
                try:
                    child = patch.apply(parent, found.chosen if found is not None else 0)
                except (ReplayError, KeyError, IndexError):  # this version can no longer apply it
                    continue
                self._steps.append((child, patch, purpose, found))
                if edge.child == child.digest and child.digest not in self._programs:
                    self._programs[child.digest] = child
                    waiting.append(child.digest)

    def wholes(self) -> Iterator[tuple[Program, Evaluation]]:
        """Programs that were judged right as a whole, the start program first."""
        yield from ((p, self.judged[d]) for d, p in self._programs.items() if d in self.judged and self.judged[d].ms)
        yield from ((child, e) for child, _, purpose, e in self._steps if purpose == WHOLE and e and e.ok and e.ms)

    def alone(self) -> Iterator[tuple[Region, Implementation, Evaluation]]:
        """Regions that were judged by themselves."""
        for child, patch, purpose, found in self._steps:
            if purpose == ALONE and found is not None and patch.target is not None:
                region = child.region(patch.target)
                yield region, child.implementation(region), found


__all__ = ["Key", "Parts", "PartsEvaluator", "parts_of"]
