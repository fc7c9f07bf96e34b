"""The next best ways to write a kernel, where the final verification found a program wrong.

A step judges several ways to write a kernel on a few inputs and keeps the fastest. The final verification tries every
kind of input. What it refuses is repaired by a way of the same step that computes otherwise, so that a search is not
lost for its last choice. Deals in the ways that steps did not take. Knows nothing about how they are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from qimeng.envs.judge.ranking import refusal
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import State
from qimeng.interfaces import Asked, Evaluation

REPAIRS = 2
"""Programs that a final verification may try in this way."""


class Repairs:
    """Repairs of what a final verification refuses, `REPAIRS` in all.

    Args:
        session: the optimization, at its end.
        notes: where what was tried in vain is said.
    """

    def __init__(self, session: Session, notes: list[str]):
        self._session, self._notes, self._left = session, notes, REPAIRS

    def of(self, refused: State, parent: State | None) -> tuple[State, Evaluation] | None:
        """The first other way that passes, with its final verification; None where none does.

        Args:
            refused: the state whose program was found wrong.
            parent: the state that a repair has to be faster than.
        """
        session = self._session
        if not session.fits(1):
            return None
        for other in islice(_other_ways(session, refused), self._left):
            self._left -= 1
            if not session.fits():
                return None
            session.tell("final", "verify another way to write its last kernel")
            found = session.task.judged(other.program, asked=Asked.FINAL)
            problem = refusal(found, parent.evaluation if parent else None)
            if problem is None:
                return other, found
            self._notes.append(f"another way to write its last kernel is not returned: {problem}")
            if found.failure != "wrong":  # too slow, and the others are slower
                return None
        return None


def _other_ways(session: Session, refused: State) -> Iterator[State]:
    """The states that other ways of the last step of `refused` lead to, if a search finds them right; fastest first.

    No two of them compute alike. Each is judged when it is asked for.
    """
    state = refused
    while (way := session.ledger.unchosen.get(state.program.digest)) is not None:
        branch = session.fork()
        branch.state = way.before
        branch.verify(way.action, way.patch)
        state = branch.state
        if state is way.before or not state.judged:
            return
        yield state


__all__ = ["REPAIRS", "Repairs"]
