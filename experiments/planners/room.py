"""What stored trees have to teach: returns of chance, of a planner drawn from, and of its first choices.

PPO sees no more than this: where chance is paid about as much as the planner, nothing is left to learn there. Episodes
are those of training: what no tree has an answer for is not offered, and forced moves are no choices. The best of few
episodes says how much the spread of chance could find.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qimeng.bench.environment import environment
from qimeng.bench.row import append_line
from qimeng.envs.gym.reward import REWARDS, make_reward
from qimeng.envs.steps.setup import make_device
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.lm.stored import Offer, looked_through
from qimeng.planner.lm.training import make_environment
from qimeng.planner.lm.value import likely, play

if TYPE_CHECKING:
    from qimeng.planner.lm.choices import ChoicesAlone
    from qimeng.planner.lm.weights import PlannerModel

STEPS = 32
"""Longest episode, as in training."""

HOW = ("chance", "drawn", "first")
"""All that is offered alike; from the planner's policy; what it likes best."""


def returns(env: ChoicesAlone, model: PlannerModel, how: str, rng: np.random.Generator, seed: int) -> float:
    """The return of one episode."""

    def choose(seen: dict[str, np.ndarray]) -> int:
        masks = env.action_masks()
        chances = masks / masks.sum() if how == "chance" else likely(model, seen)
        return int(chances.argmax() if how == "first" else rng.choice(len(chances), p=chances))

    return sum(play(env, choose, seed)[1])


def room(
    file: Path, rows: Path, planner: str = "lm", trees: int = 0, episodes: int = 4, rewards: Sequence[str] = ()
) -> None:
    """Add a row for each reward, with means over the trees.

    Args:
        file: trees that `qimeng collect export` wrote.
        rows: file of rows.
        planner: ``"lm"`` or ``"lm:FOLDER"``.
        trees: only so many, drawn; 0 for all.
        episodes: of chance and of the policy, on each tree.
        rewards: names; all by default.
    """
    import torch

    from qimeng.planner.lm.planner import SHIPPED
    from qimeng.planner.lm.weights import load

    torch.set_num_threads(1)  # a row at a time is small
    drawn = list(read_trees(file))
    random.Random(0).shuffle(drawn)
    stored = [one for one, _ in looked_through(drawn[: trees or None], "template")]
    folder = planner.partition(":")[2] or SHIPPED
    model, offer, rng = load(folder, trainable=True), Offer.of(stored), np.random.default_rng(0)
    for reward in rewards or REWARDS:
        paid: dict[str, list[list[float]]] = {how: [] for how in HOW}
        for one in stored:
            env = make_environment(model, [one.task], STEPS, make_reward(reward, 0.0), offer)
            for how in HOW:
                seeds = range(1 if how == "first" else episodes)
                paid[how].append([returns(env, model, how, rng, seed) for seed in seeds])
        about = {"trees": file.name, "count": len(stored), "planner": planner, "reward": reward}
        programs = sum(len(one.tree.evaluations) for one in stored) / len(stored)
        about |= {"evaluations a tree": round(programs, 1), "episodes": episodes}
        about |= {how: round(float(np.mean([np.mean(r) for r in some])), 3) for how, some in paid.items()}
        about |= {f"best {how}": round(float(np.mean([max(r) for r in paid[how]])), 3) for how in HOW[:2]}
        where = asdict(environment(make_device("h200")))
        append_line(rows, json.dumps({**about, "environment": where}))
        print(json.dumps(about), flush=True)


__all__ = ["room"]
