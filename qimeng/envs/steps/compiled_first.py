"""What PyTorch itself offers for a large computation, tried before a search begins.

A search may use up its budget on a network before it finds anything. One launch of all of eager's kernels, and then
TorchInductor's code launched so, take two evaluations. They are steps on a branch: the search begins where it would
have begun, and the best of them is returned where it finds nothing better. Knows nothing about how either is written.
"""

from __future__ import annotations

from qimeng.actions import check_action, kind_named
from qimeng.actions.large import is_large
from qimeng.envs.steps.session import Session
from qimeng.errors import IllegalAction
from qimeng.interfaces import Action
from qimeng.program.launch import CUDA_GRAPH

STEPS = (Action("launch", (), CUDA_GRAPH), Action("library", (), "inductor"))
"""In this order, so that the second is judged once, as one launch; where the first is refused, by itself."""


def submit_first(session: Session) -> None:
    """Submit the last of `STEPS` before the start program is judged: an engine may compile it meanwhile.

    Args:
        session: not yet begun.
    """
    task, program, ledger = session.task, session.task.start, session.ledger
    if task.estimated or not is_large(program) or ledger.budget.evaluations <= len(STEPS):
        return
    for number, action in enumerate(STEPS):
        try:
            check_action(program, action, task.context)
            patch = kind_named(action.kind).apply(program, action, task.context).patch()
        except IllegalAction:
            continue
        if number + 1 == len(STEPS) and (ticket := task.submit(asked := task.request(program, patch))) is not None:
            ledger.submitted[asked.digest] = ticket
        program = patch.apply(program)


def compiled_first(session: Session) -> None:
    """Take `STEPS` on a branch of `session`, where its computation is large and times are measured.

    They are taken as long as one more evaluation fits the budget: a final verification that takes longer is worth it.

    Args:
        session: at its start, whose program was judged.
    """
    task, start = session.task, session.begin()
    if not is_large(task.start) or start.timing is None or start.timing.estimated:
        return
    branch, ledger = session.fork(), session.ledger
    for action in STEPS:
        if branch.exhausted() not in (None, "seconds") or ledger.seconds_left <= 2 * ledger.longest:
            return
        try:
            check_action(branch.state.program, action, task.context)
        except IllegalAction:
            continue
        branch.step(action)


__all__ = ["STEPS", "compiled_first", "submit_first"]
