"""Whether PPO adds to imitation: a run of `qimeng train` on deep trees whose best programs a known rule decides.

Drawn specs of 2 to 6 operators, explored with fakes. A generated kernel is slower than PyTorch until its schedule is
the right one for its family and size, and fusing before lowering saves launches: gains come after several steps in the
right order, the first of which may cost. Prints one line of JSON for each row of progress; OUT/planner/report.json
compares chance, the untrained, the imitating and the trained planner on specs that were held out. Fakes only: it says
how a planner learns, nothing about kernels. Each set of settings needs an OUT of its own; trees.xz may be copied.

    python benchmarks/planner_ppo.py OUT seed=1 ppo.steps=1024
    python benchmarks/planner_ppo.py OUT imitation.epochs=0 ppo.steps=2048 ppo.rate=1e-3 ppo.rollout=16 ppo.batch=32
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

from qimeng.bench.explore import Explored, explore
from qimeng.device import DEVICES
from qimeng.envs.replay import CachingEvaluator
from qimeng.envs.setup import CODERS
from qimeng.envs.shares import bound_ms
from qimeng.errors import QimengError
from qimeng.graph.ops import family
from qimeng.graph.region import Region
from qimeng.graph.verify import capture_spec
from qimeng.interfaces import Evaluation, Patch
from qimeng.planner.data.generate import Bytes, draw
from qimeng.planner.data.tree import put_drawn, write_trees
from qimeng.planner.lm.config import load_config
from qimeng.planner.lm.run import Run
from qimeng.planner.lm.sources import gather
from qimeng.program.program import Program
from qimeng.store import Conditions, Store
from qimeng.testing import LAUNCH_MS, FakeEvaluator, fake_task

SPECS, ASKED, SEED = 64, 60, 5
FAMILIES = ("pointwise", "reduction", "normalization", "softmax", "product")
LARGE = 4 << 20
SETTINGS = (
    "coder=fake",
    "held_out=0.4",
    "length=256",
    "walks=2",
    "mini.hidden=64",
    "mini.layers=2",
    "mini.heads=2",
    "mini.inner=128",
    "ppo.steps=1024",
)


def best_schedule(region: Region) -> dict[str, int]:
    """The rule: what a kernel of this family and size wants."""
    large, kinds = region.bytes_moved() > LARGE, {family(n) for n in region.ops}
    if "gemm" in kinds:
        return {"block_m": 256 if large else 64, "warps": 8 if large else 4}
    if "reduction" in kinds:
        return {"block_p": 2 if large else 4, "warps": 8 if large else 2}
    return {"block_p": 16 if large else 4, "warps": 8 if large else 2}


class Deep(FakeEvaluator):
    """Times by the rule: a generated region takes 0.8 of its bound and launch, and 0.3 more for each factor of two."""

    def evaluate(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """Judge the fastest of the alternatives."""
        judged = [program] if patch is None else [patch.apply(program, i) for i in range(len(patch.alternatives))]
        found = [replace(self._timed(one), chosen=i, configurations=len(judged)) for i, one in enumerate(judged)]
        return min(found, key=lambda e: e.ms or 0.0)

    def _timed(self, program: Program) -> Evaluation:
        plain = super().evaluate(program)
        assert plain.timing is not None
        torch_ms = plain.region_ms
        times = {r.id: self._region_ms(program, r, torch_ms[r.id]) for r in program.regions}
        return replace(plain, timing=replace(plain.timing, device_ms=sum(times.values())), region_ms=times)

    def _region_ms(self, program: Program, region: Region, torch_ms: float) -> float:
        schedule = program.schedule(region)
        if schedule is None:
            return torch_ms
        away = sum(abs(math.log2(getattr(schedule, name) / best)) for name, best in best_schedule(region).items())
        return (bound_ms(region, self.device) + LAUNCH_MS) * (0.8 + 0.3 * away)


def write_deep_trees(path: Path) -> None:
    """Explore `SPECS` drawn specs with fakes, `ASKED` evaluations each."""
    store, done, index = Store(), 0, -1
    while done < SPECS:
        index += 1
        drawn = draw(SEED, index, Bytes(1 << 16, 1 << 26), FAMILIES)
        try:
            task = fake_task(capture_spec(drawn.spec, verify=False))
        except QimengError:
            continue
        if not 2 <= len(task.start.regions) <= 6:
            continue
        put_drawn(store, drawn)
        conditions = Conditions(drawn.spec.digest, "h200", drawn.spec.mode, True, (("evaluator", "deep fake"),))
        judge = CachingEvaluator(Deep(DEVICES["h200"], estimated=True), store, conditions)
        row = Explored(drawn.spec.digest, drawn.spec.name, drawn.family, SEED, index, "h200", asked=ASKED)
        explore(replace(task, conditions=conditions, evaluator=judge), row, store, seconds=600.0)
        done += 1
    write_trees(store, path)


def main() -> None:
    """Explore where there are no trees yet, then train."""
    torch.set_num_threads(1)
    out, trees = Path(sys.argv[1]), Path(sys.argv[1]) / "trees.xz"
    out.mkdir(parents=True, exist_ok=True)
    if not trees.exists():
        write_deep_trees(trees)
    CODERS["fake"] = "qimeng.testing:FakeCoder"
    config = load_config(None, sys.argv[2:], (*SETTINGS, f'trees=["{trees}"]'))
    run = Run(config, out / "planner", gather(config, out), lambda phase, row: print(json.dumps({phase: dict(row)})))
    print(json.dumps(run().shares))


if __name__ == "__main__":
    main()
