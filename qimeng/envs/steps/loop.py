"""A whole optimization: search within the budget, verify the winner again, fall back to earlier programs if it fails.

Deals in the order of the phases and the choice of the returned program. Knows nothing about how programs are chosen (a
search does that), written or judged.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, runtime_checkable

from qimeng.actions import check_action
from qimeng.envs.cost.roofline import roofline
from qimeng.envs.judge.ranking import beats
from qimeng.envs.steps.compiled_first import compiled_first, compiled_last, submit_first
from qimeng.envs.steps.compiled_whole import compiled_whole
from qimeng.envs.steps.final_verification import FinalVerification
from qimeng.envs.steps.left_out import left_aside, left_out
from qimeng.envs.steps.result import Result
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget, Progress, State
from qimeng.envs.steps.task import Task
from qimeng.envs.steps.time_up import TimeUp, time_up_after
from qimeng.errors import IllegalAction, PlannerFault, QimengError
from qimeng.interfaces import Action, Asked, Evaluation, Gate, Planner
from qimeng.plugins import where
from qimeng.store import Store

CLUSTER = Action("cluster")

MANY = 96
"""Regions from which on a program has too many for a search to look at each pair: a budget is tens of steps."""


class Search(Protocol):
    """Decides which steps are taken."""

    def run(self, session: Session) -> str:
        """Take steps on `session` and its forks until it is done; why it ended (see `Result.stopped`)."""


@runtime_checkable
class LooksAhead(Protocol):
    """A search that says what its first steps may need."""

    def ahead(self, session: Session) -> None:
        """Begin with that, before the start program is judged."""


def optimize(
    task: Task,
    search: Search,
    budget: Budget | None = None,
    store: Store | None = None,
    on_step: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
    waited: Callable[[], float] = lambda: 0.0,
) -> Result:
    """Improve `task.start` step by step and return the best program that passes the final verification.

    Ctrl-C ends the search early; the best program so far is still verified and returned. So does a wall limit
    (`Budget.wall_seconds`) that comes while something waits for the device. Whatever search follows, what
    PyTorch offers for a large computation is tried first (`qimeng.envs.steps.compiled_first`), and a program of very
    many regions is made a small one (`qimeng.actions.cluster`).

    Args:
        task: what is optimized.
        search: decides which steps are taken.
        budget: what may be used.
        store: where every attempt is recorded.
        on_step: called with what is going on.
        clock: seconds, monotonic.
        began: the clock's time when the budget's seconds began; now by default.
        waited: tells how many of the clock's seconds the judge has waited for a device that others use; they do not
            count against the budget's seconds.
    """
    session = Session(task, budget, store, on_step, clock, began, waited)
    try:
        with time_up_after(session.ledger.wall_left):
            return _optimized(session, search)
    except TimeUp:  # where nothing can be made of it: before anything was judged, for one
        return _out_of_time(session, session.state, [])


def _optimized(session: Session, search: Search) -> Result:
    """The phases in order."""
    task = session.task
    if task.start.fallback:
        return finish_opaque(session)
    failed: tuple[str, ...] = ()
    try:
        submit_first(session)
        if isinstance(search, LooksAhead):
            search.ahead(session)
        if not session.begin().ok:
            return finish_unjudged(session)
        late = compiled_first(session)
        if len(task.start.regions) >= MANY and _applies(CLUSTER, task):
            session.step(CLUSTER)
        stopped = search.run(session)
        _prepare_final(session)
        compiled_last(late)
    except TimeUp:
        stopped = "seconds"
        session.tell("interrupted", "the wall-clock limit has come: the search ends")
    except KeyboardInterrupt:
        stopped = "interrupted"
        session.tell(
            "interrupted",
            "interrupted: the best program is verified; press Ctrl-C again to quit at once, it is then UNCHECKED",
        )
    except Exception as error:  # a planner or search of the user's own may raise anything
        if not _is_planners(error):
            raise
        stopped, failed = "failed", (f"the search ended early: {_culprit(error, search)} failed: {_words(error)}",)
    return finish(session, stopped, failed)


def _prepare_final(session: Session) -> None:
    """Have the judge compile the most promising program anew, which it does for a final verification."""
    leader = session.ledger.leader
    if leader is not None and not leader.program.on_pytorch:
        session.task.prepare(session.task.request(leader.program, asked=Asked.FINAL))


def _applies(action: Action, task: Task) -> bool:
    try:
        check_action(task.start, action, task.context)
    except IllegalAction:
        return False
    return True


def _is_planners(error: Exception) -> bool:
    """Whether a planner or search raised `error` by itself, not in a step that it took, nor as a clear message."""
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    mine = {method.__code__ for method in (Session.step, Session.begin, Session.observe, Session.offered)}
    return isinstance(error, PlannerFault) or not (isinstance(error, QimengError) or codes & mine)


def _culprit(error: Exception, search: Search) -> str:
    """Who raised `error`, or chose what is no action: a planner or the search, with its module and class."""
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    asked = vars(search).values() if isinstance(error, PlannerFault) else ()
    planner = next((one for one in (*reversed(selves), *asked) if isinstance(one, Planner)), None)
    return f"the planner {where(planner)}" if planner is not None else f"the search {where(search)}"


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, PlannerFault) else f"{type(error).__name__}: {error}"


def finish(session: Session, stopped: str, remarks: tuple[str, ...] = ()) -> Result:
    """Verify the best program in a fresh process and build the result.

    The candidates are the start program and those of the best one's path that beat the candidate before by twice the
    uncertainty (`qimeng.envs.judge.ranking`), so that noise adds no step. The last is verified; where it is wrong,
    another way to write its last kernel is (`qimeng.envs.steps.second_best`). Where that fails too, or is timed slower
    than the candidate before it, that one is next (`qimeng.envs.steps.final_verification`). Where torch.compile, timed
    beside it, is faster, its code is taken (`qimeng.envs.steps.compiled_whole`). Where nothing else passes, or what
    passes runs on PyTorch alone, the computation is returned as its author wrote it; at once, where the search was
    interrupted before, or where the wall limit leaves no time to verify (`Session.check_time`).
    """
    task, ledger = session.task, session.ledger
    with suppress(KeyboardInterrupt):  # then what was judged as a whole before is the best
        session.check_time(1)
        _settle_leader(session)
    best = ledger.best or session.state
    candidates = established(best)
    notes: list[str] = [*([task.reason] if task.reason else []), *remarks]
    if stopped == "interrupted" and best.program.on_pytorch:  # nothing to verify
        seen = ledger.start or Evaluation(Gate.WRITE, "interrupted before it was judged", "interrupted")
        return _as_written(session, seen, stopped, [*notes, "interrupted before a faster program was found"])
    last = FinalVerification(session, candidates, notes)
    try:
        winner, evaluation = last.run()
    except TimeUp:
        return _out_of_time(session, last.winner, notes)
    if not evaluation.ok:
        notes.append(f"the program of {len(winner.recipe())} steps failed its own verification: {evaluation.error}")
    if stopped != "interrupted" and not evaluation.unchecked:
        with suppress(KeyboardInterrupt):
            session.check_time(2)
            faster = compiled_whole(session, evaluation)
            if not isinstance(faster, str):
                winner, evaluation = faster
            elif faster:
                notes.append(faster)
    if not winner.program.on_pytorch:
        return _result(session, winner, evaluation, stopped, notes)
    return _as_written(session, evaluation, stopped, [*notes, *_why_as_written(session, stopped)])


def _why_as_written(session: Session, stopped: str) -> list[str]:
    """Why a search found nothing, in a note."""
    if session.ledger.attempts and stopped != "opaque":
        return ["no generated program was right and faster: returned as it was written"]
    if stopped != "seconds":
        return []
    took = f"one step and the final verification were expected to take {session.needed_s():.0f} s, more than was left"
    return [f"no step was begun: {took}; give more seconds"]


def _out_of_time(session: Session, winner: State, notes: list[str]) -> Result:
    """The computation as it was written, since there was no time to verify `winner` in a fresh process."""
    seen = session.ledger.start or Evaluation(Gate.WRITE, "there was no time to judge it: give more seconds", "timeout")
    note = "there was no time for a final verification, so it is returned as it was written; give more seconds"
    if not winner.program.on_pytorch and winner.evaluation is not None:
        found = f"a program of {len(winner.recipe())} steps, right in the search, took {winner.evaluation.timing}"
        note = f"{found}, and {note}"
    seen = replace(seen, seconds={})  # which count for the search
    return _as_written(session, seen, "seconds", [*notes, note])


def _settle_leader(session: Session) -> None:
    """Judge the most promising program as a whole, whatever branch it is on, where that was not done."""
    leader = session.ledger.leader
    if leader is not None and leader.is_sum:
        branch = session.fork()
        branch.state = leader
        branch.settle()


def finish_opaque(session: Session) -> Result:
    """The result of a computation that could not be captured: the reference itself, timed where that is possible."""
    evaluation, notes = session.begin(), [session.task.reason]
    if not evaluation.ok:
        notes.append(f"not timed: {evaluation.error}")
        evaluation = Evaluation(Gate.PASSED)
    return _as_written(session, evaluation, "opaque", notes)


def finish_unjudged(session: Session) -> Result:
    """The result where not even the start program passes: the computation as it was written, and why."""
    evaluation = session.begin()
    notes = [f"nothing could be judged, so it is returned as it was written: {evaluation.error}"]
    return _as_written(session, evaluation, "unjudged", notes)


def _as_written(session: Session, evaluation: Evaluation, stopped: str, notes: list[str]) -> Result:
    """The computation as its author wrote it, on PyTorch. Its time is eager's by definition."""
    found = replace(evaluation, timing=evaluation.eager, region_ms={}, generated_share=0.0, library_share=0.0)
    whole = State(session.task.whole or session.task.start)
    return _result(session, whole, found, stopped, notes, on_pytorch=True)


