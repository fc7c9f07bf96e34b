"""Kernels that the next steps are likely to need, compiled while the judge works on the present one.

Compiling takes seconds, on cores that are idle while the GPU checks and times. A guess that turns out wrong costs
nothing but the writing of a patch. Knows nothing about which step a planner takes: it guesses that regions are lowered
in the order of their times, and asks a planner that may be asked ahead (`Running.likely`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, Self

from qimeng.actions import check_action, kind_named
from qimeng.actions.large import is_large
from qimeng.envs.cost.roofline import node_ms
from qimeng.envs.steps.state import Ledger, State
from qimeng.envs.steps.task import Task
from qimeng.errors import CoderError, IllegalAction
from qimeng.graph.ops import is_product
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Asked, Observation, Patch, Request
from qimeng.program.program import Program

NEXT = 2
"""Lowerings that are compiled ahead of those that were tried."""
FIRST, GUESSES = 3, 64
"""Lowerings that are compiled while the start program is judged, and steps before them that are guessed at most."""
AHEAD = 3
"""Steps on other regions that are guessed while one is judged."""


class Running(Protocol):
    """What it needs of the running optimization (`qimeng.envs.steps.session.Session`)."""

    task: Task
    ledger: Ledger
    state: State
    likely: Callable[[Observation], Action] | None
    seen: Observation | None

    def fork(self) -> Self:
        """A branch."""

    def observe(self) -> Observation:
        """What a planner sees."""

    def assume(self, action: Action, patch: Patch) -> None:
        """Go on as if `patch` were right."""

    def request(self, action: Action, instruction: str = "") -> Request:
        """What the coder is asked for `action`."""

    def written(self, request: Request) -> Patch:
        """The coder's patch."""


def prepare_first(session: Running, choose: Callable[[Observation], Action]) -> None:
    """Have the judge compile what the first lowerings need, before the start program is judged; nothing fails.

    What comes before them is taken as right: fusions, which need no judge, and algebra, which hardly ever fails.

    Args:
        session: not yet begun.
        choose: a planner's choice, which leaves the planner as it is.
    """
    task = session.task
    if not _may_prepare(session) or is_large(task.start):  # of which all is written at once, which takes seconds
        return
    branch = session.fork()
    for _ in range(GUESSES):
        action = choose(branch.observe())
        if action.kind not in ("algebra", "fusion"):
            break
        try:
            check_action(branch.state.program, action, task.context)
            branch.assume(action, branch.written(branch.request(action)))
        except (IllegalAction, CoderError):
            return
    _prepare(branch, branch.state.program, FIRST)


def prepare_next(session: Running, action: Action, patch: Patch) -> None:
    """Have the judge compile what the next steps may need, while it judges `patch`; nothing is asked, nothing fails.

    A coder with a free hand, whose patches cost money, is asked for nothing ahead.

    Args:
        session: at the program before.
        action: the present one.
        patch: of that action.
    """
    if not _may_prepare(session):
        return
    lowered = sum(a.action.kind == "lowering" for a in session.ledger.attempts)
    _prepare(session, patch.apply(session.state.program), NEXT + lowered)
    if session.likely is not None:
        _prepare_likely(session, action, patch, session.likely)


def prepare_actions(session: Running, actions: Iterable[Action]) -> None:
    """Have the judge compile what `actions` on one region each need, which come next whatever it finds; nothing fails.

    Args:
        session: at the program that all are taken on.
        actions: legal there.
    """
    task = session.task
    if not task.evaluator.prepares or task.context.coder.free_hand:
        return
    for action in actions:
        with suppress(IllegalAction, CoderError):
            request = session.request(action)
            patch = session.written(request)
            session.ledger.written[request.program.digest, request.action, request.mode] = patch
            task.prepare(task.request(request.program, patch, Asked.REGION))


