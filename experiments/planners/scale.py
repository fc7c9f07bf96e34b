"""What length normalisation and temperature do to learning: a mini model, PPO on a fake judge, one row a setting.

The task: of the legal first steps only one pays. Fakes only: it says how fast a policy moves, nothing about kernels.
"""

from __future__ import annotations

import json
import math

import torch

from qimeng.envs.gym.reward import Reward, Transition
from qimeng.planner.lm.corpus import corpus, random_walk
from qimeng.planner.lm.mini import MiniSize, train_tokenizer
from qimeng.planner.lm.planner import LanguageModelPlanner
from qimeng.planner.lm.scoring import Scale
from qimeng.planner.lm.training import Ppo, train
from qimeng.planner.lm.weights import new_mini
from qimeng.testing import fake_task, sample_graph

SCALES = [Scale("tokens", t) for t in (1.0, 0.5, 0.25, 0.1)] + [Scale("none", t) for t in (1.0, 10.0)]
SETTINGS = Ppo(steps=768, environments=8, rollout=8, batch=32, epochs=4, rate=2e-3, max_steps=1, target_kl=None)


class OneStepPays(Reward):
    """1 for a lowering of the operator with the least time, 0 for all else."""

    low, high = 0.0, 1.0

    def __init__(self, region: str):
        self.region = region

    def update(self, transition: Transition) -> float:
        """The reward of a step."""
        step = transition.step
        return float(step is not None and step.action.kind == "lowering" and step.action.regions == (self.region,))


def scale(seeds: int = 1) -> None:
    """Train with each setting from each seed and print a line of JSON a setting.

    It says the probability of the step that pays before and after training, and the mean reward of the last 100
    episodes, for each seed.
    """
    torch.set_num_threads(1)
    task = fake_task(sample_graph())
    start = next(random_walk(task, 1))
    best = max(i for i, action in enumerate(start.actions) if action.kind == "lowering")
    region = start.actions[best].regions[0]
    tokenizer = train_tokenizer(corpus([task]), 512)
    size = MiniSize(hidden=64, layers=2, heads=2, kv_heads=1, inner=128, positions=512)
    for one in SCALES:
        rows = []
        for seed in range(seeds):
            model = new_mini(tokenizer, size, one, seed, length=64)
            planner = LanguageModelPlanner(model)
            before = math.exp(planner.scores(start)[best])
            found = train(model, [task], Ppo(**{**vars(SETTINGS), "seed": seed}), lambda: OneStepPays(region))
            rows.append((before, math.exp(planner.scores(start)[best]), found[-1]["reward"]))
        names = ("before", "after", "reward")
        columns = {name: [round(row[i], 3) for row in rows] for i, name in enumerate(names)}
        print(json.dumps({**one.to_dict(), **columns}), flush=True)


__all__ = ["scale"]
