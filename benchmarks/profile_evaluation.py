"""Where the seconds of an evaluation go, below the parts that `Evaluation.seconds` tells.

Judges the start program of FILE, then what the heuristic planner chooses, and prints for each
evaluation its parts, the judge's waits by worker command, and the judge's own functions that took longest.

    python benchmarks/profile_evaluation.py FILE [STEPS] > profile.txt
"""

from __future__ import annotations

import cProfile
import io
import pstats
import sys
import time
from collections import defaultdict
from typing import Any

from qimeng.envs.forkserver import Process
from qimeng.envs.session import Budget, Session
from qimeng.envs.setup import make_task
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.spec import KernelSpec

TOP = 25


class Waits:
    """Wall seconds and calls by command, over all processes that the judge talks to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        plain = Process.call

        def timed(process: Process, command: str, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(process, command, *args, **options)
            finally:
                self.seconds[command] += time.perf_counter() - began
                self.calls[command] += 1

        Process.call = timed  # type: ignore[method-assign]

    def take(self) -> str:
        """What was noted since the last time, longest first, as text."""
        order = sorted(self.seconds, key=lambda name: -self.seconds[name])
        text = ", ".join(f"{name} {self.seconds[name]:.2f} s ({self.calls[name]})" for name in order)
        self.seconds.clear()
        self.calls.clear()
        return text


def main(file: str, steps: int = 6) -> None:
    """Profile the first evaluation, then those of `steps` steps and the final verification."""
    waits = Waits()
    task = make_task(KernelSpec.from_file(file))
    session, planner = Session(task, Budget(seconds=600)), HeuristicPlanner()

    def profiled(label: str, work: Any) -> Any:
        profile, began = cProfile.Profile(), time.perf_counter()
        result = profile.runcall(work)
        print(f"== {label}: {time.perf_counter() - began:.2f} s\n   waits: {waits.take()}")
        out = io.StringIO()
        pstats.Stats(profile, stream=out).sort_stats("cumulative").print_stats(TOP)
        print("\n".join(line for line in out.getvalue().splitlines()[8:] if line.strip()), flush=True)
        return result

    try:
        print({k: round(v, 2) for k, v in profiled("start program", session.begin).seconds.items()})
        for _ in range(steps):
            if session.exhausted():
                break
            action = planner.choose(session.observe())
            step = profiled(str(action), lambda action=action: session.step(action))
            if step.evaluation is not None:
                print({k: round(v, 2) for k, v in step.evaluation.seconds.items()}, step.evaluation.timing)
        profiled("final verification", lambda: task.evaluator.final(session.state.program))
    finally:
        task.evaluator.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
