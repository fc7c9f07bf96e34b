"""What PyTorch itself offers for a computation of several operators, tried before a search begins.

A search may use up its budget on a network before it finds anything. One launch of all of eager's kernels, and then
TorchInductor's code launched so, take two evaluations; of a smaller one, TorchInductor's code takes one. They are steps
on a branch: the search begins where it would have begun, and the best of them is returned where it finds nothing
better. Knows nothing about how either is written.
"""

from __future__ import annotations

from qimeng.actions import check_action, kind_named
from qimeng.actions.large import is_large, operators
from qimeng.envs.steps.session import Session
from qimeng.errors import IllegalAction
from qimeng.interfaces import Action
from qimeng.interfaces.faults import LEFT_ASIDE
from qimeng.program.launch import CUDA_GRAPH

STEPS = (Action("launch", (), CUDA_GRAPH), Action("library", (), "inductor"))
"""In this order, so that the second is judged once, as one launch; where the first is refused, by itself."""

SEVERAL = 8
"""Operators from which on the second is tried: a search that writes kernels for so many may end before it is done."""


def submit_first(session: Session) -> None:
    """Submit the last of `STEPS` before the start program is judged: an engine may compile it meanwhile.

    Of a computation that is not large, TorchInductor's code alone, which a search may ask for, and which is returned
    where it turns out faster (`qimeng.envs.steps.compiled_whole`); not to an engine that judges at once what it gets.

    Args:
        session: not yet begun.
    """
    task, program, ledger = session.task, session.task.start, session.ledger
    if task.estimated or ledger.budget.evaluations <= len(STEPS):
        return
    if not is_large(program) and task.evaluator.at_once > 1:
        return
    for number, action in enumerate(STEPS):
        if number + 1 < len(STEPS) and not is_large(program):
            continue
        try:
            check_action(program, action, task.context)
            patch = kind_named(action.kind).apply(program, action, task.context).patch()
        except IllegalAction:
            continue
        if number + 1 == len(STEPS):
            asked = task.request(program, patch, library_s=session.library_s())
            if (ticket := task.submit(asked)) is not None:
                ledger.submitted[asked.digest] = ticket
        program = patch.apply(program)


def compiled_first(session: Session) -> tuple[Session, Action] | None:
    """Take `STEPS` on a branch of `session`, where times are measured; for a computation that is not large, the second.

    They are taken as long as one more evaluation fits the budget: a final verification that takes longer is worth it.
    What TorchInductor has not compiled by then is not waited for: the search goes on meanwhile.

    Args:
        session: at its start, whose program was judged.

    Returns:
        The branch and its last step, where that was left aside because TorchInductor is still at work. The search
        leaves time for it (`Ledger.later`).
    """
    task, start = session.task, session.begin()
    if operators(task.start) < SEVERAL or start.timing is None or start.timing.estimated:
        return None
    branch, found = session.fork(library_share=0.0), None
    for action in STEPS if is_large(task.start) else STEPS[1:]:
        if not _has_room(branch):
            return None
        try:
            check_action(branch.state.program, action, task.context)
        except IllegalAction:
            continue
        found = branch.step(action).evaluation
    if found is None or found.failure != LEFT_ASIDE:
        return None
    session.ledger.later = 1
    return branch.fork(library_share=1.0), action


def compiled_last(late: tuple[Session, Action] | None) -> None:
    """Take the step that was left aside, after the search, where there is room: its code may be there by now.

    TorchInductor gets all that is left beside that step and the final verification.

    Args:
        late: what `compiled_first` returned.
    """
    if late is None:
        return
    late[0].ledger.later = 0
    if _has_room(late[0]):
        late[0].step(late[1])


def _has_room(branch: Session) -> bool:
    """Whether one more evaluation fits the budget."""
    ledger = branch.ledger
    return branch.exhausted() in (None, "seconds") and ledger.seconds_left > 2 * ledger.longest


__all__ = ["SEVERAL", "STEPS", "compiled_first", "compiled_last", "submit_first"]
