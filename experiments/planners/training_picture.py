"""Learning curves of training runs as a picture.

Deals in matplotlib, which the extra ``report`` brings, and in what runs report. Knows nothing about training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qimeng.bench.row import whole_lines
from qimeng.errors import QimengError

CURVES = {
    "reward": "mean return of the last 100 episodes, over the run's first",
    "score": "validation: mean share over the first evaluations",
    "greedy": "validation: share of the policy's own trajectory",
}
"""What is drawn of a run's rows (`qimeng.planner.lm.training.train`), and what each is called."""


def read_runs(path: Path | str) -> list[dict[str, Any]]:
    """The reports in a file of JSON lines, each with its run's name under ``run``.

    Raises:
        QimengError: a line is none.
    """
    try:
        return [json.loads(line) for line in whole_lines(Path(path))]
    except ValueError as error:
        raise QimengError(f"{path} holds no reports of training runs: {error}") from None


def draw_training(runs: Sequence[Mapping[str, Any]], path: Path | str, only: Sequence[str] = ()) -> None:
    """Draw returns, and validations where there are any, over the steps of PPO, one line a run.

    Returns of different rewards have different units: each is drawn over its run's first one.

    Args:
        runs: reports (`qimeng.planner.lm.run.Report`) with the names of their runs, all on times of one kind.
        path: file to write; its ending decides the format (``.svg``, ``.png``).
        only: names of the runs to draw; all by default.

    Raises:
        QimengError: matplotlib is not installed, or no run trained by PPO.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise QimengError("pictures need matplotlib: pip install 'qimeng[report]'") from None
    shown = [run for run in runs if run["curve"] and (not only or run["run"] in only)]
    if len({run["times"] for run in shown}) != 1:
        raise QimengError("a picture takes runs that were trained by PPO, all on times of one kind")
    drawn = {key: label for key, label in CURVES.items() if any(key in row for run in shown for row in run["curve"])}
    figure = Figure(figsize=(4 + 4 * len(drawn), 4), layout="constrained")  # the legend beside them
    for axes, (key, label) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        for run in shown:
            rows = [row for row in run["curve"] if key in row]
            scale = abs(rows[0][key]) or 1.0 if key == "reward" and rows else 1.0
            axes.plot([r["steps"] for r in rows], [r[key] / scale for r in rows], label=run["run"], marker=".")
        axes.set_xlabel("steps in environments")
        axes.set_title(label, fontsize="small")
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    figure.suptitle(f"PPO on stored trees after imitation; {shown[0]['times']}", fontsize="medium")
    figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


__all__ = ["CURVES", "draw_training", "read_runs"]
