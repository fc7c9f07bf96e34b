"""One problem, measured: optimize it, time the baselines beside it, and make its row.

Deals in turning a result into a row. Knows nothing about other problems, files of rows or figures. Runs in a worker
process of the harness, or wherever it is called.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from qimeng.api import run_task
from qimeng.bench.environment import environment
from qimeng.bench.families import classify
from qimeng.bench.row import Row, Settings, StepRow, blank_row
from qimeng.bench.suite import Problem
from qimeng.bench.survey import Facts, survey
from qimeng.envs.cost.roofline import floor_ms, product_flops
from qimeng.envs.judge.torch_compile import compile_server
from qimeng.envs.steps.result import Result
from qimeng.envs.steps.setup import make_device, make_task
from qimeng.envs.steps.state import Attempt, Budget
from qimeng.envs.steps.task import Task
from qimeng.envs.workers.shared_server import shared_server
from qimeng.errors import QimengError
from qimeng.interfaces import Coder, Evaluation, Evaluator, Step
from qimeng.planner import make_search
from qimeng.spec.patience import within
from qimeng.store import Store

FINAL_S = 4.0
"""Seconds of a problem's budget kept for what the final verification takes longer than a search expects: a cold
compiler cache, a fresh process."""

RESERVE_S = 10.0
"""Seconds before the end of a problem's wall-clock time at which its search and verification have to be over: to start
a process anew, end those of the judge and send the row."""


def prepare(problem: Problem, dtype: str = "float32", modes: int = 0) -> Facts:
    """What `survey` says of `problem`, in a process that will measure on a GPU.

    The servers that `measure` needs load in the meantime, so the first problem takes no longer than others.
    """
    import torch

    shared_server()
    if modes:
        compile_server()
    torch.ones(1, device="cuda").add_(1)
    return survey(problem, dtype, modes, torch.cuda.get_device_properties(0).total_memory)


def measure(
    problem: Problem,
    settings: Settings,
    device: str | None = None,
    coder: Coder | None = None,
    answers: Path | None = None,
    limit_s: float = math.inf,
) -> Row:
    """Optimize one problem and return its row; a failure of the library or of the problem is a row with the error.

    Args:
        problem: what to optimize.
        settings: how.
        device: name of a device to estimate for, where there is no GPU.
        coder: the coder, if its name in `settings` is not enough. Its budget is for this problem.
        answers: store of a model's answers, so that none is paid for twice. Evaluations are always new, and no problem
            sees patches of others.
        limit_s: wall-clock seconds after which the problem is given up, waiting included; all is over `RESERVE_S`
            before, with what is verified by then.

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
        store = Store(answers) if answers is not None else None
        with within(settings.seconds):
            spec = problem.spec(settings.dtype, settings.mode)
            compiled = (settings.compile_modes, settings.compile_seconds)
            task = make_task(spec, coder=coder or settings.coder, device=target, compiled=compiled)
    except QimengError as error:
        return _timed(replace(row, error=f"{type(error).__name__}: {error}"), began)
    try:
        if store is not None and task.context.coder.memory is not None:
            task.context.coder.memory.use_store(store, spec.digest)
        row = _with_graph(row, task)
        judge = task.evaluator
        capture = time.monotonic() - began - sum(judge.report.seconds.values())
        budget = Budget(
            max(settings.seconds - FINAL_S, settings.seconds / 2),
            settings.evaluations or Budget.evaluations,
            wall_seconds=limit_s - RESERVE_S,
        )
        with within(settings.seconds):
            result = run_task(task, search, budget, began, compiled, waited=_waited(judge))
        wall = time.monotonic() - began
        seconds = split(wall, capture, judge.report.seconds or seconds_of(result))
        row = replace(_with_result(row, result), seconds=seconds)
        known = judge.report.reference
        if known is not None:
            row = replace(
                row,
                degenerate=known.degenerate,
                eager_unstable=_denied(known.eager_agrees),
                exact_fails=_denied(known.exact_agrees),
            )
    except QimengError as error:
        row = replace(row, error=f"{type(error).__name__}: {error}")
    finally:
        task.evaluator.close()
        if store is not None:
            store.close()
    return _timed(row, began)


