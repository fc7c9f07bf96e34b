"""Notes on what a spec declares and a search left aside, so that nobody has to guess.

Deals in kinds of action, in what was tried, and in what a library did not compile in time. Knows nothing about any one
kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from contextlib import suppress

from qimeng.actions import Kind, kinds
from qimeng.envs.steps.state import Attempt
from qimeng.envs.steps.task import Task
from qimeng.errors import IllegalAction, KindFault
from qimeng.interfaces.faults import LEFT_ASIDE


def left_out(task: Task, tried: Set[str]) -> list[str]:
    """A sentence for each kind of action that is legal and was not tried, with its own reason (`Kind.left_out`).

    Args:
        task: what was optimized.
        tried: names of the kinds that were.
    """
    if not task.declared or not task.start.graph.nodes:
        return []
    found: dict[str, str] = {}
    for kind in kinds().values():
        if kind.name in tried or type(kind).left_out is Kind.left_out:
            continue
        for action in kind.proposals(task.start, task.context):
            with suppress(IllegalAction, KindFault):
                kind.check(task.start, action, task.context)
                if reason := kind.left_out(task.start, action, task.context.device):
                    found.setdefault(kind.name, f"{kind.name} was not tried: {reason}")
    return list(found.values())


def left_aside(attempts: Iterable[Attempt]) -> list[str]:
    """A sentence for each step that was left aside because a library took too long, and not taken later."""
    found: dict[str, str] = {}
    for step in attempts:
        if step.evaluation is not None and step.evaluation.failure == LEFT_ASIDE:
            found[step.text] = f"{step.text}: {step.evaluation.error}"
        elif step.accepted:
            found.pop(step.text, None)
    return list(found.values())


__all__ = ["left_aside", "left_out"]
