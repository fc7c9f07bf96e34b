"""The trees of the held-out specs: each explored by the methods that are compared, then by chance.

Deals in processes, a store and a log, as `qimeng.bench.collect` does for training data. An exploration may be killed at
any moment; with the same folder it goes on where it ended. Knows nothing about which specs are held out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from experiments.planners.heldout import explorers_of
from experiments.planners.replay import Method
from qimeng.bench.collect import LOG, STORE, append_rows, read_log
from qimeng.bench.explore import Explored, explore
from qimeng.bench.pool import Place, Pool
from qimeng.errors import QimengError
from qimeng.planner.data.generate import Drawn
from qimeng.planner.data.tree_store import put_drawn
from qimeng.store import Store

LEAST_S = 60.0
"""Seconds that are worth starting a candidate for."""

ORDER = "candidates.json"
"""File of the folder that holds the candidates' names and digests in their order."""


@dataclass(frozen=True)
class Plan:
    """How candidates are explored.

    Attributes:
        methods: who explores.
        evaluations: programs judged for each candidate.
        seconds_each: wall-clock budget of a candidate.
        total_seconds: of all; who starts late has what is left, and none starts with less than `LEAST_S`.
        overhead_seconds: what a candidate may take beyond its budget before it is given up as hanging.
        places: where candidates are explored, and how many at once.
        device: name of the device to estimate times for; empty for this machine's GPU.
    """

    methods: tuple[Method, ...]
    evaluations: int = 160
    seconds_each: float = 300.0
    total_seconds: float = 3600.0
    overhead_seconds: float = 120.0
    places: tuple[Place, ...] = field(default=(Place(),))
    device: str = ""


def explore_one(drawn: Drawn, plan: Plan, store: Path, end: float = math.inf) -> Explored:
    """Explore one candidate into the store at `store`, until `time.monotonic()` is `end` at the latest."""
    from qimeng.envs.steps.setup import make_device, make_task

    began, spec = time.monotonic(), drawn.spec
    row = _row(drawn, plan, make_device(plan.device or None).name)
    with Store(store) as opened:
        put_drawn(opened, drawn)
        try:
            task = make_task(spec, device=plan.device or None, store=opened, by_region=False)
        except QimengError as error:
            return _row(drawn, plan, row.device, f"{type(error).__name__}: {error}")
        try:
            if task.start.fallback:
                return _row(drawn, plan, row.device, task.reason)
            seconds = min(plan.seconds_each, end - began)
            return explore(task, row, opened, seconds, began=began, explorers=explorers_of(plan.methods))
        finally:
            task.evaluator.close()


def explore_all(
    candidates: Sequence[Drawn], plan: Plan, out: Path, device: str, on_row: Callable[[Explored], None]
) -> None:
    """Explore the candidates that have no row in the log yet, then go on with those that ran out of seconds.

    Args:
        candidates: in their order, which is kept beside the log.
        plan: how.
        out: folder of store, log and order.
        device: name of the device that times are of.
        on_row: called when a row is stored.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / ORDER).write_text(json.dumps([[d.spec.digest, d.spec.name] for d in candidates], indent=0) + "\n")
    rows = {r.spec: r for r in read_log(out / LOG) if r.device == device and r.asked >= plan.evaluations}
    late = [d for d in candidates if (row := rows.get(d.spec.digest)) and row.stopped == "seconds"]
    left = [d for d in candidates if d.spec.digest not in rows] + late
    end = time.monotonic() + plan.total_seconds
    with Pool(plan.places) as pool:
        for outcome in pool.run(
            left,
            partial(explore_one, plan=plan, store=out / STORE, end=end),  # a clock that processes share
            limit_s=plan.seconds_each + plan.overhead_seconds,
            stop_at=end + plan.overhead_seconds,
            start_before=end - min(plan.seconds_each, LEAST_S),
        ):
            if not outcome.interrupted:
                row = outcome.result or _row(outcome.task, plan, device, outcome.failure)
                append_rows(out / LOG, [row])
                on_row(row)


def read_order(out: Path) -> tuple[str, ...]:
    """Digests of the candidates that were explored into `out`, in their order.

    Raises:
        QimengError: nothing was explored there.
    """
    try:
        return tuple(digest for digest, _ in json.loads((out / ORDER).read_text()))
    except (OSError, ValueError) as error:
        raise QimengError(f"{out} holds no exploration of held-out specs ({ORDER}: {error})") from None


def _row(drawn: Drawn, plan: Plan, device: str, error: str | None = None) -> Explored:
    spec = drawn.spec
    where = (drawn.family, drawn.seed, drawn.index, device)
    return Explored(spec.digest, spec.name, *where, asked=plan.evaluations, error=error and error[:500])
