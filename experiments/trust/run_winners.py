"""The winners of stored rows before the judge of today: is each still right, on every distribution, and as fast?

For after the judge has changed: programs are made again from their recipes, no coder is asked, and each is judged once.
Goes on where it ended when it is started again with the same file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.trust.journal import Journal, read_journal
from qimeng.bench.environment import environment
from qimeng.bench.gpus import gpu_places, visible_gpus
from qimeng.bench.pool import Pool
from qimeng.bench.row import Row, read_rows
from qimeng.bench.suite import problems_of
from qimeng.bench.suites import suite_named
from qimeng.device import current_device, target_device
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.errors import QimengError
from qimeng.program.verify import capture_spec
from qimeng.recipe import Recipe
from qimeng.spec import DISTRIBUTIONS

WINNER_S = 120.0
"""Seconds that one may take."""


def judge(suite: str, beside: int, task: tuple[str, Row]) -> dict[str, Any]:
    """What becomes of a row's winner: gate, failure, error, times; those that the row has beside them."""
    row = task[1]
    (problem,) = problems_of(suite_named(suite), row.id)
    began = time.monotonic()
    spec = problem.spec(row.settings.dtype, row.settings.mode)
    graph = capture_spec(spec, device="cuda")
    recipe = replace(Recipe.from_json(row.recipe), program="")  # what is around kernels may be printed anew
    evaluator = GpuEvaluator(spec, graph, trials=len(DISTRIBUTIONS) + 1, beside=beside)
    try:
        found = evaluator.evaluate(recipe.replay(graph))
        dropped = sorted(evaluator.references.dropped)
    finally:
        evaluator.close()
    return {
        "gate": found.gate.value,
        "failure": found.failure,
        "error": (found.error or "")[:600],
        "ms": found.ms,
        "eager_ms": found.eager.device_ms if found.eager else None,
        "row_ms": row.candidate and row.candidate.device_ms,
        "row_eager_ms": row.eager and row.eager.device_ms,
        "dropped": dropped,
        "seconds": round(time.monotonic() - began, 2),
    }


def winners(paths: Sequence[str]) -> list[tuple[str, Row]]:
    """The rows that have a right program, with their keys."""
    rows = [row for path in paths for row in read_rows(path) if row.right and row.recipe]
    return [(f"{r.id} {r.settings.dtype} {r.settings.mode}", r) for r in rows]


def recheck(out: Path, suite: str, rows: Sequence[str], seconds: float = 600.0, jobs: int = 1) -> bool:
    """Judge the winners that have no row yet; whether all of them passed.

    Args:
        out: file of rows.
        suite: where the problems come from, ``"kernelbench:FOLDER"``, say.
        rows: files of rows whose winners are judged.
        seconds: after which none is begun.
        jobs: processes on each GPU.

    Raises:
        QimengError: there is no GPU.
    """
    if current_device() is None:
        raise QimengError("there is no GPU: stored winners are judged where they can run")
    journal = Journal(out, environment(target_device()), seconds)
    pending = [(key, row) for key, row in winners(rows) if not journal.has(key)]
    end = time.monotonic() + journal.seconds_left
    with Pool(gpu_places(0, jobs, visible_gpus())) as pool:
        for outcome in pool.run(pending, partial(judge, suite, jobs), WINNER_S, start_before=end):
            told = outcome.result or {"gate": "", "failure": "run", "error": outcome.failure}
            journal.add(outcome.task[0], what="winner", **told)
            print(f"{outcome.task[0]}: {told['gate']} {told['failure'] or ''} {told['error'] or ''}"[:300], flush=True)
    found = read_journal(out)
    wrong = [row["key"] for row in found if row["gate"] != "passed"]
    print(f"{len(found)} winners judged, {len(wrong)} refused{': ' if wrong else ''}{', '.join(wrong)}")
    return not wrong


__all__ = ["recheck", "winners"]
