"""Reports as one HTML file each, without anything from elsewhere.

Deals in templates. What candidates and models wrote is shown as text, never as part of the page. Knows nothing about
how anything was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qimeng.bench.row import Row, read_rows
from qimeng.envs.steps.result import Result
from qimeng.errors import QimengError
from qimeng.report import plots, runs, story
from qimeng.report.meanings import meanings

if TYPE_CHECKING:
    from jinja2 import Environment

PAGES = Path(__file__).parent / "pages"


def report(source: Path) -> str:
    """The report of a result's folder, or of a file of a benchmark's rows, as HTML.

    Raises:
        QimengError: it is neither, or a package is missing; the message says which.
    """
    return run_page(read_rows(source), source) if source.is_file() else result_page(Result.load(source), source)


def result_page(result: Result, folder: Path) -> str:
    """The report of one result.

    Args:
        result: which.
        folder: where it lies, for the commands that make it again.
    """
    chapters = story.chapters(result)
    before, after = story.kernels(result)
    drawn = {
        "tree": plots.tree_plot(_edges(result, chapters)) if len(chapters) > 1 else "",
        "kernels": plots.kernels_plot(before, after) if before and after else "",
        "roofline": plots.roofline_plot(result.roofline, _points(result, chapters)) if result.roofline else "",
    }
    facts = story.facts(result)
    text: str = _template("result.html").render(
        title=result.name,
        result=result,
        chapters=chapters,
        kept=[c for c in chapters if c.state == "kept"],
        facts=facts,
        meanings=meanings(label for label, _ in facts),
        notes=(*result.notes, *result.evaluation.notes),
        kernels={"before": before, "after": after},
        commands=story.commands(result, folder),
        gates=story.GATES,
        drawn=drawn,
    )
    return text


def run_page(rows: Sequence[Row], file: Path) -> str:
    """The report of a benchmark's rows.

    Raises:
        QimengError: there are no rows.
    """
    if not rows:
        raise QimengError(f"{file} holds no rows: name a folder of a result, or a file that `qimeng bench` wrote")
    found = runs.lines(rows)
    speedups = {"over PyTorch eager": [line.speedup or 0.0 if line.right else 0.0 for line in found]}
    compared = [line for line in found if line.over_compile is not None]
    if compared:
        speedups["over torch.compile"] = [line.over_compile or 0.0 if line.right else 0.0 for line in compared]
    text: str = _template("run.html").render(
        title=file.name,
        lines=found,
        flagged=[line for line in found if line.flags],
        families=runs.families(found),
        settings=runs.settings(rows),
        environments=runs.environments(rows),
        drawn={"curves": plots.curves_plot(speedups, "times faster")},
    )
    return text


def _points(result: Result, chapters: Sequence[story.Chapter]) -> list[tuple[str, float, str]]:
    found = [(c.text, c.ms, c.state) for c in chapters if c.ms is not None and c.state in ("kept", "right")]
    bases = [result.evaluation.eager, *result.evaluation.compiled.values()]
    return [*found, *(("PyTorch", timing.device_ms, "base") for timing in bases if timing is not None)]


def _edges(result: Result, chapters: Sequence[story.Chapter]) -> list[tuple[str, str, str]]:
    return [
        (step.parent or "start", step.child or f"refused {c.number}", c.state)
        for step, c in zip(result.steps, chapters, strict=True)
        if step.action.kind != "stop"
    ]


def _template(name: str) -> Any:
    return _environment().get_template(name)


def _environment() -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise QimengError("reports need jinja2: pip install 'qimeng[report]'") from None
    made = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.globals |= {"style": (PAGES / "style.css").read_text(), "script": (PAGES / "sort.js").read_text()}
    made.filters["figure"] = lambda x: "–" if x is None else f"{x:.4g}"
    made.filters["times"] = lambda x: "–" if x is None else f"{x:.2f}\u00a0×"
    return made


__all__ = ["report", "result_page", "run_page"]
