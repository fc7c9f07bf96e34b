"""The same loops in Triton and in CUDA C++, side by side: are both right, and how long does each take.

Each problem becomes one region; the template coder lowers it, writes it in CUDA C++ by the action `language`, and tries
other numbers of warps in each. Nothing else is tuned: the figures compare printers, not the best that either reaches.
Without a GPU both are compiled for a named device, times are the analytic model's, and CUDA C++ stays unchecked: what
counts there is that everything compiles, with its registers and spills.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qimeng.actions import kind_named
from qimeng.bench.environment import environment
from qimeng.bench.kernelbench import load_levels
from qimeng.bench.row import append_line
from qimeng.bench.suite import Problem
from qimeng.coder.template.coder import TemplateCoder
from qimeng.envs.steps.setup import make_task
from qimeng.envs.steps.task import Task
from qimeng.errors import IllegalAction, QimengError
from qimeng.graph.region import merge
from qimeng.interfaces import LASTING, Action, Asked, Evaluation, Patch, Request
from qimeng.program.program import Program

LANGUAGES = ("triton", "cuda")
SOME = "1/19-40,47-49,51-53,88,94,96,98,100"
"""Pointwise operators, reductions, normalizations and losses of KernelBench's first level."""


@dataclass(frozen=True)
class LanguageRow:
    """One problem in one language.

    Attributes:
        problem: its id.
        name: its label.
        language: ``"triton"`` or ``"cuda"``.
        right: whether it passed every gate; None where no kernel could be written, or nothing could judge it.
        error: why it did not, or why there is no kernel.
        failure: class of that; see `Evaluation.failure`.
        unchecked: why nothing held its results against the reference; empty where they were.
        ms: device milliseconds; the model's where `estimated`.
        eager_ms: PyTorch's.
        estimated: whether times are the model's.
        schedule: what it was printed from.
        kernels: how many kernels it has.
        registers: of the largest, a thread.
        spills: bytes of spilled registers a thread.
        shared_bytes: bytes of shared memory a block.
        max_error: largest error, and what was allowed.
        max_budget: that.
        notes: what else was said.
        seconds: wall seconds.
    """

    problem: str
    name: str
    language: str
    right: bool | None = None
    error: str | None = None
    failure: str | None = None
    unchecked: str = ""
    ms: float | None = None
    eager_ms: float | None = None
    estimated: bool = False
    schedule: str = ""
    kernels: int = 0
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    max_error: float | None = None
    max_budget: float | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def side_by_side(
    out: Path, root: Path, selection: str = SOME, device: str | None = None, dtype: str = "float32", final: bool = True
) -> list[dict[str, Any]]:
    """Write two rows for each problem to `out`; problems that it has are left out.

    Args:
        out: file of rows, one line of JSON each.
        root: a local checkout of KernelBench.
        selection: numbers of problems, ``"1/19-40,88"``.
        device: what to compile for where there is no GPU; the H200 by default.
        dtype: of the problems.
        final: whether the kernels kept are verified once more as a result would be, on every distribution.

    Returns:
        Every row in `out`.
    """
    done = {(r["problem"], r["dtype"]) for r in read_languages(out)}
    for problem in load_levels(root, "1,2", selection):
        if (problem.id, dtype) in done:
            continue
        for row in measured(problem, device, dtype, final):
            append_line(out, json.dumps(row))
    return read_languages(out)


def measured(problem: Problem, device: str | None, dtype: str, final: bool) -> Iterator[dict[str, Any]]:
    """The rows of one problem as plain data."""
    task = None
    try:
        task = make_task(problem.spec(dtype), coder=TemplateCoder(LANGUAGES), device=device)
        found = [*_compared(task, problem, final)]
    except (QimengError, ValueError) as error:
        found = [LanguageRow(problem.id, problem.name, n, error=f"{type(error).__name__}: {error}") for n in LANGUAGES]
    finally:
        if task is not None:
            task.evaluator.close()
    where = asdict(environment(task.context.device)) if task is not None else {}
    for row in found:
        yield {**asdict(row), "dtype": dtype, "environment": where}


