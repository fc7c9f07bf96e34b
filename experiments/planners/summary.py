"""What replays say: how good each method is at each number of evaluations, and how sure that is.

Deals in rows only. Intervals are bootstrapped over specs (all seeds of a spec together), since specs differ more than
seeds do. Knows nothing about how rows are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from experiments.planners.replay import UNANSWERED, Method, ReplayRow
from qimeng.bench.markdown import markdown, percent

AT = (5, 10, 20, 40)
"""Evaluations after which shares are told."""

SHARE = 0.9
"""Share of the best-known log-gain that counts as there."""

RESAMPLES, LEVEL = 4000, 0.95


Table = list[list[ReplayRow]]
"""The rows of one method: for each spec, those of all seeds."""


@dataclass(frozen=True)
class Figure:
    """A figure and its interval.

    Attributes:
        value: over all specs.
        low: lower end of the `LEVEL` interval.
        high: upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MethodFigures:
    """One method over the specs that all methods were replayed on.

    Attributes:
        method: the method.
        estimated: whether the times are an analytic model's.
        device: whose times they are.
        specs: how many.
        runs: replays: specs times seeds.
        shares: evaluations to the mean share of the best-known log-gain (mean over seeds, then over specs).
        needed: median number of evaluations to `SHARE` of it over all replays, misses counted as all evaluations.
        missed: share of the replays that never got there.
        unanswered: share of the replays that did not because the tree knew nothing more where they had gone.
        coverage: mean share of the legal actions that the trees had an answer for.
        length: evaluations that every replay has.
        table: the rows.
    """

    method: Method
    estimated: bool
    device: str
    specs: int
    runs: int
    shares: dict[int, Figure]
    needed: Figure
    missed: float
    unanswered: float
    coverage: float
    length: int
    table: Table = field(repr=False)

    @cached_property
    def curve(self) -> tuple[Figure, ...]:
        """The shares after 1, 2, 3 … evaluations; a table needs few of them."""
        return tuple(_share(self.table, n) for n in range(1, self.length + 1))


def summarize(rows: Iterable[ReplayRow]) -> tuple[MethodFigures, ...]:
    """Figures of every method, in the order of the rows; devices, and estimates and measurements, apart."""
    found: list[MethodFigures] = []
    for part in _parts(rows):
        tables = _tables(part)
        found += [_figures(method, table) for method, table in tables.items()]
    return tuple(found)


def advantages(rows: Iterable[ReplayRow], one: Method, answered: int = 0) -> dict[Method, dict[int, Figure]]:
    """Mean share of `one` less that of each other method, spec by spec, after each of `AT` evaluations.

    Args:
        rows: of all methods.
        one: the method held against the others.
        answered: specs are left out where the tree had no answer for the other method's trajectory any more before so
            many evaluations; a method that none is left of is left out.
    """
    found: dict[Method, dict[int, Figure]] = {}
    for part in _parts(rows):
        tables = _tables(part)
        if one not in tables:
            continue
        for method, table in tables.items():
            pairs = [(a, b) for a, b in zip(tables[one], table, strict=True) if _answered(b, answered)]
            if method != one and pairs:
                found[method] = {n: bootstrap([_mean_share(a, n) - _mean_share(b, n) for a, b in pairs]) for n in AT}
    return found


def bootstrap(values: Sequence[float], seed: int = 0) -> Figure:
    """The mean of `values` and its percentile interval over resampled values."""
    given, picks = np.asarray(values, dtype=float), _picks(len(values), seed)
    return _figure(float(given.mean()), given[picks].mean(1))


def bootstrap_median(groups: Sequence[Sequence[float]], seed: int = 0) -> Figure:
    """The median of all numbers in `groups` and its percentile interval over resampled groups."""
    longest = max(map(len, groups))
    padded = np.asarray([[*group, *[np.nan] * (longest - len(group))] for group in groups], dtype=float)
    drawn = padded[_picks(len(groups), seed)].reshape(RESAMPLES, -1)
    median = np.nanmedian if np.isnan(padded).any() else np.median
    return _figure(float(median(padded)), median(drawn, axis=1))


def _picks(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))


def _figure(value: float, resampled: np.ndarray) -> Figure:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(value, float(low), float(high))


def planners(rows: Sequence[ReplayRow]) -> str:
    """A table, one line a method."""
    head = [
        "times",
        "method",
        "specs",
        *(f"after {n}" for n in AT),
        "evaluations to 90 % (median)",
        "missed",
        "coverage",
    ]
    table = [head]
    for f in summarize(rows):
        shares = [percents(f.shares[n]) if n in f.shares else "–" for n in AT]
        needed = f"{f.needed.value:.0f} ({f.needed.low:.0f} … {f.needed.high:.0f})"
        times = f"{f.device}, {'estimated' if f.estimated else 'measured'}"
        missed = percent(f.missed) + (f", unanswered {percent(f.unanswered)}" if f.unanswered else "")
        table.append([times, f.method.label, str(f.specs), *shares, needed, missed, percent(f.coverage)])
    return markdown(table)


