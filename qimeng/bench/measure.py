"""One problem, measured: optimize it, time the baselines beside it, and make its row.

Deals in turning a result into a row. Knows nothing about other problems, files of rows or figures. Runs in a worker
process of the harness, or wherever it is called.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from qimeng.bench.environment import environment
from qimeng.bench.families import Classification, classify
from qimeng.bench.roofline import roofline
from qimeng.bench.row import Row, Settings, StepRow, blank_row
from qimeng.bench.suite import Problem
from qimeng.envs.loop import optimize
from qimeng.envs.result import Result
from qimeng.envs.session import Attempt, Budget
from qimeng.envs.setup import make_device, make_task
from qimeng.envs.task import Task
from qimeng.errors import QimengError
from qimeng.graph.capture import CaptureError, capture
from qimeng.interfaces import Evaluation, Step
from qimeng.planner import make_search
from qimeng.spec import KernelSpec


def classification(problem: Problem) -> Classification | None:
    """The family of a problem, from its graph; None where it cannot be captured."""
    spec = KernelSpec.from_file(problem.path)
    try:
        return classify(capture(spec.module, lambda: spec.inputs(0)))
    except CaptureError:
        return None


def measure(
    problem: Problem, settings: Settings, families: tuple[str, ...] = (), device: str | None = None
) -> Row | None:
    """Optimize one problem and return its row; a failure of the library or of the problem is a row with the error.

    Args:
        problem: what to optimize.
        settings: how.
        families: only these; empty for all.
        device: name of a device to estimate for, where there is no GPU.

    Returns:
        The row; None where the problem is of another family.

    Raises:
        DeviceError: an unknown device.
        ValueError: an unknown planner, coder or search.
    """
    began, search = time.monotonic(), make_search(settings.search, settings.planner)
    target = make_device(device)
    row = blank_row(
        problem, settings, environment=environment(target), started=datetime.now(UTC).isoformat(timespec="seconds")
    )
    try:
        found = classification(problem)
        if families and (found is None or found.family not in families):
            return None
        row = replace(row, captured=found is not None)
        if found is not None:
            row = replace(row, family=found.family, collapsed=found.collapsed, random=found.random)
        spec = KernelSpec.from_file(problem.path, dtype=settings.dtype, mode=settings.mode)
        task = make_task(spec, coder=settings.coder, device=target)
    except QimengError as error:
        return _timed(replace(row, error=f"{type(error).__name__}: {error}"), began)
    try:
        row = _with_bound(row, task, settings.mode)
        captured_s = time.monotonic() - began
        result = optimize(task, search, Budget(settings.seconds, settings.evaluations or Budget.evaluations))
        row = _with_result(row, result, {"capture": captured_s})
    except QimengError as error:
        row = replace(row, error=f"{type(error).__name__}: {error}")
    finally:
        task.evaluator.close()
    return _timed(row, began)


def _with_bound(row: Row, task: Task, mode: str) -> Row:
    """The roofline's figures, where the computation is a graph."""
    if task.reason:
        return replace(row, captured=False)
    bound = roofline(task.start.graph, task.context.device, mode)
    return replace(row, bytes=bound.bytes, flops=bound.flops, floor_ms=bound.ms)


def _with_result(row: Row, result: Result, seconds: dict[str, float]) -> Row:
    final = result.evaluation
    evaluations = [result.start, *(s.evaluation for s in result.steps if s.evaluation is not None), final]
    accuracy = final.accuracy
    return replace(
        row,
        right=final.ok,
        error=None if final.ok else f"gate {final.gate.value}: {final.error}",
        kernelbench=accuracy.kernelbench if accuracy else None,
        reference=accuracy.reference if accuracy else "",
        candidate=final.timing,
        eager=final.eager,
        generated_share=final.generated_share,
        peak_bytes=final.peak_bytes,
        eager_peak_bytes=final.eager_peak_bytes,
        prepare_ms=final.prepare_ms,
        evaluations=result.evaluations,
        configurations=sum(e.configurations for e in evaluations),
        steps=step_rows(result.steps),
        seconds={**seconds, **split_seconds(evaluations)},
        recipe=result.recipe.to_json(),
        source_digest=result.program.digest if result.program else "",
    )


def step_rows(steps: Iterable[Step]) -> tuple[StepRow, ...]:
    """What was tried, in order, with the gain of each accepted step over the program it was applied to."""
    rows = []
    for step in steps:
        found, gain = step.evaluation, None
        before_ms = step.before_ms if isinstance(step, Attempt) else None
        if step.accepted and found is not None and found.ms and before_ms is not None:
            gain = before_ms / found.ms
        rows.append(
            StepRow(
                kind=step.action.kind,
                param=step.action.param,
                accepted=step.accepted,
                gate=found.gate.value if found else "",
                gain=gain,
                configurations=found.configurations if found else 0,
            )
        )
    return tuple(rows)


def split_seconds(evaluations: Iterable[Evaluation]) -> dict[str, float]:
    """Wall seconds of the judge by part, summed over `evaluations`."""
    total: dict[str, float] = {}
    for evaluation in evaluations:
        for part, seconds in evaluation.seconds.items():
            total[part] = round(total.get(part, 0.0) + seconds, 3)
    return total


def _timed(row: Row, began: float) -> Row:
    return replace(row, seconds={**row.seconds, "total": round(time.monotonic() - began, 3)})
