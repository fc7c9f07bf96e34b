"""A whole optimization: search within the budget, then verify the winner again and walk back where it fails.

Deals in the order of things and in which program is returned. Knows nothing about how programs are chosen (a search
does that), written or judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from qimeng.envs.ranking import beats, refusal
from qimeng.envs.replay import CachingEvaluator
from qimeng.envs.result import Result
from qimeng.envs.session import Budget, Progress, Session, State
from qimeng.envs.task import Task
from qimeng.interfaces import Evaluation, Gate
from qimeng.store import Store

SLOWER = 0.98
"""Below this speedup the computation as its author wrote it is returned instead."""


class Search(Protocol):
    """Decides which steps are taken."""

    def run(self, session: Session) -> str:
        """Take steps on `session` and its forks until it is done; why it ended (see `Result.stopped`)."""


def optimize(
    task: Task,
    search: Search,
    budget: Budget | None = None,
    store: Store | None = None,
    on_step: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
) -> Result:
    """Improve `task.start` step by step and return the best program that passes the final verification.

    Ctrl-C ends the search early; the best program so far is still verified and returned.

    Args:
        task: what is optimized.
        search: decides which steps are taken.
        budget: what may be used.
        store: where every attempt is recorded.
        on_step: told what is going on.
        clock: seconds, monotonic.
        began: the clock's time when the budget's seconds began; now by default.
    """
    session = Session(task, budget, store, on_step, clock, began)
    if task.start.fallback:
        return finish_opaque(session)
    try:
        if not session.begin().ok:
            return finish_unjudged(session)
        stopped = search.run(session)
    except KeyboardInterrupt:
        stopped = "interrupted"
    return finish(session, stopped)


def finish(session: Session, stopped: str) -> Result:
    """Verify the best program in a fresh process and make the result.

    The candidates are the start program and those of the best one's path that beat the candidate before by twice the
    uncertainty (see `qimeng.envs.ranking`), so that noise adds no step. The last is verified; where it fails, or is
    timed slower than the candidate before it, that one is next. The start program runs on PyTorch and is returned if
    nothing else passes.
    """
    task, ledger = session.task, session.ledger
    best = ledger.best or session.state
    candidates = established(best)
    notes: list[str] = [task.reason] if task.reason else []
    winner, evaluation = candidates[0], ledger.start
    try:
        for number in range(len(candidates) - 1, -1, -1):
            winner = candidates[number]
            parent = candidates[number - 1] if number else None
            session.tell("final", f"verify the program of {len(winner.recipe())} steps in a fresh process")
            evaluation = task.evaluator.final(winner.program)
            problem = refusal(evaluation, parent.evaluation if parent else None)
            if problem is None or number == 0:
                break
            notes.append(f"the program of {len(winner.recipe())} steps is not returned: {problem}")
    except KeyboardInterrupt:
        evaluation = winner.evaluation  # what came after it was refused
        notes.append("the final verification was interrupted; the figures are those of the search")
    if evaluation is None:
        evaluation = task.evaluator.final(task.start)
    if not evaluation.ok:
        notes.append(f"the start program failed its own verification: {evaluation.error}")
    elif evaluation.speedup is not None and evaluation.speedup < SLOWER and task.whole is not None:
        notes.append(f"operator by operator it is {evaluation.speedup:.3f} x PyTorch eager: returned as it was written")
        whole = replace(evaluation, timing=evaluation.eager, region_ms={}, generated_share=0.0)
        return _result(session, State(task.whole), whole, stopped, notes)
    return _result(session, winner, evaluation, stopped, notes)


def finish_opaque(session: Session) -> Result:
    """The result of a computation that could not be captured: the reference itself, timed where that is possible."""
    task = session.task
    evaluation, notes = session.begin(), [task.reason]
    if not evaluation.ok:
        notes.append(f"not timed: {evaluation.error}")
        evaluation = Evaluation(Gate.PASSED)
    return _result(session, State(task.start), evaluation, "opaque", notes)


def finish_unjudged(session: Session) -> Result:
    """The result where not even the start program passes: the computation as it was written, and why."""
    task, evaluation = session.task, session.begin()
    notes = [f"nothing could be judged, so it is returned as it was written: {evaluation.error}"]
    return _result(session, State(task.whole or task.start), evaluation, "unjudged", notes)


def _result(session: Session, winner: State, evaluation: Evaluation, stopped: str, notes: list[str]) -> Result:
    task, ledger = session.task, session.ledger
    notes = [*notes, *task.context.coder.remarks()]
    result = Result(
        name=task.name,
        source=winner.program.source,
        recipe=winner.recipe(),
        evaluation=evaluation,
        start=ledger.start or evaluation,
        steps=tuple(ledger.attempts),
        device=task.context.device.name,
        mode=task.context.mode,
        estimated=task.estimated,
        evaluations=ledger.evaluations,
        cached=task.evaluator.hits if isinstance(task.evaluator, CachingEvaluator) else 0,
        seconds=ledger.clock() - ledger.began,
        stopped=stopped,
        notes=tuple(notes),
        program=winner.program,
        reference=task.reference,
    )
    word = " (estimated)" if result.estimated else ""
    session.tell("end", f"{result.speedup:.2f} x PyTorch eager{word}" if result.speedup else "not timed")
    return result


def established(best: State) -> tuple[State, ...]:
    """The judged states on the way to `best`, each better than the one before beyond the noise."""
    timed = [s for s in best.path() if s.judged and s.evaluation is not None and s.evaluation.ok]
    kept = list(best.path()[:1])
    for state in timed:
        if state is not kept[0] and beats(state.evaluation, kept[-1].evaluation):
            kept.append(state)
    return tuple(kept)
