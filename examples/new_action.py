"""Teach a planner a new kind of action in seconds.

A planner reads actions as text, so it scores a new kind as soon as the kind is legal. A short adaptation then teaches
it when the kind helps. Each action is tried once in a few states, and a LoRA adapter imitates the best one. Planner,
coder and judge are toys, so this runs on a CPU: the judge makes doubled rows faster for reductions and slower
elsewhere. For a real planner use `qimeng adapt`.

python examples/new_action.py
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from qimeng import Action, Evaluation, Patch
from qimeng.actions import ScheduleKind, register, unregister
from qimeng.coder.template.families.tile.family import Tile
from qimeng.coder.template.families.tile.plan import TilePlan, plan_tile
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.device import Device
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.task import Task
from qimeng.graph.capture import capture
from qimeng.graph.ops import category
from qimeng.graph.region import Region
from qimeng.interfaces import Observation, Request
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.lm.corpus import corpus, random_walk
from qimeng.planner.lm.imitation import Example, Imitation, imitate
from qimeng.planner.lm.mini import MiniSize, train_tokenizer
from qimeng.planner.lm.planner import LanguageModelPlanner
from qimeng.planner.lm.scoring import Scale
from qimeng.planner.lm.weights import PlannerModel, add_lora, new_mini
from qimeng.program.program import Program
from qimeng.program.schedule import Schedule
from qimeng.testing import FakeEvaluator, fake_task


class DoubleRows(ScheduleKind):
    """Give each program twice the rows.

    args: the region.
    rewrite: ``block_p = 4`` -> ``block_p = 8``
    """

    name = "double_rows"
    family = "tile"

    def rewrite(self, schedule: Schedule, plan: TilePlan, device: Device, param: str) -> tuple[Schedule, ...]:
        assert isinstance(schedule, TileSchedule)
        return (schedule.but(block_p=2 * schedule.block_p),) if schedule.block_p < plan.row_count else ()


def plain(region: Region, device: Device) -> TileSchedule:
    """What lowering starts from."""
    return Tile().default(plan_tile(region), device, "default")


class RowsPayForReductions(FakeEvaluator):
    """Doubling the rows of a reduction saves 40 % of the time; doubling others adds 30 %."""

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().judge(program, patch)
        judged, ms = program if patch is None else patch.apply(program, found.chosen), 1.0
        for region in judged.regions:
            schedule = judged.schedule(region)
            if isinstance(schedule, TileSchedule) and schedule.block_p > plain(region, self.device).block_p:
                ms *= 0.6 if any(category(n) == "reduction" for n in region.ops) else 1.3
        assert found.timing is not None
        return replace(found, timing=replace(found.timing, device_ms=ms))


class Last(torch.nn.Module):
    """First training computation: the reduction comes last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) * 2, -1)


class First(torch.nn.Module):
    """Second training computation: the reduction comes first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.softmax(x, -1) * 2)


class Other(torch.nn.Module):
    """The test computation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) - 0.1, -1)


def lowered(module: Callable[[], torch.nn.Module]) -> Task:
    """The computation with a generated kernel for every operator."""
    task = fake_task(capture(module, lambda: (torch.empty(4096, 512),)), RowsPayForReductions())
    program, context = task.start, task.context
    for region in program.regions:
        action = Action("lowering", (region.id,))
        program = context.coder.write(Request(program, action, context.device)).apply(program)
    return replace(task, start=program)


def made_without_it(tasks: Sequence[Task]) -> PlannerModel:
    """A small planner that imitates the heuristic and has not seen the new kind."""
    tokenizer = train_tokenizer(corpus(tasks, 2, 8), 400)
    model = new_mini(tokenizer, MiniSize(48, 2, 2, 1, 96), Scale("tokens", 0.1), length=96)
    planner = HeuristicPlanner()
    examples = [Example.of(seen, {planner.choose(seen): 1.0}) for task in tasks for seen in random_walk(task, 6)]
    imitate(model, examples, Imitation(epochs=3, batch=8, rate=3e-3))
    return model


def best_of_all(task: Task, walks: int, steps: int) -> Iterator[Example]:
    """The fastest action, or `stop`, in the states of random walks; every action is tried once."""
    for seed in range(walks):
        draw, session = random.Random(seed), Session(task)
        session.begin()
        for _ in range(steps):
            seen, times = session.observe(), {}
            for action in seen.actions:
                tried = session.clone()
                tried.step(action)
                times[action] = tried.state.ms or math.inf
            best = min(seen.actions, key=lambda action: times[action])  # `stop`, the first, where nothing is faster
            yield Example.of(seen, {best: 1.0})
            session.step(draw.choice(seen.actions[1:]))


def chances(model: PlannerModel, seen: Observation) -> dict[str, float]:
    """The planner's probability of doubling the rows of each region."""
    scores = LanguageModelPlanner(model).scores(seen)
    return {
        seen.program.region(action.regions[0]).label(): float(torch.tensor(score).exp())
        for action, score in zip(seen.actions, scores, strict=True)
        if action.kind == "double_rows"
    }


def main(walks: int = 4, epochs: int = 30) -> tuple[dict[str, float], dict[str, float]]:
    tasks, other = [lowered(Last), lowered(First)], lowered(Other)
    model = made_without_it(tasks)
    register(DoubleRows())
    try:
        seen = next(random_walk(other, 1))
        before = chances(model, seen)
        examples = [example for task in tasks for example in best_of_all(task, walks, 3)]
        add_lora(model, rank=16)
        imitate(model, examples, Imitation(epochs, batch=8, rate=5e-3, others=0))
        after = chances(model, seen)
    finally:
        unregister("double_rows")
    print(f"chance to double the rows, of {len(seen.actions)} legal actions:")
    for region in before:
        print(f"  {region:10} {before[region]:6.1%} before, {after[region]:6.1%} after {len(examples)} states")
    return before, after


if __name__ == "__main__":
    main()