MAIN = ("imitation", "log-speedup 1", "heuristic", "untrained", "random")
"""Methods that a short table has, alone and with best-of-n; ``log-speedup 1`` is the planner in the package."""


def planners_main(rows: Sequence[ReplayRow]) -> str:
    """The same as `planners` for the methods of `MAIN` alone."""
    wanted = {label for name in MAIN for label in (name, f"{name}, best-of-n")}
    return planners([row for row in rows if row.method.label in wanted])


def pooled(rows: Sequence[ReplayRow]) -> list[ReplayRow]:
    """Rows of planners that differ in a training seed alone (``NAME-0``, ``NAME-1, best-of-n`` …) as one method's."""
    found = []
    for row in rows:
        match = re.fullmatch(r"(.+)-(\d+)((?:, .+)?)", row.method.label)
        if match:
            method = Method(match[1] + match[3], "", row.method.search)
            row = replace(row, method=method, seed=1000 * int(match[2]) + row.seed)
        found.append(row)
    return found


def planners_pooled(rows: Sequence[ReplayRow]) -> str:
    """The same as `planners` with training seeds as one method, and how far each is ahead of ``before``."""
    together = pooled(rows)
    before = next((r.method for r in together if r.method.label == "before"), None)
    ahead = [["points ahead of before", "specs", *(f"after {n}" for n in AT)]]
    for method in dict.fromkeys(r.method for r in together if before and r.method.label not in ("before", "random")):
        some = [r for r in together if r.method in (method, before)]
        for other, figures in advantages(some, method).items():
            assert other == before
            specs = len({r.spec for r in some if r.method == method} & {r.spec for r in some if r.method == before})
            shown = [f"{100 * f.value:+.0f} ({100 * f.low:+.0f} … {100 * f.high:+.0f})" for f in figures.values()]
            ahead.append([method.label, str(specs), *shown])
    return planners(together) + "\n\n" + markdown(ahead)


REPLAYS: dict[str, Callable[[Sequence[ReplayRow]], str]] = {
    "planners": planners,
    "planners_main": planners_main,
    "planners_pooled": planners_pooled,
}
"""What a table in a document may ask for."""


def percents(figure: Figure) -> str:
    """A share and its interval, as a table shows them."""
    return f"{100 * figure.value:.0f} % ({100 * figure.low:.0f} … {100 * figure.high:.0f})"


def _parts(rows: Iterable[ReplayRow]) -> list[list[ReplayRow]]:
    """Rows that may be compared: of one device, estimated or measured."""
    found: dict[tuple[str, bool], list[ReplayRow]] = {}
    for row in rows:
        found.setdefault((row.device, row.estimated), []).append(row)
    return list(found.values())


def _tables(rows: Sequence[ReplayRow]) -> dict[Method, Table]:
    """Rows by method over the specs that every method has, in one order."""
    by: dict[Method, dict[str, list[ReplayRow]]] = {}
    for row in rows:
        by.setdefault(row.method, {}).setdefault(row.spec, []).append(row)
    shared = sorted(set.intersection(*(set(specs) for specs in by.values())))
    return {method: [specs[s] for s in shared] for method, specs in by.items()} if shared else {}


def _figures(method: Method, table: Table) -> MethodFigures:
    rows = [row for group in table for row in group]
    length = min(len(row.gains) for row in rows)
    missed = [row for row in rows if row.share(length) < SHARE]
    needs = [[row.evaluations_to(SHARE) for row in group] for group in table]
    return MethodFigures(
        method=method,
        estimated=rows[0].estimated,
        device=rows[0].device,
        specs=len(table),
        runs=len(rows),
        shares={n: _share(table, n) for n in AT if n <= length},
        needed=bootstrap_median(needs),
        missed=len(missed) / len(rows),
        unanswered=sum(row.stopped == UNANSWERED for row in missed) / len(rows),
        coverage=sum(row.coverage for row in rows) / len(rows),
        length=length,
        table=table,
    )


def _share(table: Table, evaluations: int) -> Figure:
    return bootstrap([_mean_share(group, evaluations) for group in table])


def _answered(group: Sequence[ReplayRow], evaluations: int) -> bool:
    return all(row.stopped != UNANSWERED or row.evaluations >= evaluations for row in group)


def _mean_share(group: Sequence[ReplayRow], evaluations: int) -> float:
    return sum(row.share(evaluations) for row in group) / len(group)


__all__ = [
    "AT",
    "REPLAYS",
    "SHARE",
    "Figure",
    "MethodFigures",
    "advantages",
    "bootstrap",
    "percents",
    "planners",
    "planners_pooled",
    "pooled",
    "summarize",
]
