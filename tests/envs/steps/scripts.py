"""Searches by script, and a judge whose times are a script."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qimeng.envs.steps.session import Session
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Evaluation, Patch, Timing
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.testing import FakeEvaluator, ScriptedPlanner, fake_task

FUSE_ALL = ("fusion", "fusion", "fusion", "fusion", "lowering")


def scripted(*script: Action | str) -> GreedySearch:
    return GreedySearch(ScriptedPlanner(script))


def started(graph: OpGraph, **parts: Any) -> Session:
    session = Session(fake_task(graph, **parts))
    session.begin()
    return session


def first(session: Session, text: str) -> Action:
    return next(a for a in session.observe().actions if str(a).startswith(text))


class Timed(FakeEvaluator):
    """Times by script, in the order programs are judged; the last one stays."""

    def __init__(self, *times: float, final: tuple[float, ...] = (), spread: float = 0.01, eager: float = 10.0):
        super().__init__(spread=spread)
        self.times, self.finals, self.eager = list(times), list(final), eager

    def timed(self, evaluation: Evaluation, times: list[float]) -> Evaluation:
        ms = times.pop(0) if len(times) > 1 else times[0]
        return replace(evaluation, timing=Timing(ms, self.spread), eager=Timing(self.eager, self.spread))

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        return self.timed(super().judge(program, patch), self.times)

    def verify(self, program: Program) -> Evaluation:
        return self.timed(super().judge(program), self.finals or self.times[-1:])
