"""Put a trained planner into the package as the one that comes with it: half precision, a card with measured figures.

The card takes data, device, reward and figures from the run's report.json, and from the replays on held-out trees those
of one method, alone and with each search.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from experiments.planners.replay import read_replays
from experiments.planners.summary import SHARE, MethodFigures, summarize
from qimeng.errors import QimengError
from qimeng.planner.lm.planner import SHIPPED
from qimeng.planner.lm.run import Report
from qimeng.planner.lm.weights import Card, load, save

LARGEST = 12 * 2**20
"""Bytes that the package may grow by."""


def in_words(figures: MethodFigures) -> str:
    """One method's figures in words."""
    shares = ", ".join(f"{100 * f.value:.0f} % after {n}" for n, f in figures.shares.items())
    there = f"{100 * SHARE:.0f} % after {figures.needed.value:.0f} evaluations (median)"
    kind = "estimated" if figures.estimated else "measured"
    return f"{shares}; {there}; of the best-known log-gain, {figures.device}, {kind} times"


def ship(folder: Path, replays: Path | None = None, label: str = "RL", out: Path = SHIPPED) -> None:
    """Write weights and card.

    Args:
        folder: what `qimeng train` wrote.
        replays: rows of replays on held-out trees.
        label: the method's name in them.
        out: where to.

    Raises:
        QimengError: the weights are larger than the package may grow by.
    """
    report = Report(**json.loads((folder / "report.json").read_text()))
    figures = report.figures()
    for one in summarize(read_replays(replays)) if replays else ():
        if one.method.label.split(", ")[0] == label:
            search = "by itself" if one.method.search == "greedy" else one.method.search
            figures[f"{search}, {one.specs} held-out specs"] = in_words(one)
    shutil.rmtree(out, ignore_errors=True)
    save(load(folder), out, Card(report.data, report.times, report.reward, figures), half=True)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size / 2**20:.1f} MiB")
    if size > LARGEST:
        raise QimengError(f"the weights take more than {LARGEST / 2**20:.0f} MiB: train a smaller model")


__all__ = ["ship", "in_words"]
