"""What a trained planner has learnt to choose; the planner by rule chooses the rest.

A model scores the text of an action that no tree had, a CUDA graph for one, as it happens to. Deals in observations and
scores. Knows nothing about models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from qimeng.actions.large import MANY, is_large
from qimeng.envs.steps.state import STOP
from qimeng.interfaces import Action, Asked, Observation
from qimeng.planner.data.tree import Tree
from qimeng.planner.heuristic import HeuristicPlanner

MOST = 0.99
"""Share of the trees whose best program counts for the number of regions: single ones are no practice."""


@dataclass(frozen=True)
class Learnt:
    """What the trees had that a planner was trained on.

    Attributes:
        actions: kinds of action, each with its option (``"tiling taller"``), sorted.
        regions: of the best programs, at most, in `MOST` of the trees.
        large: whether that makes programs large (`qimeng.actions.large`).
    """

    actions: tuple[str, ...]
    regions: int
    large: bool = False

    @classmethod
    def of(cls, trees: Iterable[Tree]) -> Self:
        """From trees."""
        names, regions = set[str](), list[int]()
        for tree in trees:
            names |= {action_name(step.action) for step in tree.edges}
            timed = [e for p, _, e in tree.evaluations if p != Asked.REGION.value and e.ok and e.ms is not None]
            if timed:
                regions.append(len(min(timed, key=lambda e: e.ms or 0.0).region_ms))
        count = sorted(regions)[int(MOST * len(regions))] if regions else 0
        return cls(tuple(sorted(names)), count, count >= MANY)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        return cls(tuple(data["actions"]), int(data["regions"]), bool(data.get("large", False)))

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "actions": list(self.actions)}

    def __or__(self, other: Self) -> Self:
        """What either has."""
        actions, large = tuple(sorted({*self.actions, *other.actions})), self.large or other.large
        return type(self)(actions, max(self.regions, other.regions), large)

    def ruled(self, observation: Observation) -> Action | None:
        """What the planner by rule chooses, where that is for it to say; None where the model decides.

        That is where its choice is of a kind that was not learnt, and in programs of more regions, once they are fused.
        """
        choice, program = HeuristicPlanner().choose(observation), observation.program
        if choice == STOP:
            return None
        many = len(program.called) > self.regions and choice.kind != "fusion"
        beyond = not self.large if is_large(program) else many
        return choice if beyond or action_name(choice) not in self.actions else None

    def is_done(self, observation: Observation) -> bool:
        """Whether neither the planner by rule nor the model has anything to choose."""
        return not self._legal(observation) and self.ruled(observation) is None

    def scored(self, observation: Observation, scores: Sequence[float]) -> list[float]:
        """`scores` with what the planner by rule chooses above all others, and what was not learnt below them.

        Where neither has anything to choose, scores stay as they are.
        """
        choice, legal = self.ruled(observation), self._legal(observation)
        if choice is None and not legal:
            return list(scores)
        found = [s if a in legal else -math.inf for s, a in zip(scores, observation.actions, strict=True)]
        if choice in observation.actions:
            found[observation.actions.index(choice)] = max(0.0, *scores)
        return found

    def _legal(self, observation: Observation) -> set[Action]:
        return {a for a in observation.actions if action_name(a) in self.actions}


def action_name(action: Action) -> str:
    """The kind with its option, as in ``"tiling taller"``."""
    return f"{action.kind} {action.param}".strip()


__all__ = ["Learnt", "action_name"]
