"""Interactive runs: every step is shown with its diff and verdict, and taken only if the user accepts it.

Deals in questions and answers as lines of text, with any planner, coder and judge. The caller supplies the functions
that ask and show, so that a script can replace the user. Knows nothing about terminals.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qimeng.actions import action_text
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import STOP, State
from qimeng.errors import QimengError
from qimeng.interfaces import Action, Planner
from qimeng.planner.search import Search

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_LINES = 60
"""Lines of a diff that are shown without being asked for."""

HELP = """\
  a, accept     take the step (Enter does the same)
  s, skip       skip it; the planner proposes another
  l, list       list the legal actions by number
  NUMBER        do the action with this number instead
  i TEXT        give the coder the instruction TEXT and write the same action again
  d, diff       show the whole diff
  q, stop       stop; the best accepted program is the result"""


@dataclass(frozen=True)
class Answer:
    """What the user wants.

    Attributes:
        what: ``"accept"``, ``"skip"``, ``"other"``, ``"instruct"``, ``"list"``, ``"diff"``, ``"stop"`` or ``"help"``.
        text: the instruction, or the line that was not understood.
        number: of the action in the list, from 1.
    """

    what: str
    text: str = ""
    number: int = 0


_WORDS = {
    "": "accept", "a": "accept", "accept": "accept", "y": "accept", "yes": "accept",
    "s": "skip", "skip": "skip", "n": "skip", "no": "skip",
    "l": "list", "list": "list", "d": "diff", "diff": "diff",
    "q": "stop", "stop": "stop", "quit": "stop",
}  # fmt: skip


def read_answer(line: str) -> Answer:
    """Parse a line into an answer; ``"help"`` if it is none.

    >>> read_answer(" 12 "), read_answer("i use two stages").text, read_answer("what?").what
    (Answer(what='other', text='', number=12), 'use two stages', 'help')
    """
    line = line.strip()
    word, _, rest = line.partition(" ")
    if word.lower() in ("i", "instruct") and rest.strip():
        return Answer("instruct", rest.strip())
    if line.isdecimal():
        return Answer("other", number=int(line))
    return Answer(_WORDS.get(line.lower(), "help"), line)


class Interactive(Search):
    """One trajectory on which the user decides about every step.

    The user's time does not count against the budget.

    Args:
        planner: proposes.
        ask: shows a question and returns the answered line; None at the end of the input, which ends the search.
        show: shows text.
        clock: monotonic seconds; the same clock as the session's.
    """

    def __init__(
        self,
        planner: Planner,
        ask: Callable[[str], str | None],
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.planner, self._ask, self.show, self._clock = planner, ask, show, clock

    def run(self, session: Session) -> str:
        """Propose, run, show and ask, until the user or the planner stops or the budget is used up."""
        session.begin()
        self.show(f"The start program: {_time(session.state)}. Answer with one of:\n{HELP}")
        action: Action | None = None
        instruction = ""
        while (reason := session.exhausted()) is None:
            observation = session.observe()
            action = action or self.planner.choose(observation)
            if action == STOP:
                answer = self._answer("The planner proposes to stop. Stop?", observation.actions, "", session)
            else:
                answer = self._try(session, action, instruction, observation.actions)
            if answer.what == "stop" or (answer.what == "accept" and action == STOP):
                session.step(STOP)
            action = {"other": _numbered(observation.actions, answer), "instruct": action}.get(answer.what)
            instruction = answer.text if answer.what == "instruct" else ""
        return reason

    def _try(self, session: Session, action: Action, instruction: str, actions: Sequence[Action]) -> Answer:
        """Run `action` on a fork; the session takes it only if the user accepts."""
        before, best = session.state, session.ledger.best
        self.show(f"\n{action_text(action, before.program)} …")
        trial = session.fork()
        step = trial.step(action, instruction)
        diff = _diff(before.program.source, trial.state.program.source)
        if not step.accepted:
            found = step.evaluation
            self.show(f"refused (gate {found.gate.value}): {found.error}" if found else "refused")
            session.state = trial.state  # an instruction about it finds the refusal in the history
            return self._answer("Go on?", actions, diff, session)
        self.show(_clip(diff))
        attempt = session.ledger.attempts[-1]
        gain = f", {attempt.gain:.3f} x as fast" if attempt.gain else ""
        self.show(f"right: {_time(before)} -> {_time(trial.state)}{gain}")
        answer = self._answer("Accept?", actions, diff, session)
        if answer.what == "accept":
            session.state = trial.state
        else:
            session.turn_down(trial, best, f"turned down by the user ({answer.what})")
        return answer

    def _answer(self, question: str, actions: Sequence[Action], diff: str, session: Session) -> Answer:
        """Ask until an answer decides what to do."""
        while True:
            began = self._clock()
            line = self._ask(f"{question} [a, s, l, NUMBER, i TEXT, d, q] ")
            session.ledger.began += self._clock() - began
            if line is None:
                self.show("no more answers: stopped here")
                return Answer("stop")
            answer = read_answer(line)
            if answer.what == "list":
                program = session.state.program
                self.show("\n".join(f"{n:4}  {action_text(a, program)}" for n, a in enumerate(actions, 1)))
            elif answer.what == "diff":
                self.show(diff or "no change")
            elif answer.what == "help":
                self.show(f"{answer.text!r} is not an answer. Answer with one of:\n{HELP}")
            elif answer.what == "other" and not 1 <= answer.number <= len(actions):
                self.show(f"there is no action {answer.number}; `l` lists actions 1 to {len(actions)}")
            else:
                return answer


def _numbered(actions: Sequence[Action], answer: Answer) -> Action | None:
    return actions[answer.number - 1] if answer.what == "other" else None


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before.py", "after.py", lineterm="", n=2)
    return "\n".join(lines)


def _clip(diff: str) -> str:
    lines = diff.splitlines()
    more = len(lines) - SHOWN_LINES
    return "\n".join([*lines[:SHOWN_LINES], f"… {more} more lines (d shows them)"]) if more > 0 else diff


def _time(state: State) -> str:
    return str(state.evaluation.timing) if state.evaluation and state.evaluation.timing else "not timed"


def line_reader(show: Callable[[str], None]) -> Callable[[str], str | None]:
    """Reads answers from standard input, one a line, typed or from a file; None at the end.

    Args:
        show: shows the question and the answer, if standard input is not a terminal.
    """
    import sys

    def ask(question: str) -> str | None:
        if sys.stdin.isatty():
            try:
                return input(question)
            except EOFError:
                return None
        line = sys.stdin.readline()
        show(f"{question}{line.rstrip()}")
        return line.rstrip("\n") if line else None

    return ask


def terminal_search(screen: Console, planner: str, search: str) -> Interactive:
    """The search of ``qimeng optimize --interactive``.

    Args:
        screen: where questions are shown.
        planner: name of the planner.
        search: value of ``--search``.

    Raises:
        QimengError: a search was given as well.
    """
    from qimeng.planner import SEARCH, make_planner

    if search != SEARCH:
        raise QimengError(f"--interactive replaces the search; leave out --search {search}")

    def show(text: str) -> None:
        screen.print(text, markup=False, soft_wrap=True)

    return Interactive(make_planner(planner), line_reader(show), show)


__all__ = ["Answer", "Interactive", "line_reader", "read_answer", "terminal_search"]
