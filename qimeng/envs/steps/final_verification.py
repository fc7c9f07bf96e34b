"""The final verification: which of a search's candidates is returned.

Deals in candidates in order, in what a fresh process finds of them, and in the one that is right and fastest. Knows
nothing about how they were found, or what is returned where none passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qimeng.envs.judge.ranking import TIE, beats, refusal
from qimeng.envs.screening.origin import printed
from qimeng.envs.steps.second_best import Repairs
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import State
from qimeng.envs.steps.time_up import TimeUp
from qimeng.interfaces import Asked, Evaluation, Gate

CLOCKS = ("clock", "not-timed")
"""Classes of failure of a right program whose time is not believed."""


class FinalVerification:
    """Verifies the last candidate. Where that is refused, the one before it, and so on.

    A search has timed a candidate faster than the one before it. One that is right, but takes longer than that when
    timed again, is kept: it is returned after all where the one before it turns out to be slower still.

    Args:
        session: the search, at its end.
        candidates: the start program first; each was found faster than the one before.
        notes: where it says what is not returned, and why.

    Attributes:
        winner: the candidate at hand, in the end the one that is returned.
    """

    def __init__(self, session: Session, candidates: Sequence[State], notes: list[str]):
        self._session, self._candidates, self._notes = session, candidates, notes
        self._kept: tuple[State, Evaluation] | None = None
        self.winner = candidates[0]

    def run(self) -> tuple[State, Evaluation]:
        """The winner, and its final verification; what the search found of it where that was interrupted.

        Raises:
            TimeUp: none was verified before the wall limit.
        """
        try:
            found = self._walk_back()
        except TimeUp:
            if self._kept is None:
                raise
            found = None
        except KeyboardInterrupt:
            if self._kept is None:
                return self.winner, self._unverified()
            found = None
        if self._kept is not None and (found is None or not found.ok or beats(self._kept[1], found)):
            self.winner, found = self._kept
            steps = len(self.winner.recipe())
            self._notes.append(f"the program of {steps} steps is returned: none that was to replace it is faster")
        assert found is not None
        return self.winner, found

    def _unverified(self) -> Evaluation:
        found = self.winner.evaluation or Evaluation(Gate.WRITE, "interrupted before it was judged", "interrupted")
        if self.winner.program.on_pytorch:
            return found
        self._notes.append("the figures are those of the search")  # what came after it was refused
        return replace(found, unchecked="the final verification was interrupted")

    def _walk_back(self) -> Evaluation:
        session, repairs = self._session, Repairs(self._session, self._notes)
        for number in range(len(self._candidates) - 1, -1, -1):
            self.winner = self._candidates[number]
            parent = self._candidates[number - 1] if number else None
            session.check_time()
            session.tell("final", f"verify the program of {len(self.winner.recipe())} steps in a fresh process")
            found = self._verified()
            problem = refusal(found, parent.evaluation if parent else None)
            if problem is None or number == 0:
                break
            self._notes.append(f"the program of {len(self.winner.recipe())} steps is not returned: {problem}")
            is_slow = found.speedup is not None and found.speedup < 1 - TIE
            if found.ok and not is_slow and (self._kept is None or beats(found, self._kept[1])):
                self._kept = self.winner, found
            if found.failure == "wrong" and (repaired := repairs.of(self.winner, parent)) is not None:
                self.winner, found = repaired
                break
        return found

    def _verified(self) -> Evaluation:
        """The final verification of a program: once more where clocks disagreed and seconds are left.

        Only of what templates and PyTorch wrote. For other texts it would be one more draw for a program that cheats.
        """
        session, program = self._session, self.winner.program
        found = session.task.judged(program, asked=Asked.FINAL)
        if found.failure not in CLOCKS or not printed(program) or session.ledger.seconds_left <= 0:
            return found
        self._notes.append(f"the program of {len(self.winner.recipe())} steps was verified again: {found.error}")
        session.tell("final", "verify it again: its times and the judge's clock disagreed")
        return session.task.judged(program, asked=Asked.FINAL)


__all__ = ["FinalVerification"]
