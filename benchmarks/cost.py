"""What single parts of the library cost: a capture, a decision of the planner, training a large planner.

    python -m benchmarks.cost capture runs/capture.jsonl --root KernelBench
    python -m benchmarks.cost decision
    python -m benchmarks.cost large-planner runs/large.json

What an evaluation costs says `python -m benchmarks.judge cost`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qimeng.errors import QimengError

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def capture(
    out: Annotated[Path, typer.Argument(help="File of rows.")],
    specs: Annotated[int, typer.Option(help="Drawn specs.")] = 100,
    root: Annotated[Path | None, typer.Option(help="A local checkout of KernelBench.")] = None,
) -> None:
    """Time captures, beside torch.export's public decomposition, on a CPU."""
    from experiments.capture_time import capture_time

    capture_time(out, specs, root)


@app.command()
def decision() -> None:
    """Time a decision of the small planner on two CPU cores."""
    from experiments.planners.latency import latency

    latency()


@app.command()
def large_planner(
    out: Annotated[Path, typer.Argument(help="JSON file of the figures.")],
    size: Annotated[str, typer.Option(help="1.5B, or toy.")] = "1.5B",
    trees: Annotated[int, typer.Option(help="Of benchmarks/trees/h200.xz.")] = 8,
    choices: Annotated[int, typer.Option(help="Imitated.")] = 96,
    steps: Annotated[int, typer.Option(help="Of PPO, a multiple of 128.")] = 256,
    rank: Annotated[int, typer.Option(help="Of the adapter.")] = 16,
) -> None:
    """Time decisions, imitation and PPO of a planner with 1.5 billion parameters (random weights)."""
    from experiments.planners.large import large

    large(out, size, trees, choices, steps, rank)


if __name__ == "__main__":
    try:
        app()
    except QimengError as error:
        raise SystemExit(f"cost: {error}") from None
