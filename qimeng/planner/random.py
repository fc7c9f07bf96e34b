"""The random planner: the baseline that every other planner must beat.

Deals in uniform choices from a seed. Knows nothing about programs.
"""

from __future__ import annotations

import random

from qimeng.interfaces import Action, Observation, Planner


class RandomPlanner(Planner):
    """Chooses uniformly among the legal actions.

    `stop` is chosen only where nothing else is legal, so that the budget decides how long it goes on.

    Args:
        seed: of its own random generator; the same seed and observations give the same choices.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed
        self._random = random.Random(seed)

    def choose(self, observation: Observation) -> Action:
        """One of `observation.actions`."""
        others = [a for a in observation.actions if a.kind != "stop"]
        return self._random.choice(others) if others else Action("stop")


__all__ = ["RandomPlanner"]
