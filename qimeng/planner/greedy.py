"""Greedy search: one trajectory, the planner's choice at each step.

Deals in one session. Knows nothing about branches.
"""

from __future__ import annotations

from qimeng.envs.steps.session import Session
from qimeng.interfaces import Planner
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.search import Search


class GreedySearch(Search):
    """Observe, choose, step, until the planner stops or the budget is used up.

    Args:
        planner: chooses every step.
    """

    def __init__(self, planner: Planner):
        self.planner = planner

    def ahead(self, session: Session) -> None:
        """A planner by rule, which costs little to ask, is asked for later steps as well."""
        super().ahead(session)
        if isinstance(self.planner, HeuristicPlanner):
            session.likely = self.planner.choose

    def run(self, session: Session) -> str:
        """One trajectory from the session's state."""
        session.begin()
        while (reason := session.exhausted()) is None:
            session.step(self.planner.choose(session.observe()))
        return reason


__all__ = ["GreedySearch"]
