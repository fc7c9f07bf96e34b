"""The stable-baselines3 policy: distributions, masks, saving; a run of MaskablePPO on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from qimeng.envs.steps.state import STOP
from qimeng.envs.steps.task import Task
from qimeng.envs.steps.time_shares import MAX_ACTIONS
from qimeng.planner.lm.corpus import random_walk
from qimeng.planner.lm.mini import MiniSize
from qimeng.planner.lm.planner import LanguageModelPlanner
from qimeng.planner.lm.reading import Reader
from qimeng.planner.lm.training import Ppo, make_learner
from qimeng.planner.lm.weights import PlannerModel, add_lora, new_mini

SHORT = Ppo(steps=16, environments=2, rollout=8, batch=8, epochs=1, max_steps=4)


@pytest.fixture
def model(reader: Reader, tiny: MiniSize) -> PlannerModel:
    return new_mini(reader.tokenizer, tiny, seed=3, length=48)


def observed(model: PlannerModel, task: Task, count: int = 3) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Stacked arrays of some states, and their masks."""
    states = list(random_walk(task, count - 1, seed=2))
    rows = [model.reader.arrays(s) for s in states]
    masks = np.zeros((len(rows), MAX_ACTIONS), dtype=bool)
    for mask, state in zip(masks, states, strict=True):
        mask[: len(state.actions)] = True
    return {k: np.stack([r[k] for r in rows]) for k in rows[0]}, masks


def test_the_policy_is_the_scorers_softmax(model: PlannerModel, task: Task) -> None:
    policy = make_learner(model, [task], SHORT).policy
    arrays, masks = observed(model, task)
    obs, _ = policy.obs_to_tensor(arrays)
    with torch.no_grad():
        probs = policy.get_distribution(obs, masks).distribution.probs.numpy()
        unmasked = policy.get_distribution(obs).distribution.probs.numpy()
    np.testing.assert_allclose(unmasked, probs)  # what is legal, the observation says
    assert (probs[~masks] == 0).all()
    for row, seen in zip(probs, random_walk(task, 2, seed=2), strict=True):
        scores = np.exp(LanguageModelPlanner(model).scores(seen))
        assert scores[seen.actions.index(STOP)] == 0, "the planner goes on where it can"
        moves = row[: len(scores)] * (scores > 0)
        np.testing.assert_allclose(moves / moves.sum(), scores, atol=1e-5)


def test_a_mask_takes_actions_away(model: PlannerModel, task: Task) -> None:
    policy = make_learner(model, [task], SHORT).policy
    arrays, masks = observed(model, task)
    masks[:, 1:] = False
    actions, _ = policy.predict(arrays, action_masks=masks)
    assert actions.tolist() == [0, 0, 0]


def test_evaluating_actions_agrees_with_acting(model: PlannerModel, task: Task) -> None:
    policy = make_learner(model, [task], SHORT).policy
    arrays, masks = observed(model, task)
    obs, _ = policy.obs_to_tensor(arrays)
    policy.set_training_mode(True)
    with torch.no_grad():
        actions, values, log_prob = policy(obs, action_masks=masks)
        values_again, log_prob_again, entropy = policy.evaluate_actions(obs, actions, torch.as_tensor(masks))
        torch.testing.assert_close(log_prob, log_prob_again)
        torch.testing.assert_close(values, values_again)
        torch.testing.assert_close(policy.predict_values(obs), values)
    assert entropy is not None and (entropy > 0).all() and values.shape == (3, 1)


def test_an_anchors_bonus_is_minus_the_divergence(model: PlannerModel, task: Task) -> None:
    arrays, masks = observed(model, task)
    learners = [make_learner(model, [task], replace(SHORT, anchor=anchor)) for anchor in (0.0, 0.1)]
    assert [learner.ent_coef for learner in learners] == [SHORT.entropy, 0.1]
    near, draw = learners[1].policy, torch.Generator().manual_seed(0)
    obs, _ = near.obs_to_tensor(arrays)
    actions, legal = torch.zeros(3, dtype=torch.long), torch.as_tensor(masks)
    few = legal & (torch.arange(MAX_ACTIONS) < 2)
    _, _, bonus = near.evaluate_actions(obs, actions, few)
    torch.testing.assert_close(bonus, torch.zeros(3), atol=1e-6, rtol=0.0)  # PPO begins where the anchor is
    before = near.get_distribution(obs, masks).distribution.probs
    with torch.no_grad():
        for parameter in model.scorer.lm.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    _, _, bonus = near.evaluate_actions(obs, actions, few)  # of all actions, also of those that may not be chosen
    now = near.get_distribution(obs, masks).distribution.probs
    divergence = torch.where(legal, now * (now / before).log(), 0.0).sum(-1)
    torch.testing.assert_close(bonus, -divergence, atol=1e-4, rtol=1e-3)
    assert (bonus < -1e-4).all()
    bonus.sum().backward()
    assert all(p.grad is None for p in near.anchor.parameters())


def test_a_run_changes_what_is_trained_and_nothing_else(model: PlannerModel, task: Task) -> None:
    add_lora(model, rank=2)
    before = {n: p.detach().clone() for n, p in model.scorer.named_parameters()}
    learner = make_learner(model, [task], SHORT)
    learner.learn(SHORT.steps)
    changed = {n for n, p in model.scorer.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("lora" in n or n.startswith(("value.", "worth.")) for n in changed)


def test_heads_learn_at_a_rate_of_their_own(model: PlannerModel, task: Task) -> None:
    before = {n: p.detach().clone() for n, p in model.scorer.named_parameters()}
    learner = make_learner(model, [task], replace(SHORT, rate=1e-5, heads=100.0))
    learner.learn(SHORT.steps)
    moved = {n: float((p.detach() - before[n]).abs().max()) for n, p in model.scorer.named_parameters()}
    heads = [m for n, m in moved.items() if n.startswith(("value.", "worth."))]
    others = [m for n, m in moved.items() if not n.startswith(("value.", "worth."))]
    assert max(heads) > 20 * max(others) > 0
    assert {group["lr"] for group in learner.policy.optimizer.param_groups} == {learner.lr_schedule(0.0)}


def test_a_tokenizer_of_another_model_is_refused(reader: Reader, tiny: MiniSize, task: Task) -> None:
    small = new_mini(reader.tokenizer, tiny)
    small.scorer.lm.resize_token_embeddings(100)
    with pytest.raises(ValueError, match="the model knows 100: the tokenizer is not this model's"):
        make_learner(small, [task], SHORT)
