"""Beam search over any planner.

Deals in several trajectories at once, of which the fastest go on. Knows nothing about how steps are carried out.
"""

from __future__ import annotations

from qimeng.envs.steps.ahead import submit_ahead
from qimeng.envs.steps.session import Session
from qimeng.interfaces import Planner
from qimeng.planner.search import Search, own_trajectory, top_actions


class BeamSearch(Search):
    """Follow the planner's own trajectory, then expand `width` trajectories from the start and keep the fastest.

    Each is expanded by the planner's `branch` best actions. A program that was judged before costs no evaluation.

    A step may slow a program down before a later step pays off, such as a lowering before its tuning. So a trajectory
    that was not timed, or was just slowed down, is ranked by the best time on its path.

    Args:
        planner: proposes actions.
        width: trajectories kept.
        branch: actions tried in each.
    """

    def __init__(self, planner: Planner, width: int = 4, branch: int = 2):
        if width < 1 or branch < 1:
            raise ValueError(f"width and branch must be at least 1, got {width} and {branch}")
        self.planner, self.width, self.branch = planner, width, branch

    def run(self, session: Session) -> str:
        """Go on until every trajectory has stopped or the budget is used up."""
        for _ in own_trajectory(self.planner, session):
            pass
        beam, reason = [session], "stop"
        while beam:
            children: list[Session] = []
            found = [(p, a) for p in beam for a in top_actions(self.planner, p.observe(), self.branch)]
            submit_ahead(found)
            for parent, action in found:
                reason = parent.exhausted() or reason
                if reason in ("evaluations", "seconds"):
                    return reason
                child = parent.fork()
                if child.step(action).accepted:
                    children.append(child)
            unfinished = [c for c in children if c.exhausted() is None]
            beam = self._fastest(unfinished)
        return reason

    def _fastest(self, sessions: list[Session]) -> list[Session]:
        """The `width` fastest, one for each program; the planner's order decides between equals."""
        programs = {s.state.program.digest: s for s in reversed(sessions)}
        order = [s for s in sessions if programs[s.state.program.digest] is s]
        return sorted(order, key=_best_on_path)[: self.width]


def _best_on_path(session: Session) -> float:
    return min((s.ms for s in session.state.path() if s.ms is not None), default=float("inf"))


__all__ = ["BeamSearch"]
