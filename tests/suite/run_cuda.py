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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.tile.cuda_moves import cuda_schedules
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.family import Unsupported, covering
from qimeng.graph.capture import CaptureError
from qimeng.graph.region import Region
from qimeng.interfaces import Request
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from tests.coder.cuda_on_cpu import Compiled, cuda_on_cpu
from tests.suite.problem import Problem, problems
from tests.suite.run import DEVICE, check, evaluate, spec_of

CODER = TemplateCoder(("triton", "cuda"))
SHAPES = (
    {"form": "loop", "warps": 4, "block_p": 2},
    {"form": "split", "warps": 2, "splits": 3},
    {"form": "resident", "warps": 4},
)  # fmt: skip


def run(problem: Problem, fusions: int, cpu: Compiled) -> dict[str, Any]:
    """What came of one problem: kernels that were right, regions that have none, and what was wrong."""
    row: dict[str, Any] = {"problem": problem.name, "right": 0, "left": {}, "wrong": []}
    spec = spec_of(problem)
    try:
        graph = capture_spec(spec)
    except CaptureError as error:
        return {**row, "left": {"the whole": str(error)}}
    values, program = evaluate(graph, spec), Program.start(graph)
    seen: set[str] = set()
    cases: list[tuple[Region, Implementation]] = []
    choose = random.Random(problem.name)
    for _ in range(fusions + 1):
        for region in program.regions:
            if region.signature not in seen:
                seen.add(region.signature)
                cases += [(region, made) for made in _printed(region, row)]
        legal = [a for a in legal_actions(program, Context(DEVICE, CODER)) if a.kind == "fusion"]
        if not legal:
            break
        program = CODER.write(Request(program, choose.choice(legal), DEVICE)).apply(program)
    cpu.together([made for _, made in cases])
    for region, made in cases:
        try:
            check(region, made, values)
            row["right"] += 1
        except Exception as error:  # noqa: BLE001  the row must come back
            text = "".join(traceback.format_exception(error)[-1:])[:600]
            row["wrong"].append(f"{region.label()}, {made.schedule}: {text}")
    return row


def _printed(region: Region, row: dict[str, Any]) -> Iterator[Implementation]:
    """The region under each schedule; why there is none is left in `row`."""
    try:
        family, plan = covering(region)
        if family.name != "tile":
            return
    except Unsupported as error:
        row["left"][region.label()] = str(error)
        return
    plain = TileSchedule(language="cuda", block_p=1, block_r=1, stages=1)
    schedules = cuda_schedules(plan, DEVICE)[:1] + [plain.but(**s) for s in (SHAPES if plan.passes else ())]
    for number, schedule in enumerate(schedules):
        try:
            yield family.print(plan, schedule, f"k{region.signature[:8]}")
        except Unsupported as error:
            if number == 0:
                row["left"][region.label()] = str(error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--fusions", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cuda_on_cpu(Path(folder)) as cpu:
        for one in problems():
            if not options.names or any(name in one.name for name in options.names):
                print(json.dumps(run(one, options.fusions, cpu)), flush=True)
