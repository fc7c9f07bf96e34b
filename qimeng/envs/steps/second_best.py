"""The next best way to write a kernel, where the final verification found a program wrong.

A step judges several ways to write a kernel on a few inputs and keeps the fastest. The final verification tries every
kind of input. What it refuses is repaired by a way of the same step that computes otherwise, so that a search is not
lost for its last choice. Deals in the ways that steps did not take. Knows nothing about verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qimeng.interfaces import Action, Patch

if TYPE_CHECKING:
    from qimeng.envs.steps.session import Session
    from qimeng.envs.steps.state import State

REPAIRS = 2
"""Programs that a final verification may try in this way."""


@dataclass(frozen=True)
class Unchosen:
    """The ways that an accepted step did not take.

    Attributes:
        before: the state before the step.
        action: of the step.
        patch: with those of its alternatives that compute otherwise than the chosen one.
    """

    before: State
    action: Action
    patch: Patch


def unchosen(before: State, action: Action, patch: Patch, chosen: int) -> Unchosen | None:
    """What is left of `patch` where alternative number `chosen` turns out wrong; None where nothing is."""
    if patch.others or len(patch.alternatives) < 2:
        return None
    taken = patch.alternatives[chosen]
    numerics = taken.schedule.numerics if taken.schedule else ""
    left = tuple(
        other
        for other in patch.alternatives
        if other is not taken and not (numerics and other.schedule and other.schedule.numerics == numerics)
    )
    return Unchosen(before, action, replace(patch, alternatives=left)) if left else None


def next_best(session: Session, refused: State) -> State | None:
    """The state that the last step of `refused` leads to by the fastest other way that is right; None without one."""
    way = session.ledger.unchosen.get(refused.program.digest)
    if way is None:
        return None
    branch = session.fork()
    branch.state = way.before
    branch.verify(way.action, way.patch)
    return branch.state if branch.state is not way.before and branch.state.judged else None


__all__ = ["REPAIRS", "Unchosen", "next_best", "unchosen"]
