"""From which share of zeros on sparse weights pay: a picture of the rows that `experiments.sparse` wrote.

    python -m experiments.crossover benchmarks/results/h100_sparse.jsonl docs/crossover.svg

A line for each form of weights in a part for each number of rows: how many times as fast as PyTorch's dense product the
fastest configuration is, by the percentage that is kept. Deals in matplotlib, which the extra ``report`` brings.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.sparse import PAIRS
from qimeng.errors import QimengError

Points = Mapping[int, Mapping[str, list[tuple[int, float]]]]
"""Rows of activations to form to percentages with what they gain."""


def points_of(rows: Iterable[Mapping[str, Any]]) -> Points:
    """The points of each line, those with the least percentage first; of equal cases the last one counts."""
    found: dict[int, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        gain = row.get("over", {}).get("eager")
        drawn = row["form"] != PAIRS and not row.get("pattern") and row["depth"] == row["columns"]
        if gain and drawn:
            found[row["rows"]][row["form"]][row["percent"]] = gain
    return {n: {form: sorted(line.items()) for form, line in forms.items()} for n, forms in sorted(found.items())}


def draw(points: Points, title: str, path: Path) -> None:
    """Draw them.

    Raises:
        QimengError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise QimengError("pictures need matplotlib: pip install 'qimeng[report]'") from None
    if not points:
        raise QimengError("no row says how fast the dense product is")
    colors = {form: f"C{i}" for i, form in enumerate(sorted({f for forms in points.values() for f in forms}))}
    figure = Figure(figsize=(4 * len(points), 4), layout="constrained")
    for axes, (rows, forms) in zip(figure.subplots(1, len(points), squeeze=False)[0], points.items(), strict=True):
        for form, line in sorted(forms.items()):
            shares, gains = zip(*line, strict=True)
            axes.plot(shares, gains, marker="o", markersize=3, label=form, color=colors[form])
        axes.axhline(1.0, color="gray", linewidth=1, linestyle="dashed")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("% of blocks, or of elements, that are kept")
        axes.set_title(f"{rows} rows", fontsize="medium")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    figure.axes[0].set_ylabel("times as fast as PyTorch's dense product")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(
    source: Annotated[Path, typer.Argument(help="Rows of experiments.sparse.")],
    path: Annotated[Path, typer.Argument(help="Picture to write; its ending decides the format.")],
) -> None:
    """Draw the crossover by density."""
    rows = [json.loads(line) for line in source.read_text().splitlines() if line.strip()]
    cards = sorted({row["environment"]["device"] for row in rows if row.get("environment")})
    draw(points_of(rows), f"Linear layers of 4096 x 4096 in bf16, {', '.join(cards)}", path)


if __name__ == "__main__":
    typer.run(main)
