"""A collection with the judge and the coder of `qimeng.testing`; run as a script it is what a test kills.

python collecting.py OUT COUNT DELAY
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from qimeng.bench import collect as collecting
from qimeng.bench.collect import STORE, Assignment, Plan, collect, put_drawn
from qimeng.bench.explore import Explored, explore
from qimeng.bench.pool import Place
from qimeng.envs.steps.caching import CachingEvaluator
from qimeng.interfaces import Evaluation, Patch
from qimeng.planner.data.generate import Bytes
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.store import Conditions, Store
from qimeng.testing import FakeEvaluator, fake_task
from tests.bench.inline import Inline

DEVICE = "h200"
LITTLE = Bytes(1 << 12, 1 << 14)


class Counting(FakeEvaluator):
    """Writes a line for each program that it judges."""

    def __init__(self, calls: Path, delay: float):
        super().__init__(delay=delay)
        self.path = calls

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().judge(program, patch)
        with open(self.path, "a") as out:
            out.write(f"{program.digest}\n")
        return found


def work(assignment: Assignment, out: Path, delay: float = 0.0) -> Explored:
    drawn = assignment.draw()
    with Store(out / STORE) as store:
        put_drawn(store, drawn)
        task = fake_task(capture_spec(drawn.spec, verify=False))
        conditions = Conditions(drawn.spec.digest, DEVICE, versions=(("evaluator", "fake"),))
        judge = CachingEvaluator(Counting(out / "calls", delay), store, conditions)
        task = replace(task, conditions=conditions, evaluator=judge, name=drawn.spec.name)
        return explore(task, assignment.row(drawn), store, seconds=60.0)


def plan(count: int = 2, **changes: object) -> Plan:
    made = Plan(seed=5, count=count, sizes=LITTLE, evaluations=10, places=(Place(),))
    return replace(made, **changes)  # type: ignore[arg-type]


if __name__ == "__main__":
    collecting.Pool = Inline  # type: ignore[attr-defined,misc]  # one process, so that one signal ends it
    folder = Path(sys.argv[1])
    collect(plan(int(sys.argv[2])), folder, partial(work, out=folder, delay=float(sys.argv[3])), DEVICE)
