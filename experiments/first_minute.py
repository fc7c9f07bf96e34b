"""Where the seconds of a budget go when a network is optimized, and whether the result is behind torch.compile.

``python -m experiments.first_minute swin_tiny whisper_encoder --seconds 60``: one JSON row for each network, on the GPU
of this machine; ``--suite kernelbench:FOLDER level3/5 level3/44`` for problems of a suite. Seconds until the judge
begins are capture's; steps are what `plan_and_code` reports. Python's own profiler shows what this process does
meanwhile: ``python -m cProfile -o FILE -m experiments.first_minute swin_tiny``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from qimeng import plan_and_code
from qimeng.bench.suite import Problem, problems_of
from qimeng.bench.suites import suite_named
from qimeng.envs.steps.state import Progress
from qimeng.interfaces import Evaluation

MODES = ("default", "reduce-overhead")
"""Modes of torch.compile that the result is timed beside; the second records CUDA graphs."""


def measure(problem: Problem, seconds: float, planner: str, dtype: str) -> dict[str, Any]:
    """One row.

    Args:
        problem: of a suite.
        seconds: budget, capture and final verification included.
        planner: name of a planner.
        dtype: of inputs and parameters.
    """
    began = time.monotonic()
    said: list[tuple[float, str, str]] = []

    def watch(progress: Progress) -> None:
        said.append((round(time.monotonic() - began, 1), progress.phase, progress.text))
        print(f"{said[-1][0]:7.1f} s  {progress.phase:5}  {progress.text}", file=sys.stderr, flush=True)

    spec = problem.spec(dtype, "default")
    result = plan_and_code(spec, seconds=seconds, planner=planner, compile_modes=MODES, on_step=watch)
    found = result.evaluation
    compiled = {mode: timing.device_ms for mode, timing in found.compiled.items()}
    ms, eager = (t.device_ms if t else None for t in (found.timing, found.eager))
    parts: dict[str, float] = {}
    for evaluation in (result.start, *(s.evaluation for s in result.steps if s.evaluation), found):
        for part, taken in evaluation.seconds.items():
            parts[part] = round(parts.get(part, 0.0) + taken, 2)
    return {
        "network": problem.id,
        "dtype": dtype,
        "capture_s": next((at for at, phase, _ in said if phase == "start"), None),
        "search_s": next((at for at, phase, _ in said if phase == "final"), None),
        "total_s": round(time.monotonic() - began, 1),
        "evaluations": result.evaluations,
        "ms": ms,
        "eager_ms": eager,
        "compiled_ms": compiled,
        "over_best_pytorch": min([eager, *compiled.values()]) / ms if ms and eager else None,
        "recipe": [f"{s.action.kind} {s.action.param}".strip() for s in result.recipe.steps],
        "stopped": result.stopped,
        "seconds": parts,
        "steps": [
            {
                "step": f"{s.action.kind} {s.action.param}".strip(),
                "gate": str(s.evaluation.gate),
                **_rounded(s.evaluation),
            }
            for s in result.steps
            if s.evaluation is not None
        ],
        "notes": result.notes,
    }


def _rounded(evaluation: Evaluation) -> dict[str, float]:
    return {part: round(taken, 2) for part, taken in evaluation.seconds.items()}


def main(given: Sequence[str] | None = None) -> None:
    """Measure the problems that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="+", help="ids, such as swin_tiny or level3/5")
    parser.add_argument("--suite", default="module:experiments.networks")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--planner", default="heuristic")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args(given)
    for problem in problems_of(suite_named(arguments.suite), ",".join(arguments.problems)):
        row = measure(problem, arguments.seconds, arguments.planner, arguments.dtype)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
