"""Hill climbing: greedy search that undoes a tuning step that did not make the program faster.

Deals in one trajectory. Knows nothing about branches.
"""

from __future__ import annotations

from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import State
from qimeng.interfaces import Planner
from qimeng.planner.search import Search


class HillClimb(Search):
    """Observe, choose, step. A schedule without gain is undone, and the next choice builds on the faster one.

    Only steps that replace one generated kernel of a region by another are undone. A lowering or a fusion may slow a
    program down before its tuning pays off, so those stay, as in the greedy search.

    Args:
        planner: chooses every step; it sees the steps taken back in its history.
    """

    def __init__(self, planner: Planner):
        self.planner = planner

    def run(self, session: Session) -> str:
        """One trajectory from the session's state."""
        session.begin()
        while (reason := session.exhausted()) is None:
            before = session.state
            session.step(self.planner.choose(session.observe()))
            if session.state.done:
                continue  # to stop is no step to take back
            if _gains_nothing(before, session.state) and _retuned(before, session.state):
                session.return_to(before)
        return reason


def _gains_nothing(before: State, after: State) -> bool:
    return before.ms is not None and after.ms is not None and after.ms >= before.ms


def _retuned(before: State, after: State) -> bool:
    """Whether the partition is the same, and every kernel that changed was a generated one before."""
    if before.program.regions != after.program.regions:
        return False
    old = [before.program.implementation(r) for r in before.program.regions]
    new = [after.program.implementation(r) for r in after.program.regions]
    return all(a.generated for a, b in zip(old, new, strict=True) if a != b)


__all__ = ["HillClimb"]