def _compared(task: Task, problem: Problem, final: bool) -> Iterator[LanguageRow]:
    program = task.start
    if len(program.regions) > 1:
        program = program.with_regions(merge(program.regions, [r.id for r in program.regions]))
    region = program.regions[0]
    if reason := task.context.coder.can_implement(region):
        raise IllegalAction(reason)
    for language in LANGUAGES:
        began = time.monotonic()
        try:
            program, evaluation = _best(task, program, region.id, language)
        except QimengError as error:
            yield LanguageRow(problem.id, problem.name, language, error=f"{type(error).__name__}: {error}")
            continue
        if evaluation.ok and final:
            evaluation = replace(task.evaluator.evaluate(program, asked=Asked.FINAL), resources=evaluation.resources)
        row = _row(problem, language, evaluation, str(program.schedule(region) or ""))
        yield replace(row, seconds=round(time.monotonic() - began, 2))


def _best(task: Task, program: Program, region: str, language: str) -> tuple[Program, Evaluation]:
    """The program with `region` in `language`, under the fastest schedule that was tried."""
    kind, param = ("lowering", "") if language == "triton" else ("language", language)
    program, evaluation = _step(task, program, Action(kind, (region,), param), language)
    if evaluation.ok:
        tuned, again = _step(task, program, Action("pipeline", (region,), "warps"), language)
        if again.ok and (again.ms or 0.0) < (evaluation.ms or 0.0):
            return tuned, again
    return program, evaluation


def _step(task: Task, program: Program, action: Action, language: str) -> tuple[Program, Evaluation]:
    """The program after `action` with the fastest alternative in `language`, and what the judge says of it."""
    context = task.context
    kind_named(action.kind).check(program, action, context)
    patch = context.coder.write(Request(program, action, context.device, context.mode))
    patch = replace(patch, alternatives=tuple(i for i in patch.alternatives if i.language == language))
    return _judged(task, program, patch)


def _judged(task: Task, program: Program, patch: Patch) -> tuple[Program, Evaluation]:
    evaluation = task.evaluator.evaluate(program, patch)
    return patch.apply(program, evaluation.chosen), evaluation


def _row(problem: Problem, language: str, found: Evaluation, schedule: str) -> LanguageRow:
    unknown = found.unchecked if found.ok else found.failure not in LASTING
    right = None if unknown else found.ok
    row = LanguageRow(problem.id, problem.name, language, right, found.error, found.failure, found.unchecked)
    row = replace(row, schedule=schedule, notes=found.notes)
    if found.timing is not None:
        row = replace(row, ms=found.ms, estimated=found.timing.estimated)
    if found.eager is not None:
        row = replace(row, eager_ms=found.eager.device_ms)
    if found.resources is not None:
        r = found.resources
        row = replace(row, kernels=r.kernels, registers=r.registers, spills=r.spills, shared_bytes=r.shared_bytes)
    if found.accuracy is not None:
        row = replace(row, max_error=found.accuracy.max_error, max_budget=found.accuracy.max_budget)
    return row


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as a Markdown table: a line a problem, both languages beside eager."""
    by_problem: dict[str, dict[str, dict[str, Any]]] = {}
    places = dict[str, None]()
    for row in rows:
        if where := row.get("environment"):
            places[f"{where['device']}, commit {where['commit'][:12]}"] = None
        by_problem.setdefault(row["problem"], {})[row["language"]] = row
    lines = [
        "; ".join(places),
        "",
        "| problem | Triton | ms | CUDA C++ | ms | Triton / CUDA C++ | eager ms | registers | spills |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for problem, found in by_problem.items():
        triton, cuda = found.get("triton", {}), found.get("cuda", {})
        times = [r.get("ms") for r in (triton, cuda)]
        ratio = f"{times[0] / times[1]:.2f}" if times[0] and times[1] else ""
        shown = [f"{problem} {triton.get('name') or cuda.get('name', '')}", _verdict(triton), _number(times[0])]
        shown += [_verdict(cuda), _number(times[1]), ratio, _number(cuda.get("eager_ms") or triton.get("eager_ms"))]
        shown += [
            f"{triton.get('registers')}, {cuda.get('registers')}",
            f"{triton.get('spills')}, {cuda.get('spills')}",
        ]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def _verdict(row: dict[str, Any]) -> str:
    if row.get("unchecked"):
        return "unchecked"
    if not row.get("right"):
        return f"{row.get('failure') or 'no kernel'}: {(row.get('error') or 'not tried').splitlines()[0][:60]}"
    return "right"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def read_languages(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


LANGUAGE_TABLES: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {"languages": table}

__all__ = ["LANGUAGE_TABLES", "SOME", "LanguageRow", "measured", "read_languages", "side_by_side", "table"]
