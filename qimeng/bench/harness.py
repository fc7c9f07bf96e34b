"""A benchmark run: every problem of a suite, within a time budget, one stored row each.

Deals in which problems are still to do and in where rows go. Knows nothing about how one problem is measured
(`qimeng.bench.measure`) or what the rows add up to (`qimeng.bench.summary`). A run may be killed at any moment; the
next one with the same settings goes on where it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qimeng.bench.pool import run_tasks
from qimeng.bench.row import Row, Settings, append_row, blank_row, read_rows, row_key
from qimeng.bench.suite import Problem

Work = Callable[[Problem], Row | None]
"""Measures one problem; None where the problem is not of the families asked for."""


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out; nothing here changes what a row means.

    Attributes:
        settings: what each problem is run with, stored in its row.
        total_seconds: no problem is started that could not use its whole budget before this many seconds.
        jobs: problems worked on at once; their phases on the GPU wait for each other.
        overhead_seconds: what a problem may take beyond its budget (start, baselines, final verification) before it
            is given up as hanging.
        retry: run problems again whose stored row is a failure.
    """

    settings: Settings
    total_seconds: float = 3600.0
    jobs: int = 1
    overhead_seconds: float = 120.0
    retry: bool = False


def run_suite(
    problems: Sequence[Problem],
    work: Work,
    options: RunOptions,
    out: Path,
    on_start: Callable[[Problem], None] = lambda problem: None,
    on_row: Callable[[Row], None] = lambda row: None,
    may_start: Callable[[Problem, Sequence[Problem]], bool] = lambda problem, running: True,
) -> tuple[Row, ...]:
    """Run what is not in `out` yet and append each row as soon as it is there.

    Args:
        problems: what to run, in this order.
        work: measures one problem, in a worker process.
        options: settings and budget.
        out: file of rows, one line of JSON each; made if it is not there.
        on_start: called when a problem is started.
        on_row: called when its row is stored.
        may_start: whether a problem may run beside those that run (see `qimeng.bench.footprint`).

    Returns:
        The new rows, in the order they were finished.
    """
    end, rows = time.monotonic() + options.total_seconds, []
    outcomes = run_tasks(
        pending(problems, options, out),
        work,
        options.jobs,
        limit_s=options.settings.seconds + options.overhead_seconds,
        stop_at=end + options.overhead_seconds,
        start_before=end - options.settings.seconds,
        may_start=may_start,
        on_start=on_start,
    )
    for outcome in outcomes:
        if outcome.interrupted:
            continue
        row = outcome.result
        if outcome.failure is not None:
            row = blank_row(outcome.task, options.settings, error=outcome.failure)
        if row is not None:
            append_row(out, row)
            rows.append(row)
            on_row(row)
    return tuple(rows)


def pending(problems: Sequence[Problem], options: RunOptions, out: Path) -> list[Problem]:
    """The problems without a row in `out` with these settings (or with a failure in it, where they are retried)."""
    stored = read_rows(out) if out.exists() else ()
    done = {row.key for row in stored if row.error is None or not options.retry}
    return [p for p in problems if row_key(p.level, p.number, p.digest, options.settings) not in done]
