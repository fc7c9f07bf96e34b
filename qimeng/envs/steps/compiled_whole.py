"""TorchInductor's code of a whole computation, where torch.compile turned out faster than what a search found.

Deals in one more step from the start program and one more final verification. Knows nothing about how TorchInductor is
called (`qimeng.library.inductor`).
"""

from __future__ import annotations

from qimeng.envs.judge.ranking import beats, refusal
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import State
from qimeng.interfaces import Action, Asked, Evaluation

BEHIND = 1.02
"""Times torch.compile's time from which on a program counts as behind it."""

OPTIONS = {"default": "inductor", "max-autotune-no-cudagraphs": "inductor-tuned"}
"""Mode of torch.compile to the option of the action `library` that gives the same code."""


def compiled_whole(session: Session, found: Evaluation) -> tuple[State, Evaluation] | str:
    """The state and final verification of TorchInductor's code, where it is right and faster than `found` and eager.

    Otherwise why torch.compile's code is not returned although it was faster; empty where it was not.

    Takes two evaluations and a final verification beyond the budget, and only where torch.compile, timed beside the
    program that was found, was clearly faster. The second evaluation is of that code recorded as a CUDA graph: many
    kernels may wait for the host that launches them.

    Args:
        session: the optimization, at its end.
        found: the final verification of the program that would be returned.
    """
    option = _faster(found)
    if option is None:
        return ""
    branch = session.fork(library_least_s=session.task.options.compile_seconds)  # as long as torch.compile had
    branch.state = (session.ledger.best or session.state).path()[0]
    called = branch.state.program.called
    whole = Action("library", (called[0].id,) if len(called) == 1 else (), option)
    step = branch.step(whole)
    if not step.accepted:
        reason = step.evaluation.error if step.evaluation else "it cannot be written as a program of its own"
        return f"torch.compile's code is faster, but is not returned: {reason}"
    branch.state = _recorded(branch)
    session.tell("final", "verify torch.compile's code, which is faster, in a fresh process")
    evaluation = session.task.judged(branch.state.program, asked=Asked.FINAL)
    problem = refusal(evaluation, None)
    if problem is not None:
        return f"torch.compile's code is faster, but is not returned: {problem}"
    if not beats(evaluation, found) or (evaluation.speedup is not None and evaluation.speedup < 1):
        return ""
    return branch.state, evaluation


def _recorded(branch: Session) -> State:
    """The state of `branch`, or the one after it whose launches are recorded as a CUDA graph, where that is faster."""
    plain = branch.state
    step = branch.step(Action("launch", (), "cuda-graph"))
    return branch.state if step.accepted and beats(branch.state.evaluation, plain.evaluation) else plain


def _faster(found: Evaluation) -> str | None:
    """The option whose mode was fastest beside the program and left it behind; None where none did."""
    if not found.ok or found.timing is None or found.timing.estimated:
        return None
    times = {OPTIONS[mode]: timing.device_ms for mode, timing in found.compiled.items() if mode in OPTIONS}
    if not times:
        return None
    option, ms = min(times.items(), key=lambda pair: pair[1])
    return option if found.timing.device_ms > BEHIND * ms else None


__all__ = ["compiled_whole"]
