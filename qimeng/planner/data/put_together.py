"""A task whose programs are judged by what was found of their regions (`qimeng.planner.data.parts`).

Deals in a coder that writes what was tried, a judge that adds up, and a session that offers what both know. Knows
nothing about planners.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qimeng.actions import Context
from qimeng.envs.steps.caching import UNKNOWN
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import STOP, Budget
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
        key = region.signature, program.implementation(region).digest
        return self.parts.moves.get(key, {}).get((action.kind, action.param))

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
        tried = [outcome for moves in parts.moves.values() for outcome in moves.values()]
        self._refused = {o.implementation.digest: o.evaluation for o in tried if not o.evaluation.ok}

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """Of a whole program; the fastest alternative that is known is chosen."""
        found = []
        for number, program in enumerate(request.candidates):
            changed = () if request.patch is None else request.patch.alternatives[number : number + 1]
            refused = next((e for made in changed if (e := self._refused.get(made.digest))), None)
            each = refused or self.parts.evaluation(program, self.start)
            if each is not None:
                found.append(replace(each, chosen=number))
        right = [e for e in found if e.ok and e.ms is not None]
        if right:
            return min(right, key=lambda e: (e.ms or 0.0, e.chosen))
        if found:
            return found[0]
        return Evaluation(Gate.WRITE, f"nothing is known of {subject_of(request.program, request.patch)}", UNKNOWN)


class PartsSession(Session):
    """A session that offers actions whose outcome is known, and `stop`.

    Attributes:
        covered: for each program looked at, the share of its legal actions that is known.
    """

    def __init__(self, task: Task, budget: Budget | None = None, *arguments: Any, **named: Any):
        super().__init__(task, budget, *arguments, **named)
        self.covered: dict[str, float] = {}
        self._known: dict[tuple[str, Action], bool] = {}

    def offered(self) -> tuple[tuple[Action, ...], int]:
        """Those of the legal actions that are known, in their order."""
        actions, cut = super().offered()
        kept = tuple(a for a in actions if a == STOP or self.knows(a))
        if len(actions) > 1:
            self.covered.setdefault(self.state.program.digest, (len(kept) - 1) / (len(actions) - 1))
        return kept, cut

    def written(self, request: Request) -> Patch:
        """The patch; of several regions at once, those that were slower than PyTorch stay on it, as a judge has it."""
        patch, ratios = super().written(request), self._parts.ratios
        if not patch.others:
            return patch
        regions = {r.id: r for r in patch.apply(request.program).regions}
        kept = [(id_, m) for id_, m in patch.others if ratios.get((regions[id_].signature, m.digest), 0.0) <= 1]
        if not kept and not patch.rewrites:
            raise CoderError("no region would gain")
        return replace(patch, others=tuple(kept))

    @property
    def _parts(self) -> Parts:
        coder = self.task.context.coder
        assert isinstance(coder, PartsCoder)
        return coder.parts

    def knows(self, action: Action) -> bool:
        """Whether the outcome of `action` on the present program is known."""
        program, coder = self.state.program, self.task.context.coder
        assert isinstance(coder, PartsCoder)
        if coder.outcome(program, action) is not None:
            return True
        key = program.digest, action
        if key not in self._known:
            self._known[key] = self._answered(program, action)
        return self._known[key]

    def _answered(self, program: Program, action: Action) -> bool:
        try:
            patch = self.written(self.request(action))
            if not patch.computes_otherwise:
                evaluator = self.task.evaluator
                return not isinstance(evaluator, PartsEvaluator) or _sums(evaluator, patch.apply(program))
            return self.task.judged(program, patch).failure != UNKNOWN
        except QimengError:
            return False


def _sums(evaluator: PartsEvaluator, program: Program) -> bool:
    return evaluator.parts.evaluation(program, evaluator.start) is not None


def parts_task(
    parts: Parts, start: Program, first: Evaluation, context: Context, conditions: Conditions, name: str = "program"
) -> Task:
    """A task on the start program of a network.

    Args:
        parts: what was found of regions.
        start: the start program.
        first: what a judge found of it, or what `parts` gives.
        context: device, coder (which says what can be implemented) and mode.
        conditions: keys of what is stored.
        name: what people call it.
    """
    known = replace(context, coder=PartsCoder(parts, context.coder))
    return Task(start, known, PartsEvaluator(parts, first), conditions, name)


__all__ = ["PartsCoder", "PartsEvaluator", "PartsSession", "parts_task"]
