"""What a report of one result shows, worked out: the story step by step, figures, environment.

Deals in a `Result`. Knows nothing about HTML or plots.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qimeng.envs.steps.result import Result, figures_of, outcome_text
from qimeng.interfaces import Gate
from qimeng.program.implementation import Implementation
from qimeng.recipe import RecipeStep

GATES = tuple(gate.value for gate in Gate if gate is not Gate.PASSED)
"""Gates in the order in which they are passed."""
UNCHANGED = 3
"""Lines of a kernel that are shown around a change."""


@dataclass(frozen=True)
class Line:
    """A line of a difference: ``"+"``, ``"-"``, ``" "`` or ``"@"``, and its text."""

    sign: str
    text: str


@dataclass(frozen=True)
class Chapter:
    """One step of the story.

    Attributes:
        number: from 1.
        text: the action in words.
        outcome: what came of it, in a few words.
        state: ``"kept"``, ``"right"`` (not kept), ``"refused"`` or ``"other"``.
        gate: the last gate reached; empty where none was needed.
        ms: milliseconds of the program after it; None where not timed.
        gain: how many times faster it made the program; None where not timed or refused.
        reason: why it was refused, whole; empty where it was not.
        difference: of the kernels that it changed.
    """

    number: int
    text: str
    outcome: str
    state: str
    gate: str
    ms: float | None
    gain: float | None
    reason: str
    difference: tuple[Line, ...]


@dataclass(frozen=True)
class Kernel:
    """Time of one region before and after.

    Attributes:
        label: its operators.
        ms: milliseconds.
    """

    label: str
    ms: float


def chapters(result: Result) -> tuple[Chapter, ...]:
    """Every step that was tried, in order."""
    changes = _changes(result)
    found = []
    for i, step in enumerate(result.steps):
        e = step.evaluation
        state = "other" if step.action.kind == "stop" or (e is None and not step.accepted) else "right"
        state = "kept" if i in result.kept else "refused" if not step.accepted and e is not None else state
        found.append(
            Chapter(
                i + 1,
                step.text,
                outcome_text(step, i in result.kept),
                state,
                e.gate.value if e is not None else "",
                e.ms if e is not None else None,
                step.gain,
                (e.error or "") if e is not None and not step.accepted else "",
                changes.get(step.patch_digest, ()) if i in result.kept else (),
            )
        )
    return tuple(found)


def kernels(result: Result) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Times by region of the start program and of the result, the longest first; empty where not measured apart."""

    def of(times: dict[str, float]) -> tuple[Kernel, ...]:
        named = [Kernel(result.labels.get(region, region), ms) for region, ms in times.items()]
        return tuple(sorted(named, key=lambda k: -k.ms))

    return of(dict(result.start.region_ms)), of(dict(result.evaluation.region_ms))


def facts(result: Result) -> tuple[tuple[str, str], ...]:
    """Figures in the order of `Result.report`."""
    found = [*figures_of(result.evaluation, result.start), ("verification", result.verification)]
    found += [("evaluations", str(result.evaluations)), ("seconds", f"{result.seconds:.1f}")]
    return (*found, ("ended by", result.stopped))


def commands(result: Result, folder: Path) -> tuple[str, ...]:
    """What makes the result again, and searches for it again."""
    device = f" --device {result.device}" if result.estimated else ""
    return (f"qimeng replay {folder} FILE{device}", f"qimeng optimize FILE --mode {result.mode}{device}")


def _changes(result: Result) -> dict[str, tuple[Line, ...]]:
    """For the patch of each kept step the differences that it makes in implementations."""
    last: dict[str, str] = {}
    found = {}
    for step in result.recipe.steps:
        lines: list[Line] = []
        for region, implementation in _implementations(step):
            lines += _difference(last.get(region, ""), implementation.source)
            last[region] = implementation.source
        found[step.digest] = tuple(lines)
    return found


def _implementations(step: RecipeStep) -> Iterator[tuple[str, Implementation]]:
    patch = step.patch
    if patch.target is not None and patch.alternatives:
        yield patch.target, patch.alternatives[0]
    yield from patch.others


def _difference(before: str, after: str) -> Iterator[Line]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=UNCHANGED, lineterm="")
    for line in list(lines)[2:]:  # without the names of files
        yield Line(line[0], line[1:] if line[0] in "+- " else line)


__all__ = ["GATES", "Chapter", "Kernel", "Line", "chapters", "commands", "facts", "kernels"]