def _result(
    session: Session, winner: State, evaluation: Evaluation, stopped: str, notes: list[str], on_pytorch: bool = False
) -> Result:
    task, ledger = session.task, session.ledger
    notes = [
        *notes,
        *ledger.faults.values(),
        *([f"not all that was tried is stored: {session.store.lost}"] if session.store and session.store.lost else []),
        *(memory.remarks() if (memory := task.context.coder.memory) is not None else ()),
        *_asked_again(task),
        *left_aside(ledger.attempts),
        *left_out(task, {step.action.kind for step in ledger.attempts}),
    ]
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
        cached=task.evaluator.report.stored,
        seconds=ledger.clock() - ledger.began,
        stopped=stopped,
        notes=tuple(notes),
        program=winner.program,
        reference=task.reference,
        on_pytorch=on_pytorch,
        declared=task.declared,
        roofline=roofline(task.start.graph, task.context.device, task.context.mode) if task.start.graph.nodes else None,
        labels={r.id: r.label() for p in (task.start, winner.program) if p.graph.nodes for r in p.regions},
        environment={**dict(task.conditions.versions), "device": task.context.device.name, "mode": task.context.mode},
    )
    session.tell("end", f"{result.headline}{' (estimated)' if result.estimated else ''}")
    return result


def _asked_again(task: Task) -> list[str]:
    """What the judge asked again, and why; nothing where it asked all once."""
    report = task.evaluator.report
    counts = ", ".join(f"{count} after a fault of a {fault}" for fault, count in sorted(report.again.items()))
    return [f"judged again: {counts}; the last: {report.reason}"] if counts else []


def established(best: State) -> tuple[State, ...]:
    """The judged states on the way to `best`, each better than the one before beyond the noise."""
    timed = [s for s in best.path() if s.judged and s.evaluation is not None and s.evaluation.ok]
    kept = list(best.path()[:1])
    for state in timed:
        if state is not kept[0] and beats(state.evaluation, kept[-1].evaluation):
            kept.append(state)
    return tuple(kept)


__all__ = ["LooksAhead", "Search", "established", "finish", "finish_opaque", "finish_unjudged", "optimize"]
