"""Best-of-n sampling: the planner's own trajectory, then others drawn from its policy.

Deals in independent trajectories from a seed. Knows nothing about branches.
"""

from __future__ import annotations

import random

from qimeng.envs.session import Session
from qimeng.interfaces import Action, Observation, Planner
from qimeng.planner.search import PATIENCE, Search, own_trajectory, policy, trajectory


class BestOfN(Search):
    """Take the planner's choices once, then draw `n` - 1 more trajectories from its policy; the best program counts.

    Each begins at the start program and ends where `stop` is drawn or nothing better was found for a while. What was
    judged before is not judged again, so it costs no evaluation.

    Args:
        planner: gives the policy (`qimeng.planner.search.policy`).
        n: trajectories at most; the budget usually ends them earlier.
        seed: of what is drawn.
        patience: evaluations in a row without a better program after which a trajectory is left; 0 for never.
    """

    def __init__(self, planner: Planner, n: int = 32, seed: int = 0, patience: int = PATIENCE):
        if n < 1 or patience < 0:
            raise ValueError(f"n must be at least 1 and patience at least 0, got {n} and {patience}")
        self.planner, self.n, self.patience = planner, n, patience
        self._random = random.Random(f"best of n {seed}")

    def run(self, session: Session) -> str:
        """Go on until all trajectories have ended or the budget is used up; ``"stop"`` in the first case."""
        for _ in own_trajectory(self.planner, session, self.patience):
            pass
        for _ in range(self.n - 1):
            if reason := session.exhausted():
                return reason
            for _ in trajectory(session, self._draw, self.patience):
                pass
        return session.exhausted() or "stop"

    def _draw(self, observation: Observation) -> Action:
        return self._random.choices(observation.actions, policy(self.planner, observation))[0]
