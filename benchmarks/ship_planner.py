"""Put a trained planner into the package as the one that comes with it: half precision, a card with measured figures.

    python benchmarks/ship_planner.py runs/planner --replays benchmarks/results/planners.jsonl --label RL

FOLDER is what `qimeng train` wrote. The card takes data, device, reward and figures from its report.json, and from the
replays on held-out trees those of the method called LABEL, alone and with each search.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from experiments.planners.replay import read_replays
from experiments.planners.summary import SHARE, MethodFigures, summarize
from qimeng.planner.lm.planner import SHIPPED
from qimeng.planner.lm.run import Report
from qimeng.planner.lm.weights import Card, load, save

LARGEST = 12 * 2**20
"""Bytes that the package may grow by."""


def told(figures: MethodFigures) -> str:
    """One method's figures in words."""
    shares = ", ".join(f"{100 * f.value:.0f} % after {n}" for n, f in figures.shares.items())
    there = f"{100 * SHARE:.0f} % after {figures.needed.value:.0f} evaluations (median)"
    kind = "estimated" if figures.estimated else "measured"
    return f"{shares}; {there}; of the best-known log-gain, {figures.device}, {kind} times"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replays", type=Path, help="rows of replays on held-out trees")
    parser.add_argument("--label", default="RL")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args()

    report = Report(**json.loads((args.folder / "report.json").read_text()))
    figures = report.figures()
    for one in summarize(read_replays(args.replays)) if args.replays else ():
        if one.method.label.split(", ")[0] == args.label:
            search = "by itself" if one.method.search == "greedy" else one.method.search
            figures[f"{search}, {one.specs} held-out specs"] = told(one)
    shutil.rmtree(args.out, ignore_errors=True)
    save(load(args.folder), args.out, Card(report.data, report.times, report.reward, figures), half=True)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out}: {size / 2**20:.1f} MiB")
    if size > LARGEST:
        raise SystemExit(f"the weights take more than {LARGEST / 2**20:.0f} MiB: train a smaller model")


if __name__ == "__main__":
    main()
