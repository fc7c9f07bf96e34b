"""Kernels that the next steps are likely to need, compiled while the judge works on the present one.

Compiling takes seconds, on cores that are idle while the GPU checks and times. A guess that turns out wrong costs
nothing but the writing of a patch. Knows nothing about which step a planner takes; it guesses as the planner by rule
does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from qimeng.actions import check_action, kind_named
from qimeng.actions.large import is_large
from qimeng.envs.steps.state import Ledger, State
from qimeng.envs.steps.task import Task
from qimeng.errors import CoderError, IllegalAction
from qimeng.graph.ops import is_product
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Asked, Patch, Request
from qimeng.program.program import Program

NEXT = 2
"""Lowerings that are compiled ahead of those that were tried."""


class Running(Protocol):
    """What it needs of the running optimization (`qimeng.envs.steps.session.Session`)."""

    task: Task
    ledger: Ledger
    state: State

    def request(self, action: Action, instruction: str = "") -> Request:
        """What the coder is asked for `action`."""

    def written(self, request: Request) -> Patch:
        """The coder's patch."""


def prepare_next(session: Running, program: Program) -> None:
    """Have the judge compile what the lowerings after `program` need; nothing is asked, and nothing fails.

    A coder with a free hand, whose patches cost money, is asked for nothing ahead.

    Args:
        session: at the program before.
        program: that the present step leads to, where it is right.
    """
    task, ledger = session.task, session.ledger
    last = ledger.evaluations + 1 >= ledger.budget.evaluations
    if last or not task.evaluator.prepares or task.context.coder.free_hand:
        return
    room = NEXT + sum(a.action.kind == "lowering" for a in ledger.attempts) - len(ledger.prepared)
    for request, name in _likely(session, program):
        if room <= 0:
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
        room -= 1


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
    """Regions of `program` that no kernel was written for: products first, then the longest; equal ones once."""
    known = session.state.evaluation.region_ms if session.state.evaluation else {}

    def weight(region: Region) -> tuple[bool, float, float]:
        product = any(is_product(region.graph, n) for n in region.ops)
        return not product, -known.get(region.id, 0.0), -float(region.bytes_moved())

    plain = {r.signature: r for r in program.called if not program.implementation(r).generated}
    return sorted(plain.values(), key=weight)


__all__ = ["NEXT", "Running", "prepare_next"]
