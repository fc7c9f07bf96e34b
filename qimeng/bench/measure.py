"""One problem, measured: optimize it, time the baselines beside it, and make its row.

Deals in turning a result into a row. Knows nothing about other problems, files of rows or figures. Runs in a worker
process of the harness, or wherever it is called.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable

from qimeng.bench.degenerate import degenerate
from qimeng.bench.environment import environment
from qimeng.bench.families import classify
from qimeng.bench.row import Row, Settings, StepRow, blank_row
from qimeng.bench.suite import Problem
from qimeng.envs.baseline import compiled_name
from qimeng.envs.loop import optimize
from qimeng.envs.result import Result
from qimeng.envs.roofline import floor_ms, product_flops
from qimeng.envs.session import Attempt, Budget
from qimeng.envs.setup import make_device, make_task
from qimeng.envs.task import Task
from qimeng.errors import QimengError
from qimeng.interfaces import Evaluation, Step, Timing
from qimeng.planner import make_search
from qimeng.spec import KernelSpec


class Knows(Protocol):
    """What a judge that measures knows about the reference."""

    eager_agrees: bool | None


@runtime_checkable
class TimesBaselines(Protocol):
    """A judge that times PyTorch's own programs in turns with the candidate."""

    references: Knows
    turns: Mapping[str, Timing]

    def baselines(self, compile: bool, modes: Sequence[str]) -> Mapping[str, Timing]:
        """Make torch.compile's programs ready in `modes` and time them; `turns` has them after a final verification."""


class Lap:
    """Seconds by part, one after another.

    Args:
        since: the monotonic clock at the start of the first part.
    """

    def __init__(self, since: float):
        self.seconds: dict[str, float] = {}
        self._since = since

    def lap(self, part: str) -> None:
        """What has passed since the last call was spent on `part`."""
        now = time.monotonic()
        self.seconds[part] = round(now - self._since, 3)
        self._since = now


def measure(problem: Problem, settings: Settings, device: str | None = None) -> Row:
    """Optimize one problem and return its row; a failure of the library or of the problem is a row with the error.

    Args:
        problem: what to optimize.
        settings: how.
        device: name of a device to estimate for, where there is no GPU.

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
        spec = KernelSpec.from_file(problem.path, dtype=settings.dtype, mode=settings.mode)
        task = make_task(spec, coder=settings.coder, device=target)
    except QimengError as error:
        return _timed(replace(row, error=f"{type(error).__name__}: {error}"), began)
    try:
        row = _with_graph(row, task, settings.mode)
        clock = Lap(began)
        clock.lap("capture")
        judge = task.evaluator if isinstance(task.evaluator, TimesBaselines) else None
        if judge is not None:
            row = replace(row, degenerate=degenerate(spec, "cuda" if target.measured else "cpu"))
            clock.lap("degenerate")
            row = _with_compiled(row, judge, settings.compile_modes)
            clock.lap("baselines")
        result = optimize(task, search, Budget(settings.seconds, settings.evaluations or Budget.evaluations))
        row = _with_result(row, result, clock.seconds)
        if judge is not None:
            row = _with_baselines(row, judge, settings.compile_modes)
    except QimengError as error:
        row = replace(row, error=f"{type(error).__name__}: {error}")
    finally:
        task.evaluator.close()
    return _timed(row, began)


def _with_graph(row: Row, task: Task, mode: str) -> Row:
    """Family and roofline, where the computation is a graph."""
    if task.reason:
        return replace(row, captured=False)
    graph, found = task.start.graph, classify(task.start.graph)
    return replace(
        row,
        family=found.family,
        collapsed=found.collapsed,
        random=found.random,
        flops=sum(product_flops(graph, node) for node in graph.ops()),
        floor_ms=floor_ms(graph, task.context.device, mode),
    )


def _with_compiled(row: Row, judge: TimesBaselines, modes: Sequence[str]) -> Row:
    """Make torch.compile's programs ready; what cannot be compiled or timed costs a note, not the row."""
    try:
        ready = judge.baselines(bool(modes), modes)
    except QimengError as error:
        return replace(row, notes=(*row.notes, f"baselines: {error}"))
    missing = [mode for mode in modes if compiled_name(mode) not in ready]
    return replace(row, notes=(*row.notes, *(f"torch.compile {mode} cannot be timed" for mode in missing)))


def _with_baselines(row: Row, judge: TimesBaselines, modes: Sequence[str]) -> Row:
    """torch.compile's times, from the turns of the final verification."""
    turns = {mode: judge.turns.get(compiled_name(mode)) for mode in modes}
    timed = {mode: timing for mode, timing in turns.items() if timing is not None}
    best = min(timed, key=lambda mode: timed[mode].device_ms, default="")
    agrees = judge.references.eager_agrees
    return replace(
        row,
        compiled=turns[modes[0]] if modes else None,
        compiled_best=timed.get(best),
        compiled_best_mode=best,
        eager_unstable=None if agrees is None else not agrees,
    )


def _with_result(row: Row, result: Result, seconds: Mapping[str, float]) -> Row:
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
        notes=(*row.notes, *result.notes),
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
