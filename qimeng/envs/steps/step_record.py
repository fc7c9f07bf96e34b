"""What a step leaves behind: its rows in the store, and its line for whoever watches.

Deals in steps that were taken. Knows nothing about how.
"""

from __future__ import annotations

from qimeng.actions import action_text
from qimeng.envs.steps.state import State
from qimeng.envs.steps.time_shares import dropped_kernels
from qimeng.interfaces import Action, Asked, Evaluation, EvaluationRequest, Patch, Scope, Step
from qimeng.interfaces.records import PatchRecord, program_to_json
from qimeng.program.program import Program
from qimeng.store import Conditions, Store, StoredStep, subject_of


def put_attempt(
    store: Store,
    conditions: Conditions,
    parent: Program,
    step: Step,
    patch: Patch | None,
    child: Program | None,
    alone: Evaluation | None = None,
) -> None:
    """Keep an attempt: the programs, the patch, what the judge said, and the edge between them.

    Args:
        store: where.
        conditions: under which it was judged.
        parent: the program before the step.
        step: what was tried.
        patch: what the coder wrote; None where it wrote none.
        child: the program after the step; None where it was refused.
        alone: what the judge of the patch's region found; None where the whole program was judged.
    """
    for program in (parent, child):
        if program is not None:
            store.put_program(program.digest, program_to_json(program), program.source)
    digest = evaluation = None
    if patch is not None:
        digest = store.put_patch(PatchRecord.of(patch))
        if alone is not None:
            subject = EvaluationRequest(parent, patch, Asked.REGION).region_subject
            evaluation = store.put_evaluation(conditions, subject, alone, Asked.REGION.value)
        elif step.evaluation is not None and patch.computes_otherwise:
            evaluation = store.put_evaluation(conditions, subject_of(parent, patch), step.evaluation)
    edge = StoredStep(parent.digest, step.action, digest, evaluation, step.accepted, child.digest if child else None)
    store.put_step(conditions, edge)


def text_of(action: Action, program: Program) -> str:
    """The action in words."""
    try:
        return action_text(action, program)
    except KeyError:  # it names a region that this program does not have
        return str(action)


def outcome_of(step: Step, before: State, after: State) -> str:
    """What came of a step that led from `before` to `after`, in a few words."""
    if not step.accepted:
        reason = step.evaluation.error if step.evaluation else None
        return f"refused: {reason or 'no reason given'}"
    if step.evaluation is None:
        lost = dropped_kernels(before.program, after.program)
        return f"graph only, drops {len(lost)} generated kernel(s)" if lost else "graph only"
    word = "UNCHECKED" if step.evaluation.unchecked else "right"
    if before.ms is None or after.evaluation is None or after.evaluation.timing is None:
        return word
    scope = " (sum of its regions)" if after.evaluation.scope is Scope.SUM else ""
    return f"{word}, {before.ms:.4g} -> {after.evaluation.timing}{scope}"


__all__ = ["outcome_of", "put_attempt", "text_of"]
