"""The ε-greedy mixture of any planner with random actions.

Deals in coin flips from a seed. Knows nothing about programs.
"""

from __future__ import annotations

import random

from qimeng.interfaces import Action, Observation, Planner
from qimeng.planner.random import RandomPlanner


class MixturePlanner(Planner):
    """Chooses uniformly among the legal actions with probability `epsilon`, else as `planner` does.

    It explores trees around the trajectories of a good planner, so that training sees the cost of mistakes.

    Args:
        planner: what is mixed with chance.
        epsilon: probability of a random action, 0 to 1.
        seed: of its random generator; the same seed and observations give the same choices.
    """

    def __init__(self, planner: Planner, epsilon: float = 0.3, seed: int = 0):
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon is a probability, got {epsilon}")
        self.planner, self.epsilon = planner, epsilon
        self._random, self._other = random.Random(f"mixture {seed}"), RandomPlanner(seed)

    def choose(self, observation: Observation) -> Action:
        """A random action or the planner's. The random action is never `stop` if anything else is legal."""
        chance = self._random.random() < self.epsilon
        return (self._other if chance else self.planner).choose(observation)


__all__ = ["MixturePlanner"]
