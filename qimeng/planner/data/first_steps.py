"""The steps that a network is explored after: algebra of the whole graph, then clusters.

Its regions are what they leave. Deals in programs. Knows nothing about what is found of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from qimeng.actions import Context
from qimeng.envs.steps.caching import UNKNOWN
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.task import Task
from qimeng.interfaces import Action, Evaluation, EvaluationRequest, Gate, SerialEvaluator
from qimeng.program.program import Program
from qimeng.store import Conditions

KINDS = ("algebra", "cluster")
"""Kinds that are taken first, each action on the whole program once."""


def first_steps(session: Session) -> Iterator[Action]:
    """Those actions, in order; the caller takes each before it asks for the next."""
    for kind in KINDS:
        for action in [a for a in session.observe().actions if a.kind == kind and not a.regions]:
            if action in session.observe().actions:
                yield action


class _Nobody(SerialEvaluator):
    """Judges nothing."""

    name = "nobody"

    def answer(self, request: EvaluationRequest) -> Evaluation:
        return Evaluation(Gate.WRITE, "nothing is judged here", UNKNOWN)


def after_first_steps(start: Program, context: Context) -> Program:
    """What `start` becomes if none of them is refused; nothing is judged.

    Args:
        start: a start program.
        context: says what is legal.
    """
    session = Session(Task(start, context, _Nobody(), Conditions("", context.device.name)))
    for action in first_steps(session):
        session.assume(action, session.written(session.request(action)))
    return session.state.program


__all__ = ["KINDS", "after_first_steps", "first_steps"]
