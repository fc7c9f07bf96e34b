"""The next best way to write a kernel, where the final verification found a program wrong.

A step judges several ways to write a kernel on a few inputs and keeps the fastest. The final verification tries every
kind of input. What it refuses is repaired by a way of the same step that computes otherwise, so that a search is not
lost for its last choice. Deals in the ways that steps did not take. Knows nothing about verdicts.
"""

from __future__ import annotations

from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import State

REPAIRS = 2
"""Programs that a final verification may try in this way."""


def next_best(session: Session, refused: State) -> State | None:
    """The state that the last step of `refused` leads to by the fastest other way that is right; None without one."""
    way = session.ledger.unchosen.get(refused.program.digest)
    if way is None:
        return None
    branch = session.fork()
    branch.state = way.before
    branch.verify(way.action, way.patch)
    return branch.state if branch.state is not way.before and branch.state.judged else None


__all__ = ["REPAIRS", "next_best"]
