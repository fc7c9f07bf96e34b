"""Episodes of choices alone: what leaves no choice is done without asking, and paid with the choice before it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from qimeng.planner.lm.choices import EPISODES, ChoicesAlone
from qimeng.planner.lm.mini import MiniSize
from qimeng.planner.lm.reading import Reader
from qimeng.planner.lm.stored import Offer, StoredTask
from qimeng.planner.lm.training import make_environment
from qimeng.planner.lm.weights import new_mini


class Corridor(gymnasium.Env[dict[str, Any], Any]):
    """Rooms with so many doors each; the number of the room is paid on leaving it."""

    observation_space = gymnasium.spaces.Dict({"room": gymnasium.spaces.Discrete(99)})
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, doors: tuple[int, ...]):
        self.doors, self.room, self.episodes = doors, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.room, self.episodes = 0, self.episodes + 1
        return {"room": 0}, {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert self.action_masks()[action]
        paid, self.room = float(self.room), self.room + 1
        return {"room": self.room}, paid, self.room == len(self.doors), False, {}

    def action_masks(self) -> np.ndarray:
        return np.arange(4) < self.doors[self.room]


def test_one_door_is_gone_through_and_paid_with_the_choice_before_it() -> None:
    env = ChoicesAlone(Corridor((1, 3, 1, 1, 2, 1)))
    seen, _ = env.reset(seed=1)
    assert seen["room"] == 1
    seen, paid, over, _, _ = env.step(2)
    assert (seen["room"], paid, over) == (4, 1 + 2 + 3, False)
    _, paid, over, _, _ = env.step(0)
    assert (paid, over) == (4 + 5, True)


def test_episodes_without_a_choice_are_passed_over_but_not_for_ever() -> None:
    env = ChoicesAlone(Corridor((1, 1)))
    seen, _ = env.reset()
    assert seen["room"] == 0 and env.unwrapped.episodes == EPISODES + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", [0, 1])
def test_on_stored_trees_there_is_always_a_choice(
    seed: int, reader: Reader, tiny: MiniSize, stored: tuple[StoredTask, ...]
) -> None:
    model, offer = new_mini(reader.tokenizer, tiny, seed=3, length=128), Offer.of(stored)
    env = make_environment(model, [s.task for s in stored], 8, offer=offer)
    draw = np.random.default_rng(seed)
    env.reset(seed=seed)
    for _ in range(12):
        offered = np.flatnonzero(env.action_masks())
        assert len(offered) > 1
        _, _, terminated, truncated, _ = env.step(draw.choice(offered))
        if terminated or truncated:
            env.reset()
