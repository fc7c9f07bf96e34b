"""What stored trees have to teach: returns of chance, of a planner drawn from, and of its first choices.

    python benchmarks/planner_room.py TREES --rows FILE [--planner lm] [--trees 100] [--reward milestones ...]

PPO sees no more than this: where chance is paid about as much as the planner, nothing is left to learn there. Episodes
are those of training: what no tree has an answer for is not offered, and forced moves are no choices. The best of few
episodes says how much the spread of chance could find. A row for each reward, with means over the trees.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qimeng.bench.environment import environment
from qimeng.bench.row import append_line
from qimeng.envs.reward import REWARDS, make_reward
from qimeng.envs.setup import make_device
from qimeng.planner.data.tree import read_trees
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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="trees that `qimeng collect export` wrote")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--planner", default="lm", help="'lm', or lm:FOLDER")
    parser.add_argument("--trees", type=int, default=0, help="only so many, drawn; 0 for all")
    parser.add_argument("--episodes", type=int, default=4, help="of chance and of the policy, on each tree")
    parser.add_argument("--reward", nargs="+", default=list(REWARDS), choices=list(REWARDS))
    args = parser.parse_args()
    import torch

    from qimeng.planner.lm.planner import SHIPPED
    from qimeng.planner.lm.weights import load

    torch.set_num_threads(1)  # a row at a time is small
    trees = list(read_trees(args.file))
    random.Random(0).shuffle(trees)
    stored = [one for one, _ in looked_through(trees[: args.trees or None], "template")]
    folder = args.planner.partition(":")[2] or SHIPPED
    model, offer, rng = load(folder, trainable=True), Offer.of(stored), np.random.default_rng(0)
    for reward in args.reward:
        paid: dict[str, list[list[float]]] = {how: [] for how in HOW}
        for one in stored:
            env = make_environment(model, [one.task], STEPS, make_reward(reward, 0.0), offer)
            for how in HOW:
                seeds = range(1 if how == "first" else args.episodes)
                paid[how].append([returns(env, model, how, rng, seed) for seed in seeds])
        about = {"trees": args.file.name, "count": len(stored), "planner": args.planner, "reward": reward}
        programs = sum(len(one.tree.evaluations) for one in stored) / len(stored)
        about |= {"evaluations a tree": round(programs, 1), "episodes": args.episodes}
        about |= {how: round(float(np.mean([np.mean(r) for r in some])), 3) for how, some in paid.items()}
        about |= {f"best {how}": round(float(np.mean([max(r) for r in paid[how]])), 3) for how in HOW[:2]}
        where = asdict(environment(make_device("h200")))
        append_line(args.rows, json.dumps({**about, "environment": where}))
        print(json.dumps(about), flush=True)


if __name__ == "__main__":
    main()
