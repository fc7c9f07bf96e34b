"""Teach a planner a new kind of action in a minute.

A planner reads actions as text, so it scores a new kind as soon as the kind is legal. A short adaptation then teaches
it when the kind helps. Each action is tried once in a few states, and the planner imitates what was faster. Planner,
coder and judge are toys, so this runs on a CPU: the judge makes many rows faster for reductions and slower elsewhere.
For a real planner use `qimeng adapt`.

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
from qimeng.planner.lm.weights import PlannerModel, new_mini
from qimeng.program.program import Program
from qimeng.program.schedule import Schedule
from qimeng.testing import FakeEvaluator, fake_task

SIZES = ((4096, 512), (2048, 256), (8192, 1024))
"""Rows and columns of the training computations."""

SHARP = 12
"""In what is imitated, a program that takes half the time is 2 ** SHARP times as likely."""


class ManyRows(ScheduleKind):
    """Give each program eight times the rows.

    args: the region.
    rewrite: ``block_p = 4`` -> ``block_p = 32``
    """

    name = "many_rows"
    family = "tile"

    def rewrite(self, schedule: Schedule, plan: TilePlan, device: Device, param: str) -> tuple[Schedule, ...]:
        assert isinstance(schedule, TileSchedule)
        return (schedule.but(block_p=8 * schedule.block_p),) if 8 * schedule.block_p <= plan.row_count else ()


def plain(region: Region, device: Device) -> TileSchedule:
    """What lowering starts from."""
    return Tile().default(plan_tile(region), device, "default")


class RowsPayForReductions(FakeEvaluator):
    """Many rows save 40 % of the time of a reduction, and add 30 % elsewhere."""

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().judge(program, patch)
        judged, ms = program if patch is None else patch.apply(program, found.chosen), 1.0
        for region in judged.regions:
            schedule = judged.schedule(region)
            if isinstance(schedule, TileSchedule) and schedule.block_p >= 8 * plain(region, self.device).block_p:
                ms *= 0.6 if any(category(n) == "reduction" for n in region.ops) else 1.3
        assert found.timing is not None
        return replace(found, timing=replace(found.timing, device_ms=ms))


class Last(torch.nn.Module):
    """First training computation: the reduction comes last."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) - gate, -1)


class First(torch.nn.Module):
    """Second training computation: the reduction comes first."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.softmax(x, -1) * gate)


class Without(torch.nn.Module):
    """Third training computation: there is no reduction."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * gate - gate


class Other(torch.nn.Module):
    """The test computation."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.tanh(x) * gate, -1)


def lowered(module: Callable[[], torch.nn.Module], rows: int = 4096, width: int = 512) -> Task:
    """The computation with a generated kernel for every operator."""
    task = fake_task(capture(module, lambda: (torch.empty(rows, width), torch.empty(width))), RowsPayForReductions())
    program, context = task.start, task.context
    for region in program.regions:
        action = Action("lowering", (region.id,))
        program = context.coder.write(Request(program, action, context.device)).apply(program)
    return replace(task, start=program)


def made_without_it(tasks: Sequence[Task], seed: int) -> PlannerModel:
    """A small planner that imitates the heuristic and has not seen the new kind."""
    tokenizer = train_tokenizer(corpus(tasks, 2, 8), 400)
    model = new_mini(tokenizer, MiniSize(48, 2, 2, 1, 96), Scale("tokens", 0.1), seed, length=96)
    planner = HeuristicPlanner()
    examples = [Example.of(seen, {planner.choose(seen): 1.0}) for task in tasks for seen in random_walk(task, 6)]
    imitate(model, examples, Imitation(epochs=1, batch=8, rate=3e-3, seed=seed))
    return model


def tried_once(task: Task, walks: int, steps: int) -> Iterator[Example]:
    """What every action leads to in the states of random walks: the faster the program, the likelier the choice."""
    for seed in range(walks):
        draw, session = random.Random(seed), Session(task)
        session.begin()
        for _ in range(steps):
            seen, times = session.observe(), {}
            for action in seen.actions:
                tried = session.clone()
                tried.step(action)
                times[action] = tried.state.ms or math.inf
            worth = {action: (min(times.values()) / ms) ** SHARP for action, ms in times.items()}
            yield Example.of(seen, {action: w / sum(worth.values()) for action, w in worth.items()})
            session.step(draw.choice(seen.actions[1:]))


def chances(model: PlannerModel, seen: Observation) -> dict[str, float]:
    """The planner's probability of giving each region many rows."""
    scores = LanguageModelPlanner(model).scores(seen)
    return {
        seen.program.region(action.regions[0]).label(): float(torch.tensor(score).exp())
        for action, score in zip(seen.actions, scores, strict=True)
        if action.kind == "many_rows"
    }


def main(seed: int = 0, walks: int = 2, epochs: int = 16) -> tuple[dict[str, float], dict[str, float]]:
    """Print, and return, how likely the new kind is for each region before and after training."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are so small that threads would mostly wait for each other
    tasks, other = [lowered(made, *size) for made in (Last, First, Without) for size in SIZES], lowered(Other)
    model = made_without_it(tasks, seed)
    register(ManyRows())
    try:
        seen = next(random_walk(other, 1))
        before = chances(model, seen)
        examples = [example for task in tasks for example in tried_once(task, walks, 3)]
        imitate(model, examples, Imitation(epochs, batch=8, rate=3e-3, others=0, seed=seed))
        after = chances(model, seen)
    finally:
        unregister("many_rows")
        torch.set_num_threads(threads)
    print(f"chance of many rows, of {len(seen.actions)} legal actions in a computation that was not trained on:")
    for region in before:
        print(f"  {region:10} {before[region]:6.1%} before, {after[region]:6.1%} after {len(examples)} states")
    return before, after


if __name__ == "__main__":
    main()
