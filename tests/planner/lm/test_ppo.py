"""PPO on stored trees: it begins from the policy that acted, ends with the last step, and earns more than before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qimeng.envs.gym.reward import LogSpeedupReward
from qimeng.planner.lm.mini import MiniSize
from qimeng.planner.lm.reading import Reader
from qimeng.planner.lm.stored import Offer, StoredTask
from qimeng.planner.lm.training import Ppo, make_environment, make_learner, train
from qimeng.planner.lm.weights import PlannerModel, new_mini

Stored = tuple[StoredTask, ...]


@pytest.fixture
def model(reader: Reader, tiny: MiniSize) -> PlannerModel:
    return new_mini(reader.tokenizer, tiny, seed=3, length=128)


def test_the_first_pass_begins_from_the_policy_that_acted(model: PlannerModel, stored: Stored) -> None:
    """The ratio of new to old probabilities is 1 before the first update, whatever batch a step is in."""
    from stable_baselines3.common.callbacks import BaseCallback

    ratios: list[np.ndarray] = []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            buffer = self.model.rollout_buffer
            for step in reversed(range(buffer.buffer_size)):
                given = {name: torch.as_tensor(rows[step]) for name, rows in buffer.observations.items()}
                self.model.policy.set_training_mode(True)
                with torch.no_grad():
                    _, found, _ = self.model.policy.evaluate_actions(
                        given,
                        torch.as_tensor(buffer.actions[step]).flatten(),
                        torch.as_tensor(buffer.action_masks[step]),
                    )
                ratios.append(np.exp(found.numpy() - buffer.log_probs[step]))

    settings = Ppo(steps=32, environments=4, rollout=8, batch=8, epochs=2, rate=1e-2, max_steps=5)
    learner = make_learner(model, [s.task for s in stored], settings, offer=Offer.of(stored))
    learner.learn(64, callback=Look())  # the second rollout is one of a policy that was trained
    np.testing.assert_allclose(np.concatenate(ratios), 1.0, atol=1e-4)
    assert len(np.concatenate(ratios)) == 64


def test_advantages_may_stay_as_they_are(model: PlannerModel, stored: Stored) -> None:
    learners = [make_learner(model, [stored[0].task], Ppo(normalize=scaled)) for scaled in (True, False)]
    assert [learner.normalize_advantage for learner in learners] == [True, False]


def test_the_last_step_ends_an_episode(model: PlannerModel, stored: Stored) -> None:
    """Nothing is to come after it: a value of a state that no step is taken from would never be learnt."""
    env = make_environment(model, [stored[0].task], 2)
    env.reset(seed=0)
    ends = []
    for _ in range(2):  # the last of what is offered is to stop
        _, _, terminated, truncated, _ = env.step(np.flatnonzero(env.action_masks())[-2])
        ends.append((terminated, truncated))
    assert ends == [(False, False), (True, False)]


@pytest.mark.slow
def test_ppo_earns_more_on_a_tree_that_takes_several_steps(model: PlannerModel, stored: Stored) -> None:
    """One tree, since it is learnt in few steps: one of which chance finds three quarters of the gain."""
    settings = Ppo(steps=512, environments=8, rollout=8, batch=16, rate=2e-3, max_steps=8)
    found = train(model, [stored[2].task], settings, LogSpeedupReward, offer=Offer.of(stored))
    assert found[0]["reward"] < 0.9 * np.log(stored[2].gain) < found[-1]["reward"]


def test_small_trees_stay_in_one_process(model: PlannerModel, stored: Stored) -> None:
    with pytest.raises(ValueError, match="set processes = false"):
        make_learner(model, [s.task for s in stored], Ppo(processes=True), offer=Offer.of(stored))


def test_an_anchor_keeps_what_was_there(reader: Reader, tiny: MiniSize, stored: Stored) -> None:
    """With a large coefficient the policy hardly leaves what PPO began with; without one it does."""

    def away(anchor: float) -> float:
        model = new_mini(reader.tokenizer, tiny, seed=3, length=128)
        settings = Ppo(steps=96, environments=4, rollout=4, batch=16, rate=2e-3, max_steps=8, anchor=anchor)
        train(model, [s.task for s in stored], settings, LogSpeedupReward, offer=Offer.of(stored))
        same = new_mini(reader.tokenizer, tiny, seed=3, length=128)
        env = make_environment(same, [s.task for s in stored], 8, offer=Offer.of(stored))
        seen, _ = env.reset(seed=1)
        mask = env.action_masks()
        now, before = (make_learner(m, [stored[0].task], settings).policy for m in (model, same))
        obs, _ = now.obs_to_tensor({name: rows[None] for name, rows in seen.items()})
        with torch.no_grad():
            p, q = (policy.get_distribution(obs, mask).distribution.probs[0] for policy in (now, before))
        return float((p - q).abs().sum())

    assert away(30.0) < 0.5 * away(0.0)
