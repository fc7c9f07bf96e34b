"""A step of many kernels: those that make the program wrong or slower are left out, the others stay.

Deals in the parts of one patch (`Patch.others`). Knows nothing about how programs are written or judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from qimeng.envs.steps.state import State
from qimeng.errors import CoderError, IllegalAction
from qimeng.interfaces import Action, Patch, Step
from qimeng.program.program import Program

SLOWER = 1.02
"""A kernel that takes this many times as long as what it replaces is slower beyond the noise."""


class Judged(Protocol):
    """What it needs of the running optimization (`qimeng.envs.steps.session.Session`)."""

    state: State

    def exhausted(self) -> str | None:
        """Why no further step may be taken, or None."""

    def verify(self, action: Action, patch: Patch) -> Step:
        """Judge a patch, and advance where it is right."""

    def keep(self, parent: Program, step: Step, patch: Patch | None) -> None:
        """Keep an attempt in the store."""

    def return_to(self, state: State) -> None:
        """Continue from an earlier state."""


def verify_parts(session: Judged, action: Action, patch: Patch, exactly: Callable[[], Patch] | None = None) -> Step:
    """Judge all kernels of `patch` together, and advance with those that are right and not slower.

    Where the program is wrong, all kernels are written once more in fp32's precision: PyTorch may compute in it where
    it may take TF32, as cuDNN does for many convolutions. Where that is refused, the kernels that the message names are
    left out, or, where it names none, each half is judged by itself, and so on. Where the program is right, it is
    judged once more without the kernels that take longer than what they replace; the faster of the two programs stays.
    All this ends with the session's budget.

    Args:
        session: at the program that the patch is for.
        action: what the patch carries out.
        patch: with several kernels.
        exactly: writes the patch in fp32's precision; None where there is no such patch.
    """
    start, taken, waiting = session.state, list[str](), [patch]
    found: Step | None = None
    while waiting and (found is None or session.exhausted() is None):
        part, before = waiting.pop(0), session.state
        part = replace(part, rewrites=()) if taken else part  # an accepted part made them
        step = session.verify(action, part)
        session.keep(before.program, step, part)
        if step.accepted:
            taken += [region for region, _ in part.others]
        elif part is patch and (exact := _exact(step, patch, exactly)) is not None:
            patch = exact
            waiting.append(exact)
        else:
            waiting += _smaller(part, step, before)
        found = step if step.accepted or found is None or not found.accepted else found
    assert found is not None
    slow = slower(start, session.state, taken)
    if not 0 < len(slow) < len(taken) or session.exhausted():
        return found
    reached, kept = session.state, set(taken) - slow
    rest = replace(patch, others=tuple(p for p in patch.others if p[0] in kept), note=f"{len(kept)} kernels")
    session.return_to(start)
    step = session.verify(action, rest)
    session.keep(start.program, step, rest)
    if step.accepted and (session.state.ms or 0.0) <= (reached.ms or 0.0):
        return step
    session.return_to(reached)
    return found


def _exact(step: Step, patch: Patch, exactly: Callable[[], Patch] | None) -> Patch | None:
    """What `exactly` writes, where `patch` is wrong and that is another patch."""
    if exactly is None or step.evaluation is None or step.evaluation.failure != "wrong":
        return None
    try:
        written = exactly()
    except (CoderError, IllegalAction):
        return None
    return written if written.others and written.digest() != patch.digest() else None


def slower(before: State, after: State, regions: list[str]) -> set[str]:
    """Those of `regions` that take longer after a step, equal ones together; none where a time is not known."""
    times = [_times(state) for state in (before, after)]
    return {
        region
        for region in regions
        if (signature := after.program.region(region).signature) in times[0]
        and times[1][signature] > SLOWER * times[0][signature]
    }


def _times(state: State) -> dict[str, float]:
    """Milliseconds by signature of the region."""
    known = state.evaluation.region_ms if state.evaluation is not None else {}
    found: dict[str, float] = {}
    for region in state.program.regions:
        if region.id in known:
            found[region.signature] = found.get(region.signature, 0.0) + known[region.id]
    return found


def _smaller(patch: Patch, step: Step, before: State) -> list[Patch]:
    """What is tried of a refused patch: all but the kernels that the message names, else one half and the other."""
    message = (step.evaluation.error if step.evaluation is not None else None) or ""
    names, program = [region for region, _ in patch.others], before.program.with_rewrites(patch.rewrites)
    signatures = {r.signature for r in program.regions if r.id in message or r.signature[:8] in message}
    named = {region for region in names if program.region(region).signature in signatures}
    if 0 < len(named) < len(patch.others):
        return [_only(patch, [region for region in names if region not in named])]
    middle = len(names) // 2
    return [_only(patch, names[:middle]), _only(patch, names[middle:])] if middle else []


def _only(patch: Patch, regions: list[str]) -> Patch:
    others = tuple(p for p in patch.others if p[0] in regions)
    return replace(patch, others=others, note=f"{len(others)} kernels")


__all__ = ["Judged", "slower", "verify_parts"]
