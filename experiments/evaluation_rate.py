"""How many evaluations a minute a search of a network makes, judged by region or as a whole.

``python -m experiments.evaluation_rate llama_layer --seconds 60 --how region whole``: one JSON row for each network and
way, on the GPU of this machine. The heuristic planner takes its own trajectory, so both ways try the same steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from statistics import median
from typing import Any

from experiments import networks
from qimeng.api import run_task
from qimeng.envs.steps.setup import make_task
from qimeng.envs.steps.state import Budget, Progress
from qimeng.planner import make_search


def measure(name: str, how: str, seconds: float, coder: str) -> dict[str, Any]:
    """One row.

    Args:
        name: function of `experiments.networks`.
        how: ``"region"`` or ``"whole"``.
        seconds: budget, capture and final verification included.
        coder: name of a coder.
    """
    began = time.monotonic()
    lengths: list[float] = []
    milestones: list[float] = []
    tried: list[float] = []

    def watch(progress: Progress) -> None:
        now = time.monotonic() - began
        print(f"{now:7.1f} s  {progress.phase:5}  {progress.text}", file=sys.stderr, flush=True)
        if progress.phase == "try":
            tried.append(now)
        elif tried:
            (milestones if progress.text.startswith("milestone") else lengths).append(now - tried.pop())

    task = make_task(getattr(networks, name)(), coder=coder, by_region=how == "region")
    ready = time.monotonic() - began
    try:
        search = make_search("greedy", "heuristic")
        result = run_task(task, search, Budget(seconds, 10_000, 10_000), began, on_step=watch)
    finally:
        task.evaluator.close()
    searched = sum(lengths) + sum(milestones)
    scopes = Counter(s.evaluation.scope.value for s in result.steps if s.evaluation is not None)
    return {
        "network": name,
        "how": how,
        "regions": len(task.start.called),
        "ready_s": round(ready, 1),
        "seconds": round(result.seconds, 1),
        "evaluations": result.evaluations,
        "steps": len(result.steps),
        "accepted": sum(s.accepted for s in result.steps),
        "scopes": dict(scopes),
        "tried": len(lengths),
        "seconds_a_try": round(median(lengths), 2) if lengths else None,
        "tries_a_minute": round(60 * len(lengths) / searched, 1) if searched else None,
        "milestones_s": [round(s, 1) for s in milestones],
        "parts_s": {part: round(s, 1) for part, s in sorted(task.evaluator.report.seconds.items())},
        "stopped": result.stopped,
        "ok": result.evaluation.ok,
        "speedup": result.speedup,
        "failures": dict(Counter(s.evaluation.failure for s in result.steps if s.evaluation and not s.accepted)),
        "notes": list(result.notes),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+", help="functions of experiments.networks")
    parser.add_argument("--seconds", type=float, default=60.0, help="budget of each run")
    parser.add_argument("--how", nargs="+", choices=("region", "whole"), default=("region", "whole"))
    parser.add_argument("--coder", default="template")
    options = parser.parse_args()
    for name in options.networks:
        for how in options.how:
            print(json.dumps(measure(name, how, options.seconds, options.coder)), flush=True)


if __name__ == "__main__":
    main()
