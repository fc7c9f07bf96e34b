"""Puts problems of the suite through the template coder's CUDA C++, whose kernels g++ runs on the CPU.

A script: ``python -m tests.suite.run_cuda [--fusions N] [names]`` prints a JSON row a problem. Each region that the
tile family covers, and fusions of them, are printed under several schedules and held against PyTorch in float64.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import traceback
from pathlib import Path
from typing import Any

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.tile.cuda_moves import cuda_schedules
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.family import Unsupported, covering
from qimeng.graph.capture import CaptureError
from qimeng.graph.opgraph import Value
from qimeng.graph.region import Region
from qimeng.interfaces import Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from tests.coder.cuda_on_cpu import cuda_on_cpu
from tests.suite.problem import Problem, problems
from tests.suite.run import DEVICE, check, evaluate, spec_of

CODER = TemplateCoder(("triton", "cuda"))
SHAPES = (
    {"form": "loop", "warps": 4, "block_p": 2},
    {"form": "split", "warps": 2, "splits": 3},
    {"form": "resident", "warps": 4},
)  # fmt: skip


def run(problem: Problem, fusions: int) -> dict[str, Any]:
    """What came of one problem: kernels that were right, regions that have none, and what was wrong."""
    row: dict[str, Any] = {"problem": problem.name, "right": 0, "left": {}, "wrong": []}
    spec = spec_of(problem)
    try:
        graph = capture_spec(spec)
    except CaptureError as error:
        return {**row, "left": {"the whole": str(error)}}
    values, program = evaluate(graph, spec), Program.start(graph)
    seen: set[str] = set()
    choose = random.Random(problem.name)
    for _ in range(fusions + 1):
        for region in program.regions:
            if region.signature not in seen:
                seen.add(region.signature)
                _try(region, values, row)
        legal = [a for a in legal_actions(program, Context(DEVICE, CODER)) if a.kind == "fusion"]
        if not legal:
            break
        program = CODER.write(Request(program, choose.choice(legal), DEVICE)).apply(program)
    return row


def _try(region: Region, values: dict[Value, Any], row: dict[str, Any]) -> None:
    try:
        family, plan = covering(region)
        if family.name != "tile":
            return
    except Unsupported as error:
        row["left"][region.label()] = str(error)
        return
    plain = TileSchedule(language="cuda", block_p=1, block_r=1, stages=1)
    schedules = cuda_schedules(plan, DEVICE)[:1] + [plain.but(**s) for s in (SHAPES if plan.passes else ())]
    for schedule in schedules:
        try:
            made = family.print(plan, schedule, f"k{region.signature[:8]}")
        except Unsupported as error:
            if schedule is schedules[0]:
                row["left"][region.label()] = str(error)
            continue
        try:
            check(region, made, values)
            row["right"] += 1
        except Exception as error:  # noqa: BLE001  the row must come back
            row["wrong"].append(
                f"{region.label()}, {schedule}: {''.join(traceback.format_exception(error)[-1:])[:600]}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--fusions", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cuda_on_cpu(Path(folder)):
        for one in problems():
            if not options.names or any(name in one.name for name in options.names):
                print(json.dumps(run(one, options.fusions)), flush=True)
