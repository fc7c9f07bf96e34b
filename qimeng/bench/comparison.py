"""Compares several runs over the problems they share, to show what a planner or another part gains.

Deals in rows only. Knows nothing about how figures are printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from qimeng.bench.row import Row
from qimeng.bench.summary import geometric_mean, group_of, runs


@dataclass(frozen=True)
class Compared:
    """One run on the shared problems of one group.

    Attributes:
        run: the run's settings.
        group: see `qimeng.bench.summary.group_of`.
        problems: how many problems all runs have.
        right: share of them that are right in this run.
        timed: how many are right and timed in every run; the mean is over these.
        over_eager: geometric mean of eager's time over ours.
        half_generated: share of the problems that spend at least half of their GPU time in generated kernels.
        median_evaluations: median number of evaluations.
        median_seconds: median wall seconds, baselines not counted.
    """

    run: str
    group: str
    problems: int
    right: float
    timed: int
    over_eager: float | None
    half_generated: float
    median_evaluations: float | None
    median_seconds: float | None


def compare(rows: Iterable[Row]) -> tuple[Compared, ...]:
    """For each group of the shared problems, one line a run; measured and estimated runs are not compared.

    The group is that of the first run, since a run that fails on a problem may not know it.
    """
    found = runs(rows)
    kinds = [estimated for _, _, estimated in found]
    parts = {key: {r.problem: r for r in part} for key, part in found.items() if key[2] == kinds[0]}
    tables = list(parts.values())
    shared = [p for p in (tables[0] if tables else {}) if all(p in t for t in tables)]
    groups = {p: next((group_of(t[p]) for t in tables if t[p].family), "not captured") for p in shared}
    lines = []
    for group in dict.fromkeys(groups.values()):
        mine = [p for p in shared if groups[p] == group]
        timed = [p for p in mine if all(t[p].right and t[p].speedup is not None for t in tables)]
        for (label, device, _), table in parts.items():
            several = len({d for _, d, _ in parts}) > 1
            name = f"{label} on {device}" if several else label
            lines.append(_compared(name, group, [table[p] for p in mine], [table[p] for p in timed]))
    return tuple(lines)


def _compared(run: str, group: str, rows: Sequence[Row], timed: Sequence[Row]) -> Compared:
    seconds = [r.optimize_seconds for r in rows if r.optimize_seconds is not None]
    return Compared(
        run=run,
        group=group,
        problems=len(rows),
        right=sum(bool(r.right) for r in rows) / len(rows),
        timed=len(timed),
        over_eager=geometric_mean(r.speedup for r in timed),
        half_generated=sum(bool(r.right) and (r.generated_share or 0.0) >= 0.5 for r in rows) / len(rows),
        median_evaluations=float(median(r.evaluations for r in rows)),
        median_seconds=median(seconds) if seconds else None,
    )


__all__ = ["Compared", "compare"]
