"""A stored result made and verified again, from its recipe.

Deals in one recipe, one task and one final verification. Knows nothing about searches.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.envs.steps.result import Result
from qimeng.envs.steps.task import Task
from qimeng.errors import ReplayError
from qimeng.interfaces import Asked, Evaluation
from qimeng.program.program import Program


@dataclass(frozen=True)
class Again:
    """What came of it.

    Attributes:
        program: that the recipe makes.
        same: whether its text is that of the stored result.
        evaluation: its final verification, now.
        before_ms: milliseconds of the stored result; None where it was not timed.
    """

    program: Program
    same: bool
    evaluation: Evaluation
    before_ms: float | None


def made_again(result: Result, task: Task) -> Again:
    """Apply the recipe of `result` to the start program of `task`, and verify and time what comes of it.

    Args:
        result: read from disk, or new.
        task: of the same computation.

    Raises:
        ReplayError: the recipe does not fit the computation, or the computation cannot be captured here or declares
            other weights.
    """
    if task.start.fallback:
        raise ReplayError(f"the computation cannot be captured, so that no recipe applies: {task.reason}")
    if task.declared != result.declared:
        raise ReplayError(
            f"the result is for {result.declared or 'weights as they are'}, and the given computation declares "
            f"{task.declared or 'nothing'}: declare the same (`--weights`, `--activations`)"
        )
    program = result.recipe.replay(task.start.graph)
    evaluation = task.judged(program, asked=Asked.FINAL)
    return Again(program, program.source == result.source, evaluation, result.evaluation.ms)


__all__ = ["Again", "made_again"]
