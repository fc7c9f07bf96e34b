"""Replays and live timings by several processes at once, within a time budget.

Deals in jobs small enough that one that is cut off loses little: a method on a tree, a few programs of a tree. Each job
is what `experiments.planners.replay` and `experiments.planners.live` do one after another; rows come as jobs end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from experiments.planners.live import LiveRow, time_live
from experiments.planners.replay import EVALUATIONS, SEEDS, Method, ReplayRow, replay
from qimeng.bench.pool import Place, Pool
from qimeng.bench.row import Environment
from qimeng.errors import QimengError
from qimeng.planner.data.tree import Tree

LIMIT_S = 600.0
"""A job that takes longer is given up."""

FEW = 4
"""Programs that one job times: each job makes the spec's reference and its judge anew."""

R = TypeVar("R", ReplayRow, LiveRow)

Said = Callable[[str], None]
"""Told in a sentence what could not be done."""


@dataclass(frozen=True)
class Job:
    """Rows to make of one tree.

    Attributes:
        tree: what was explored.
        methods: to replay.
        rows: of replays whose final programs are timed.
    """

    tree: Tree
    methods: tuple[Method, ...] = ()
    rows: tuple[ReplayRow, ...] = ()


def replay_at_once(
    trees: Iterable[Tree],
    methods: Sequence[Method],
    environment: Environment,
    jobs: int,
    seconds: float,
    seeds: Sequence[int] = SEEDS,
    evaluations: int = EVALUATIONS,
    done: Sequence[ReplayRow] = (),
    said: Said = print,
) -> Iterator[ReplayRow]:
    """`replay` by `jobs` processes of one thread each, cut off after so many seconds."""
    known = {row.key for row in done if len(row.gains) == evaluations}

    def whole(tree: Tree, method: Method) -> bool:
        about = tree.conditions.spec, tree.conditions.device
        return all((*about, method, seed) in known for seed in (seeds if method.draws else seeds[:1]))

    waiting = [Job(tree, (m,)) for m in methods for tree in trees if not whole(tree, m)]
    work = partial(_replayed, environment=environment, seeds=tuple(seeds), evaluations=evaluations, known=tuple(done))
    yield from _run(waiting, work, (Place("cpu", jobs, {"OMP_NUM_THREADS": "1"}),), seconds, said)


def time_at_once(
    trees: Iterable[Tree],
    rows: Sequence[ReplayRow],
    environment: Environment,
    places: Sequence[Place],
    seconds: float,
    device: str = "",
    done: Sequence[LiveRow] = (),
    said: Said = print,
) -> Iterator[LiveRow]:
    """`time_live` by processes at `places`, cut off after so many seconds; the judge is that of `device`."""
    known, waiting = {(row.spec, row.program) for row in done if row.device}, []
    for tree in trees:
        spec = tree.conditions.spec
        last = {r.best: r for r in rows if r.spec == spec and r.best and (spec, r.best) not in known}
        left = tuple(last.values())
        waiting += [Job(tree, rows=left[i : i + FEW]) for i in range(0, len(left), FEW)]
    yield from _run(waiting, partial(_timed, environment=environment, device=device), places, seconds, said)


def _run(
    waiting: Sequence[Job], work: Callable[[Job], tuple[R, ...]], places: Sequence[Place], seconds: float, said: Said
) -> Iterator[R]:
    end = time.monotonic() + seconds
    with Pool(places) as pool:
        for outcome in pool.run(waiting, work, LIMIT_S, stop_at=end, start_before=end):
            if outcome.result is not None:
                yield from outcome.result
            elif not outcome.interrupted:
                said(f"{outcome.task.tree.name}: {outcome.failure}")


def _replayed(
    job: Job, environment: Environment, seeds: Sequence[int], evaluations: int, known: Sequence[ReplayRow]
) -> tuple[ReplayRow, ...]:
    def refuse(tree: Tree, error: QimengError) -> None:
        raise error

    return tuple(replay([job.tree], job.methods, environment, seeds, evaluations, known, on_refused=refuse))


def _timed(job: Job, environment: Environment, device: str) -> tuple[LiveRow, ...]:
    from qimeng.envs.steps.setup import make_task

    return tuple(time_live([job.tree], job.rows, lambda t: make_task(t.spec(), device=device or None), environment))


__all__ = ["FEW", "LIMIT_S", "Job", "replay_at_once", "time_at_once"]
