"""What a report of a benchmark shows, worked out: a line a problem, families, settings.

Deals in rows. Knows nothing about HTML or plots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qimeng.bench.row import Row
from qimeng.bench.summary import geometric_mean


@dataclass(frozen=True)
class LineOfRun:
    """One problem.

    Attributes:
        id: of the problem.
        name: its label.
        family: its family.
        right: whether the final program is right.
        speedup: over PyTorch eager; None where not timed.
        over_compile: over torch.compile in the first mode; None where not timed.
        ms: of the program; None where not timed.
        eager_ms: of PyTorch.
        share: of the time in generated kernels, 0 to 1; None where not known.
        seconds: that the problem took.
        flags: what a reader should look at, in words.
    """

    id: str
    name: str
    family: str
    right: bool
    speedup: float | None
    over_compile: float | None
    ms: float | None
    eager_ms: float | None
    share: float | None
    seconds: float
    flags: tuple[str, ...]


@dataclass(frozen=True)
class FamilyLine:
    """Problems of one family.

    Attributes:
        name: of the family.
        problems: how many.
        right: how many of them are right.
        speedup: geometric mean over PyTorch eager of the right ones; None where none is timed.
        over_compile: the same over torch.compile.
    """

    name: str
    problems: int
    right: int
    speedup: float | None
    over_compile: float | None


def lines(rows: Iterable[Row]) -> tuple[LineOfRun, ...]:
    """A line for each row."""
    return tuple(_line(row) for row in rows)


def _line(row: Row) -> LineOfRun:
    return LineOfRun(
        row.id,
        row.name,
        row.family or "–",
        bool(row.right),
        row.speedup,
        row.over_compile,
        row.candidate.device_ms if row.candidate else None,
        row.eager.device_ms if row.eager else None,
        row.generated_share,
        row.seconds.get("total", 0.0),
        tuple(_flags(row)),
    )


def _flags(row: Row) -> Iterable[str]:
    """Why a row needs a look."""
    if row.error:
        yield row.error
    elif row.right is None:
        yield "UNCHECKED: it was not verified"
    elif not row.right:
        yield "wrong in the final verification"
    if row.kernelbench is False:
        if row.exact_fails:
            yield "KernelBench's rule fails, as it does for the exact result: PyTorch is what is off"
        elif row.eager_unstable:
            yield "KernelBench's rule fails, as it does between two runs of PyTorch"
        else:
            yield "KernelBench's rule fails: the result is right by its error against float64, not near PyTorch's own"
    if row.degenerate:
        yield f"a trivial result would pass: {row.degenerate}"
    if row.estimated:
        yield "times are estimated"


def families(lines: Sequence[LineOfRun]) -> tuple[FamilyLine, ...]:
    """A line for each family, the largest first, and one for all."""
    groups: dict[str, list[LineOfRun]] = {}
    for line in lines:
        groups.setdefault(line.family, []).append(line)
    ordered = sorted(groups.items(), key=lambda pair: -len(pair[1]))
    return tuple(_family(name, members) for name, members in [*ordered, ("all", list(lines))])


def _family(name: str, members: Sequence[LineOfRun]) -> FamilyLine:
    right = [line for line in members if line.right]
    return FamilyLine(
        name,
        len(members),
        len(right),
        geometric_mean(line.speedup for line in right),
        geometric_mean(line.over_compile for line in right),
    )


def settings(rows: Iterable[Row]) -> tuple[str, ...]:
    """What was asked for, each once."""
    return tuple(dict.fromkeys(row.settings.label for row in rows))


def environments(rows: Iterable[Row]) -> tuple[str, ...]:
    """Where it was measured, each once."""
    return tuple(
        dict.fromkeys(
            f"{e.device}, driver {e.driver or 'none'}, torch {e.torch}, triton {e.triton}, commit {e.commit}"
            for e in (row.environment for row in rows)
        )
    )


__all__ = ["FamilyLine", "LineOfRun", "environments", "families", "lines", "settings"]
