"""A task whose programs are judged by what was found of their regions (`qimeng.planner.data.parts`).

Deals in a coder that writes what was tried, a judge that adds up, and in which actions both know. Knows nothing about
planners.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qimeng.actions import Context, kind_named
from qimeng.actions.base import ScheduleKind
from qimeng.envs.steps.caching import UNKNOWN
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import STOP, Budget, State
from qimeng.envs.steps.task import Task
from qimeng.errors import CoderError, QimengError
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Coder, Evaluation, EvaluationRequest, Gate, Patch, Request, SerialEvaluator
from qimeng.planner.data.parts import Outcome, Parts
from qimeng.program.program import Program
from qimeng.store import Conditions, subject_of


class PartsCoder(Coder):
    """Writes what was tried on an equal region with the same implementation.

    Args:
        parts: what was tried.
        coder: says what can be implemented.
    """

    schedules = True

    def __init__(self, parts: Parts, coder: Coder):
        self.parts, self.coder = parts, coder

    def write(self, request: Request) -> Patch:
        """The implementation that was chosen then.

        Raises:
            CoderError: it was not tried.
        """
        found = self.outcome(request.program, request.action)
        if found is None or request.failed is not None:
            raise CoderError(f"nothing is known of {request.action}")
        return Patch(target=request.action.regions[0], alternatives=(found.implementation,))

    def outcome(self, program: Program, action: Action) -> Outcome | None:
        """What came of `action` on the one region that it names; None where it was not tried."""
        if len(action.regions) != 1:
            return None
        region = program.region(action.regions[0])
        tried = self.parts.tried(region, program.implementation(region).digest)
        return tried.get((action.kind, action.param))

    def can_implement(self, region: Region) -> str | None:
        """What the inner coder says."""
        return self.coder.can_implement(region)


class PartsEvaluator(SerialEvaluator):
    """Adds up what was found of regions; a failure of class ``"unknown"`` where one of them was not timed.

    Args:
        parts: what was found.
        start: of the start program.
    """

    def __init__(self, parts: Parts, start: Evaluation):
        self.parts, self.start = parts, start

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """Of a whole program; the fastest alternative that is known is chosen."""
        found = []
        for number, program in enumerate(request.candidates):
            each = self._refused(program, request.patch) or self.parts.evaluation(program, self.start)
            if each is not None:
                found.append(replace(each, chosen=number))
        right = [e for e in found if e.ok and e.ms is not None]
        if right:
            return min(right, key=lambda e: (e.ms or 0.0, e.chosen))
        if found:
            return found[0]
        return Evaluation(Gate.WRITE, f"nothing is known of {subject_of(request.program, request.patch)}", UNKNOWN)

    def _refused(self, program: Program, patch: Patch | None) -> Evaluation | None:
        """What refused the implementation that `patch` gives its region in `program`."""
        if patch is None or patch.target is None:
            return None
        region = program.region(patch.target)
        return self.parts.refusal(region, program.implementation(region))


def parts_task(
    parts: Parts, start: Program, first: Evaluation, context: Context, conditions: Conditions, name: str = "program"
) -> Task:
    """A task on the start program of a network, which offers actions whose outcome is known (`Known`), and `stop`.

    Args:
        parts: what was found of regions.
        start: the start program.
        first: what a judge found of it.
        context: device, coder (which says what can be implemented) and mode.
        conditions: keys of what is stored.
        name: what people call it.
    """
    known = replace(context, coder=PartsCoder(parts, context.coder))
    task = Task(start, known, PartsEvaluator(parts, first), conditions, name)
    return replace(task, offers=Known(task))


NOT_OFFERED = ("lower_all", "unfuse")
"""Kinds that are left out. The first writes a kernel for each of many regions in one step: the budget of a session
counts kernels that are written and judged, and a planner is to say which. The second takes a cluster apart again: one
action for each of a hundred clusters, which leads back to where the clusters came from."""

REGIONED = ("cluster", "fusion")
"""Kinds that make other regions alone: on PyTorch, those take what their operators take."""


class Known:
    """Which actions of a `parts_task` have an outcome that is known; what was found is kept.

    Args:
        task: the task.
    """

    def __init__(self, task: Task):
        coder, judge = task.context.coder, task.evaluator
        assert isinstance(coder, PartsCoder) and isinstance(judge, PartsEvaluator)
        self.task, self.coder, self.judge = task, coder, judge
        self._found: dict[tuple[str, Action], Evaluation | None] = {}

    def __call__(self, program: Program, action: Action) -> bool:
        """Whether the outcome of `action` on `program` is known, and the action is one to offer."""
        if action.kind in NOT_OFFERED:
            return False
        if action == STOP:
            return True
        if len(action.regions) == 1 and action == Action("library", action.regions):  # back to PyTorch
            return self.coder.parts.on_torch(program.region(action.regions[0])) is not None
        if action.kind in REGIONED or self.coder.outcome(program, action) is not None:
            return True
        return not _is_written(action) and self.evaluation(program, action) is not None

    def evaluation(self, program: Program, action: Action) -> Evaluation | None:
        """What a judge would find after `action`; of a step of the graph alone as well."""
        key = program.digest, action
        if key not in self._found:
            self._found[key] = self._answer(program, action)
        return self._found[key]

    def _answer(self, program: Program, action: Action) -> Evaluation | None:
        session = Session(self.task)
        session.state = State(program)
        try:
            patch = session.written(session.request(action))
            if not patch.computes_otherwise:
                return self.judge.parts.evaluation(patch.apply(program), self.judge.start)
            found = self.task.judged(program, patch)
            return None if found.failure == UNKNOWN else found
        except QimengError:
            return None


def _is_written(action: Action) -> bool:
    """Whether what `action` comes to is a coder's or a library's to say, and not that of the graph alone."""
    if len(action.regions) != 1:
        return False
    named = action.kind in ("lowering", "library") and (action.kind, action.param) != ("library", "")
    return named or isinstance(kind_named(action.kind), ScheduleKind)


class PartsSession(Session):
    """A session that tells which share of the legal actions is known.

    Args:
        task: a `parts_task`.
        budget: what may be used.
        rest: as of `Session`.

    Attributes:
        known: what is offered.
        covered: for each program looked at, the share of its legal actions, `NOT_OFFERED` aside, that is known.
        stopped: why the search on it ended.
    """

    def __init__(self, task: Task, budget: Budget | None = None, **rest: Any):
        super().__init__(task, budget, **rest)
        assert isinstance(task.offers, Known)
        self.known, self.covered, self.stopped = task.offers, dict[str, float](), ""

    def offered(self) -> tuple[tuple[Action, ...], int]:
        """As any session does."""
        offered, cut = super().offered()
        moves = sum(a != STOP and a.kind not in NOT_OFFERED for a in self.legal())
        if moves:
            self.covered.setdefault(self.state.program.digest, (len(offered) + cut - 1) / moves)
        return offered, cut


__all__ = ["NOT_OFFERED", "REGIONED", "Known", "PartsCoder", "PartsEvaluator", "PartsSession", "parts_task"]
