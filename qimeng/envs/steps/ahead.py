"""Requests that are submitted before the steps that need their answers.

Deals in steps that a search will take next whatever their order, such as the children of a beam. Where the judge works
on several requests at a time (`Evaluator.at_once`), their patches are judged beside each other. Where it works on one,
nothing is done ahead. Knows nothing about which steps a search takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qimeng.actions import check_action
from qimeng.envs.steps.milestones import is_on_region
from qimeng.errors import CoderError, IllegalAction
from qimeng.interfaces import Action, Asked

if TYPE_CHECKING:
    from qimeng.envs.steps.session import Session


def submit_ahead(steps: Sequence[tuple[Session, Action]]) -> None:
    """Write the patches of `steps` and submit what they ask the judge; the steps are taken later, by `Session.step`.

    No more requests are submitted than evaluations are left. A coder with a free hand, whose patches cost money, is
    asked for nothing ahead.

    Args:
        steps: sessions of one search, each with an action that it offers.
    """
    if not steps:
        return
    task, ledger = steps[0][0].task, steps[0][0].ledger
    left = ledger.budget.evaluations - ledger.evaluations
    if task.evaluator.at_once < 2 or task.context.coder.free_hand:
        return
    for session, action in steps:
        if len(ledger.submitted) >= left:
            return
        program = session.state.program
        try:
            check_action(program, action, task.context)
            patch = session.written(session.request(action))
        except (IllegalAction, CoderError):
            continue  # the step tells it
        ledger.written[program.digest, action, task.context.mode] = patch
        on_region = task.by_region and is_on_region(program, patch)
        if patch.others or not patch.computes_otherwise or task.by_region and not on_region:
            continue  # judged in parts, not at all, or after the program before it was settled
        asked = task.request(program, patch, Asked.REGION if on_region else Asked.TIMING, session.library_s())
        if asked.digest not in ledger.submitted and not session.is_known(program, patch):
            ticket = task.submit(asked)
            if ticket is None:
                return
            ledger.submitted[asked.digest] = ticket


__all__ = ["submit_ahead"]