def _waited(judge: Evaluator) -> Callable[[], float]:
    """Tells how long others have held the GPU, which does not count, so that sharing it does not change the results."""
    return lambda: judge.report.seconds.get("wait", 0.0)


def _denied(agrees: bool | None) -> bool | None:
    return None if agrees is None else not agrees


def _with_graph(row: Row, task: Task) -> Row:
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
        floor_ms=floor_ms(graph, task.context.device, task.context.mode),
    )


def _with_result(row: Row, result: Result) -> Row:
    final = result.evaluation
    accuracy, compiled = final.accuracy, final.compiled
    best = min(compiled, key=lambda mode: compiled[mode].device_ms, default="")
    first = next(iter(row.settings.compile_modes), "")
    return replace(
        row,
        right=final.ok if not result.unchecked or not final.ok else None,
        error=None if final.ok else f"gate {final.gate.value}: {final.error}",
        kernelbench=accuracy.kernelbench if accuracy else None,
        reference=accuracy.reference if accuracy else "",
        candidate=final.timing,
        eager=final.eager,
        compiled=compiled.get(first),
        compiled_modes=compiled,
        compiled_wrong=final.compiled_wrong,
        compiled_best=compiled.get(best),
        compiled_best_mode=best,
        generated_share=final.generated_share,
        library_share=final.library_share,
        launch=result.program.launch if result.program else "",
        peak_bytes=final.peak_bytes,
        eager_peak_bytes=final.eager_peak_bytes,
        prepare_ms=final.prepare_ms,
        evaluations=result.evaluations,
        configurations=sum(e.configurations for e in evaluations_of(result)),
        steps=step_rows(result.steps),
        recipe=result.recipe.to_json(),
        source_digest=result.program.digest if result.program else "",
        notes=(*row.notes, *result.notes, *final.notes),
    )


def step_rows(steps: Iterable[Step]) -> tuple[StepRow, ...]:
    """What was tried, in order, with the gain of each accepted step over the program it was applied to."""
    rows = []
    for step in steps:
        found = step.evaluation
        rows.append(
            StepRow(
                kind=step.action.kind,
                param=step.action.param,
                accepted=step.accepted,
                gate=found.gate.value if found else "",
                gain=step.gain if isinstance(step, Attempt) else None,
                configurations=found.configurations if found else 0,
                refused=_refused(found),
            )
        )
    return tuple(rows)


def _refused(found: Evaluation | None) -> tuple[str, ...]:
    if found is None:
        return ()
    return (*found.refused, found.error) if found.error else found.refused


def evaluations_of(result: Result) -> list[Evaluation]:
    """Everything that was judged on the way to `result`."""
    return [result.start, *(s.evaluation for s in result.steps if s.evaluation is not None), result.evaluation]


def seconds_of(result: Result) -> dict[str, float]:
    """Wall seconds by part, summed over the evaluations of `result`, for judges that do not sum them up themselves."""
    total: dict[str, float] = {}
    for evaluation in evaluations_of(result):
        for part, seconds in evaluation.seconds.items():
            total[part] = total.get(part, 0.0) + seconds
    return total


def split(wall: float, capture: float, judged: Mapping[str, float]) -> dict[str, float]:
    """How the seconds of a problem split (see `Row.seconds`).

    Args:
        wall: seconds from the file to the verified result.
        capture: those until the judge was made.
        judged: those of the judge, by part.

    >>> split(10.0, 2.0, {"check": 3.0, "baselines": 1.0})
    {'capture': 2.0, 'check': 3.0, 'baselines': 1.0, 'rest': 4.0, 'optimize': 9.0}
    """
    parts = {"capture": capture, **judged}
    parts["rest"] = wall - sum(parts.values())
    parts["optimize"] = wall - judged.get("baselines", 0.0)
    return {part: round(seconds, 3) for part, seconds in parts.items()}


def _timed(row: Row, began: float) -> Row:
    return replace(row, seconds={**row.seconds, "total": round(time.monotonic() - began, 3)})


__all__ = ["evaluations_of", "measure", "prepare", "seconds_of", "split", "step_rows"]
