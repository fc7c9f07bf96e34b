"""Notes on what a spec declares and a search left aside, so that nobody has to guess.

Deals in kinds of action and in what was tried. Knows nothing about any one kind.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress

from qimeng.actions import Kind, kinds
from qimeng.envs.steps.task import Task
from qimeng.errors import IllegalAction, KindFault


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


__all__ = ["left_out"]
