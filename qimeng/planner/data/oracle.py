"""A planner that knows what comes of every action: what a trained one can gain at most, and what it may imitate.

Deals in parts that were timed (`qimeng.planner.data.parts`) and in savings an evaluation. Knows nothing about models.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace

from qimeng.actions.large import unlike
from qimeng.envs.steps.state import STOP
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Observation, Planner
from qimeng.planner.data.parts import Move, Outcome
from qimeng.planner.data.put_together import Known
from qimeng.program.program import Program

DEEP = 3
"""Most actions on one region that are looked ahead."""

LEAST = 1e-3
"""A saving below this share of the program's time is none."""

FREE = ("cluster", "fusion")
"""Kinds of the graph alone, which take no evaluation."""


class OraclePlanner(Planner):
    """Takes the action, or the first of several on one region, that saves most for each evaluation (greedy knapsack).

    Clusters come first, and fusions of regions that are faster as one: they take no evaluation.

    Args:
        known: of the task that is optimized.
        foresees: whether it knows which kernels the coder writes right. Otherwise it knows what each saves if it is
            right, and how likely that is (`Parts.writes`), and takes what saves most on average. Beforehand, a planner
            can know no more.
    """

    def __init__(self, known: Known, foresees: bool = True):
        self.known, self.parts = known, known.coder.parts
        self._writes = None if foresees else self.parts.writes
        if self._writes is not None:
            self.parts = replace(self.parts, writes=None)

    def choose(self, observation: Observation) -> Action:
        """The best action; stops where none saves anything."""
        best = max(self.ranked(observation), key=lambda each: each[0], default=(0.0, STOP))
        return best[1]

    def ranked(self, o: Observation) -> Iterator[tuple[float, Action]]:
        """Actions that save something, each with how much: a share of the program's time for each evaluation."""
        tried = {step.action for step in o.history}
        together = next((a for a in o.actions if a not in tried and self._gains_fused(o.program, a)), None)
        if together is not None:
            yield float("inf"), together
            return
        now = self.parts.evaluation(o.program, self.known.judge.start)
        if now is None or not now.ms:
            return
        offered = set(o.actions)
        for action in o.actions:
            if action == STOP or action.kind in FREE or len(action.regions) == 1 or action in tried:
                continue
            after = self.known.evaluation(o.program, action)
            if after is not None and after.ok and after.ms and (saved := 1 - after.ms / now.ms) > LEAST:
                yield saved, action
        alike = Counter(region.signature for region in o.program.called)
        for here in unlike(o.program):
            on_torch = self.parts.on_torch(here)
            made = o.program.implementation(here)
            present = 1.0 if made.language == "torch" else self.parts.ratios.get((here.signature, made.digest))
            if on_torch is None or present is None:
                continue
            for ratio, path, likely in self._paths(here, made.digest):
                action = Action(path[0][0], (here.id,), path[0][1])
                saved = alike[here.signature] * on_torch * (present - ratio) / now.ms
                if action in offered and saved > LEAST:
                    yield likely * saved / len(path), action

    def _gains_fused(self, program: Program, action: Action) -> bool:
        """Whether `action` makes clusters, or one region of two that is not known to be slower than these alone."""
        if action.kind not in FREE or action.param:
            return False
        if action.kind == "cluster":
            return True
        merged = program.fusions.merged(*action.regions)
        if (merged.signature, program.implementation(merged).digest) not in self.parts.moves:
            return True
        alone = [self._fastest(program, program.region(r)) for r in action.regions]
        fused = self._fastest(program, merged)
        return fused is not None and fused <= sum(ms for ms in alone if ms is not None)

    def _fastest(self, program: Program, region: Region) -> float | None:
        """Milliseconds of `region` at best; None where it was not timed."""
        on_torch = self.parts.on_torch(region)
        if on_torch is None:
            return None
        begin = program.implementation(region).digest
        return on_torch * min((ratio for ratio, _, _ in self._paths(region, begin)), default=1.0)

    def _paths(self, region: Region, begin: str) -> Iterator[tuple[float, tuple[Move, ...], float]]:
        """Every implementation that known actions lead to: its time over PyTorch's, the fewest actions, and a chance.

        The chance is that all of them are written right.
        """
        ways: dict[str, tuple[Move, ...]] = {begin: ()}
        likely, waiting = {begin: 1.0}, deque([begin])
        while waiting:
            here = waiting.popleft()
            if len(ways[here]) == DEEP:
                continue
            for move, outcome in self.parts.tried(region, here).items():
                made = outcome.implementation.digest
                if outcome.ratio is None or made in ways:
                    continue
                ways[made] = (*ways[here], move)
                likely[made] = likely[here] * self._chance(region, outcome)
                waiting.append(made)
                yield self.parts.ratios.get((region.signature, made), outcome.ratio), ways[made], likely[made]

    def _chance(self, region: Region, outcome: Outcome) -> float:
        kind = self.parts.kinds.get((region.signature, outcome.implementation.digest))
        if self._writes is None or kind is None:
            return 1.0
        return self._writes.chance(region, outcome.implementation, kind)


__all__ = ["OraclePlanner"]
