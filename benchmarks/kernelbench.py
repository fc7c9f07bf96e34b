"""The runs whose rows lie in benchmarks/results, and the tables of all documents.

    python -m benchmarks.kernelbench run KERNELBENCH OUT --seconds 3600 --only default,high
    python -m benchmarks.kernelbench languages KERNELBENCH runs/languages.jsonl
    python -m benchmarks.kernelbench tables README.md benchmarks/*.md docs/training.md

A run is a call of `qimeng bench kernelbench`; it goes on where it ended when it is started again with the same OUT.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from qimeng.errors import QimengError

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

SOME = "1/1,4,8,12,17,23,26,36,40,47,95;2/12,28,37,45,59,64,75,88,99"
"""Twenty problems of each family, small and large."""

RUNS: dict[str, tuple[str, ...]] = {
    "default": ("--families", "pointwise,reduction,gemm"),
    "high": ("--families", "gemm", "--mode", "high"),
    "bf16": ("--problems", SOME, "--dtype", "bfloat16"),
    "modes": ("--problems", SOME, "--compile-modes", "default,reduce-overhead,max-autotune-no-cudagraphs"),
    "heuristic": ("--problems", SOME, "--planner", "heuristic", "--no-compile-baseline"),
    "lower-only": ("--problems", SOME, "--planner", "lower-only", "--no-compile-baseline"),
    "sweep": ("--problems", SOME, "--planner", "sweep", "--no-compile-baseline"),
    "random": ("--problems", SOME, "--planner", "random", "--no-compile-baseline"),
}
"""Levels 1 and 2 where the template coder has a family, in two modes; 20 problems otherwise: bf16, torch.compile's
other modes, and the planner beside simpler ones."""

OVERHEAD_S = 40


@app.command()
def run(
    root: Annotated[Path, typer.Argument(help="A local checkout of KernelBench.")],
    out: Annotated[Path, typer.Argument(help="Folder of the files of rows, NAME.jsonl each.")],
    seconds: Annotated[float, typer.Option(help="Of all runs together; a run is left out where none is left.")] = 3600,
    only: Annotated[str, typer.Option(help=f"Of {', '.join(RUNS)}, by commas; all by default.")] = "",
) -> None:
    """Make the rows."""
    end, names = time.monotonic() + seconds, [name for name in only.split(",") if name] or list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        raise SystemExit(f"no run called {unknown[0]!r}; known: {', '.join(RUNS)}")
    for name in names:
        left = int(end - time.monotonic())
        if left <= OVERHEAD_S:
            break
        command = ["kernelbench", "--root", root, "--level", "1,2", "--seconds-each", 35, "--total-seconds", left]
        command += ["--overhead-seconds", OVERHEAD_S, "--jobs", 3, "--out", out / f"{name}.jsonl", *RUNS[name]]
        subprocess.run([sys.executable, "-m", "qimeng.cli", "bench", *map(str, command)], check=True)


@app.command()
def languages(
    root: Annotated[Path, typer.Argument(help="A local checkout of KernelBench.")],
    out: Annotated[Path, typer.Argument(help="File of rows.")],
    problems: Annotated[str, typer.Option(help="Numbers, such as 1/19-40,88; 33 problems by default.")] = "",
    device: Annotated[str, typer.Option(help="To compile for where there is no GPU.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the problems.")] = "float32",
    final: Annotated[bool, typer.Option(help="Verify what is kept once more, on every distribution.")] = True,
) -> None:
    """Write problems in Triton and in CUDA C++: are both right, and how long does each take."""
    from experiments.languages import SOME, side_by_side, table

    print(table(side_by_side(out, root, problems or SOME, device or None, dtype, final)))


@app.command()
def tables(
    documents: Annotated[list[Path], typer.Argument(help="Markdown files with bench markers.")],
    root: Annotated[Path, typer.Option(help="Folder that the markers' paths start from.")] = Path(),
) -> None:
    """Make the tables in documents anew from the rows that their markers name, those of experiments as well."""
    from experiments.tables import render
    from qimeng.bench.tables import render_documents

    for document, written in render_documents(documents, root, render):
        print(f"{document}: {'written' if written else 'unchanged'}")


if __name__ == "__main__":
    try:
        app()
    except QimengError as error:
        raise SystemExit(f"kernelbench: {error}") from None
