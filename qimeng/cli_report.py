"""The commands `qimeng report` and `qimeng replay`: what is shown of a stored result, and making it again.

Deals in arguments and printing. Knows nothing about pages or judges.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from qimeng.cli_names import Activations, Weights
from qimeng.errors import QimengError


def report(
    source: Annotated[Path, typer.Argument(help="Folder of a result, or a file of a benchmark's rows.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: report.html in the folder, or FILE.html.")
    ] = None,
) -> None:
    """Write a report of a result or a benchmark as one HTML file that needs nothing else."""
    from qimeng.report import report as made

    path = out or (source.with_suffix(".html") if source.is_file() else source / "report.html")
    text = made(source)
    path.write_text(text)
    print(f"written: {path}")


def replay(
    folder: Annotated[Path, typer.Argument(help="Folder of a result, or its recipe.json.")],
    file: Annotated[Path, typer.Argument(help="The file that was optimized.")],
    device: Annotated[str, typer.Option(help="Name of a device. Default: this machine's GPU, else the result's.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16: what the result was made for.")] = "float32",
    weights: Weights = "",
    activations: Activations = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a stored result again from its recipe, without a coder; verify and time it."""
    from qimeng.device import current_device
    from qimeng.envs.steps.again import made_again
    from qimeng.envs.steps.result import Result
    from qimeng.envs.steps.setup import make_task
    from qimeng.interfaces import FinalOptions
    from qimeng.spec import KernelSpec

    result = Result.load(folder.parent if folder.name == "recipe.json" else folder)
    named = device or (None if current_device() else result.device)
    spec = KernelSpec.from_file(file, dtype=dtype, mode=result.mode, weights=weights, activations=activations)
    task = make_task(spec, device=named)
    try:
        again = made_again(result, replace(task, options=FinalOptions()))
    finally:
        task.evaluator.close()
    e = again.evaluation
    outcome = "right" if e.ok and not e.unchecked else f"UNCHECKED: {e.unchecked}" if e.ok else f"refused: {e.error}"
    found = {
        "program": "the same" if again.same else "the same steps, printed otherwise by this version",
        "verification": outcome,
        "device": task.context.device.name,
        "ms": e.ms,
        "ms_before": again.before_ms,
        "device_before": result.device,
        "speedup": e.speedup,
        "estimated": task.estimated,
    }
    if as_json:
        print(json.dumps(found))
    else:
        word = " (estimated)" if task.estimated else ""
        print(f"program: {found['program']}")
        print(f"verification: {outcome}")
        print(f"time: {_ms(e.ms)} on {found['device']}{word}; stored: {_ms(again.before_ms)} on {result.device}")
    if not e.ok:
        raise QimengError("the program that the recipe makes is not right here")


def _ms(ms: float | None) -> str:
    return "not timed" if ms is None else f"{ms:.4g} ms"


__all__ = ["replay", "report"]
