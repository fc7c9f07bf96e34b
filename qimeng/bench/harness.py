"""A benchmark run: every problem of a suite, within a time budget, one stored row each.

Deals in which problems are still to do and in where rows go. Knows nothing about how one problem is measured
(`qimeng.bench.measure`) or what the rows add up to (`qimeng.bench.summary`). A run may be killed at any moment; the
next one with the same settings resumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qimeng.bench.pool import Place, Pool
from qimeng.bench.row import Row, Settings, append_row, blank_row, read_rows, row_key
from qimeng.bench.suite import Problem
from qimeng.bench.survey import Facts, fitting

Work = Callable[[Problem], Row]
"""Measures one problem."""

SURVEY_S = 60.0
"""Seconds that looking at one problem may take."""


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out; nothing here changes what a row means.

    Attributes:
        settings: what each problem is run with, stored in its row.
        total_seconds: no problem is started that could not use its whole budget before this many seconds.
        places: where problems are worked on, a GPU each, and how many at once; their phases on one GPU take turns.
        memory_bytes: memory of each GPU; 0 where there is none.
        families: only problems of these families; empty for all.
        overhead_seconds: what a problem may take beyond its budget and torch.compile's before it is given up as
            hanging, and what the run may take beyond its own.
        retry: run problems again whose stored row is a failure.
    """

    settings: Settings
    total_seconds: float = 3600.0
    places: tuple[Place, ...] = (Place(),)
    memory_bytes: int = 0
    families: tuple[str, ...] = ()
    overhead_seconds: float = 120.0
    retry: bool = False

    @property
    def limit_s(self) -> float:
        """Seconds after which a problem is given up as hanging."""
        settings = self.settings
        return settings.seconds + len(settings.compile_modes) * settings.compile_seconds + self.overhead_seconds


def run_suite(
    problems: Sequence[Problem],
    work: Work,
    options: RunOptions,
    out: Path,
    look: Callable[[Problem], Facts] | None = None,
    on_start: Callable[[Problem, Place], None] = lambda problem, place: None,
    on_row: Callable[[Row], None] = lambda row: None,
    pool: Pool | None = None,
) -> tuple[Row, ...]:
    """Run what is not in `out` yet and append each row as soon as it is there.

    Args:
        problems: what to run; those that take the most memory are started first, since they fit in the fewest places.
        work: measures one problem, in a worker process.
        options: settings and budget.
        out: file of rows, one line of JSON each; made if it is not there.
        look: says what is known of a problem before it runs (see `qimeng.bench.survey`), in a worker process as well,
            which warms it up; without it no problem is left out and none waits for memory.
        on_start: called when a problem is started.
        on_row: called when its row is stored.
        pool: has the workers, and is closed here; by default worker processes at the places of `options`.

    Returns:
        The new rows, in the order they were finished.
    """
    end, rows = time.monotonic() + options.total_seconds, []
    todo = pending(problems, options, out)
    with pool or Pool(options.places) as pool:
        known = _looked_at(pool, todo, look, end) if look is not None else {}
        todo = [p for p in todo if _wanted(known.get(p, Facts()), options.families)]
        todo.sort(key=lambda p: -known.get(p, Facts()).memory_bytes)
        outcomes = pool.run(
            todo,
            work,
            limit_s=options.limit_s,
            stop_at=end + options.overhead_seconds,
            start_before=end - options.settings.seconds,
            may_start=fitting(options.memory_bytes, known) if options.memory_bytes else lambda problem, running: True,
            on_start=on_start,
        )
        for outcome in outcomes:
            if outcome.interrupted:
                continue
            row = outcome.result
            if row is None:
                row = blank_row(outcome.task, options.settings, error=outcome.failure)
            append_row(out, row)
            rows.append(row)
            on_row(row)
    return tuple(rows)


def _looked_at(
    pool: Pool, problems: Sequence[Problem], look: Callable[[Problem], Facts], end: float
) -> Mapping[Problem, Facts]:
    outcomes = pool.run(problems, look, SURVEY_S, stop_at=end)
    return {o.task: o.result for o in outcomes if o.result is not None}


def _wanted(facts: Facts, families: Sequence[str]) -> bool:
    return not families or (facts.found is not None and facts.found.family in families)


def pending(problems: Sequence[Problem], options: RunOptions, out: Path) -> list[Problem]:
    """The problems without a row in `out` with these settings (or with a failure in it, where they are retried)."""
    stored = read_rows(out) if out.exists() else ()
    done = {row.key for row in stored if row.error is None or not options.retry}
    return [p for p in problems if row_key(p.id, p.digest, options.settings) not in done]


__all__ = ["RunOptions", "pending", "run_suite"]
