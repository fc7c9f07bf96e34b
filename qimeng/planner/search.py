"""What every search shares: several good actions from any planner.

Deals in rankings. Knows nothing about how steps are carried out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from qimeng.envs.session import Session
from qimeng.interfaces import Action, Observation, Planner


class Search(ABC):
    """Decides which steps are taken on a session and its forks."""

    @abstractmethod
    def run(self, session: Session) -> str:
        """Take steps until nothing is left to do; why it ended (`qimeng.envs.result.Result.stopped`)."""


class ScoringPlanner(Planner):
    """A planner that scores every action, which gives a search a ranking in one call."""

    @abstractmethod
    def scores(self, observation: Observation) -> Sequence[float]:
        """A score for each of `observation.actions`, higher is better (log-probabilities, say)."""

    def choose(self, observation: Observation) -> Action:
        """The action with the highest score, the first of them where several share it."""
        scores = self.scores(observation)
        return observation.actions[max(range(len(scores)), key=scores.__getitem__)]


def top_actions(planner: Planner, observation: Observation, count: int) -> tuple[Action, ...]:
    """The `count` actions that `planner` likes best, best first.

    A planner without scores is asked again with its choices so far left out; its `stop` ends the list.
    """
    if isinstance(planner, ScoringPlanner):
        ranked = sorted(zip(planner.scores(observation), observation.actions, strict=True), key=lambda pair: -pair[0])
        return tuple(action for _, action in ranked[:count])
    chosen: list[Action] = []
    while len(chosen) < count:
        left = tuple(a for a in observation.actions if a not in chosen)
        if not left:
            break
        chosen.append(planner.choose(replace(observation, actions=left)))
        if chosen[-1].kind == "stop":
            break
    return tuple(chosen)