def _prepare_likely(session: Running, action: Action, patch: Patch, choose: Callable[[Observation], Action]) -> None:
    """Have compiled what `choose` says comes next, if `patch` is right: as long as that is about other regions.

    What is legal on those stays so. Of the patch's own regions it is not known yet what the judge chooses.
    """
    branch, worked_on, seen = session.fork(), set(action.regions), session.seen
    if seen is None or seen.program is not session.state.program:
        return
    with suppress(IllegalAction, CoderError):
        for _ in range(AHEAD):
            if not patch.alternatives or patch.regions is not None or patch.rewrites:  # regions are others after it
                return
            branch.assume(action, patch)
            state, left = branch.state, tuple(a for a in seen.actions if not worked_on & set(a.regions))
            seen = replace(
                seen, program=state.program, actions=left, evaluation=state.evaluation, history=state.history
            )
            action = choose(seen)
            if len(action.regions) != 1:
                return
            patch = _guessed(branch, action)
            worked_on |= set(action.regions)


def _guessed(branch: Running, action: Action) -> Patch:
    """The patch that `action` on one region would be, compiled from now on; written once for each form of the region.

    Raises:
        CoderError: there is none.
        IllegalAction: likewise.
    """
    task, program, known = branch.task, branch.state.program, branch.ledger.guessed
    region = program.region(action.regions[0])
    key = program.implementation(region).digest, action
    if key not in known:
        check_action(program, action, task.context)
        known[key] = branch.written(branch.request(action))
        task.prepare(task.request(program, known[key], Asked.REGION))
    return known[key]


def _may_prepare(session: Running) -> bool:
    """Whether the engine compiles ahead, the coder asks no model, and another evaluation is left for a guess."""
    task, ledger = session.task, session.ledger
    last = ledger.explores or ledger.evaluations + 1 >= ledger.budget.evaluations
    return not last and task.evaluator.prepares and not task.context.coder.free_hand


def _prepare(session: Running, program: Program, most: int) -> None:
    """Write and have compiled what the lowerings after `program` need, until `most` were prepared in all."""
    task, ledger = session.task, session.ledger
    for request, name in _likely(session, program):
        if len(ledger.prepared) >= most:
            return
        if name in ledger.prepared:
            continue
        try:
            check_action(request.program, request.action, task.context)
            patch = session.written(request)
        except (IllegalAction, CoderError):
            continue
        ledger.prepared.add(name)
        ledger.written[request.program.digest, request.action, request.mode] = patch
        task.prepare(task.request(request.program, patch, Asked.REGION))


def _likely(session: Running, program: Program) -> list[tuple[Request, str]]:
    """What a coder may be asked for after `program`, each with a name.

    A large program is clustered and lowered at once, in fp32's precision where the mode's turns out wrong
    (`qimeng.envs.steps.parts.verify_parts`).
    """

    def request(before: Program, action: Action) -> Request:
        return replace(session.request(action), program=before)

    if not is_large(program):
        return [(request(program, Action("lowering", (r.id,))), r.signature) for r in _waiting(session, program)]
    names = "lower_all", "lower_all in fp32's precision"
    if session.ledger.prepared >= set(names):
        return []
    try:
        check_action(program, Action("cluster"), session.task.context)
        clustered = kind_named("cluster").apply(program, Action("cluster"), session.task.context).patch().apply(program)
    except IllegalAction:
        clustered = program
    once = request(clustered, Action("lower_all"))
    return [*zip((once, replace(once, mode="highest")), names, strict=True)]


def _waiting(session: Running, program: Program) -> list[Region]:
    """Regions of `program` that no kernel was written for, equal ones once.

    Products first, then those that take longest, as measured or estimated.
    """
    known = session.state.evaluation.region_ms if session.state.evaluation else {}
    context = session.task.context

    def weight(region: Region) -> tuple[bool, float]:
        product = any(is_product(region.graph, n) for n in region.ops)
        ms = known.get(region.id) or sum(node_ms(region.graph, n, context.device, context.mode) for n in region.ops)
        return not product, -ms

    plain = {r.signature: r for r in program.called if not program.implementation(r).generated}
    return sorted(plain.values(), key=weight)


__all__ = ["FIRST", "NEXT", "Running", "prepare_actions", "prepare_first", "prepare_next"]
