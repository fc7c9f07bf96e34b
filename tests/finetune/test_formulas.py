"""The formulas of multi-turn reinforcement learning, against values worked out by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from qimeng.finetune.advantages import ADVANTAGES, group_relative, leave_one_out
from qimeng.finetune.mismatch import agrees, mean_ratio
from qimeng.finetune.policy_loss import clipped_share, policy_loss
from qimeng.finetune.rewards import kept, kept_probability, profile_share, returns, turn_reward


def test_an_answer_is_compared_with_the_others_of_its_request_and_turn() -> None:
    """Group (a, 0): 4 less the mean of 1 and 1 is 3; 1 less the mean of 4 and 1 is -1.5. Group (a, 1): 2 against 5."""
    found = leave_one_out(
        torch.tensor([4.0, 1.0, 1.0, 2.0, 5.0, 7.0]),
        [("a", 0), ("a", 0), ("a", 0), ("a", 1), ("a", 1), ("b", 0)],
    )
    assert found.tolist() == [3.0, -1.5, -1.5, -3.0, 3.0, 0.0]


def test_leave_one_out_is_the_mean_of_the_others_for_any_returns() -> None:
    values = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = [i % 3 for i in range(12)]
    found = leave_one_out(values, groups)
    for i in range(12):
        others = [float(values[j]) for j in range(12) if j % 3 == i % 3 and j != i]
        assert float(found[i]) == pytest.approx(float(values[i]) - sum(others) / len(others))
        assert len(others) == 3


def test_plain_grpo_divides_by_the_standard_deviation() -> None:
    """Returns 0, 0, 3: mean 1, squares 1, 1, 4, so the deviation is sqrt(2)."""
    found = group_relative(torch.tensor([0.0, 0.0, 3.0, 2.0, 2.0]), [0, 0, 0, 1, 1])
    assert found.tolist() == pytest.approx([-1 / math.sqrt(2), -1 / math.sqrt(2), 2 / math.sqrt(2), 0, 0], abs=1e-5)
    assert set(ADVANTAGES) == {"leave-one-out", "grpo"}


def test_a_group_for_each_return() -> None:
    with pytest.raises(ValueError, match="2 returns have 1 groups"):
        leave_one_out(torch.zeros(2), ["a"])


def test_the_geometric_mean_ratio_is_over_the_whole_trajectory() -> None:
    """Differences 0.3 and -0.1 of two tokens: exp(0.1); a long turn outweighs a short one, as one mean is taken."""
    sampler = torch.tensor([-1.3, -0.9])
    assert mean_ratio(torch.tensor([-1.0, -1.0]), sampler) == pytest.approx(math.exp(0.1))
    assert mean_ratio(sampler, sampler) == 1.0


@pytest.mark.parametrize(
    ("difference", "fits"), [(0.0, True), (0.00099, True), (0.0011, False), (-0.00099, True), (-0.0011, False)]
)
def test_trajectories_whose_ratio_is_off_by_a_thousandth_are_dropped(difference: float, fits: bool) -> None:
    """ln 1.001 = 0.0009995, ln 0.999 = -0.0010005."""
    sampler = torch.full((50,), -2.0)
    assert agrees(sampler + difference, sampler) is fits


def test_one_token_that_the_trainer_finds_impossible_vetoes() -> None:
    """Ratio exp(-9.3) = 9.1e-5 < 1e-4; the others make up for it, so that the mean is 1."""
    sampler = torch.full((94,), -2.0)
    trainer = sampler.clone()
    trainer[0] -= 9.3
    trainer[1:] += 0.1
    assert mean_ratio(trainer, sampler) == pytest.approx(1.0, abs=1e-4)
    assert not agrees(trainer, sampler)
    trainer[0] += 0.2  # exp(-9.1) = 1.1e-4
    trainer[1:] -= 0.2 / 93
    assert agrees(trainer, sampler)


@pytest.mark.parametrize(("trainer", "sampler"), [(torch.zeros(2), torch.zeros(3)), (torch.zeros(0), torch.zeros(0))])
def test_both_are_about_the_same_tokens(trainer: torch.Tensor, sampler: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="same tokens"):
        agrees(trainer, sampler)


def test_clip_is_higher_above_than_below() -> None:
    """Ratios 1.5 and 0.5. A = 1: min(1.5, 1.28), min(0.5, 0.8). A = -2: min(-3, -2.56), min(-1, -1.6)."""
    new = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5, 9.0]))
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0, 1.0])
    mask = torch.tensor([1, 1, 1, 1, 0])
    loss = policy_loss(new, torch.zeros(5), advantages, mask)
    assert loss.item() == pytest.approx(-(1.28 + 0.5 - 3.0 - 1.6) / 4)
    assert clipped_share(new, torch.zeros(5), advantages, mask) == 0.5


def test_clipped_tokens_give_no_gradient() -> None:
    """d/d new of -r A / 2 is -r A / 2 where nothing is clipped: -1.2 * 1 / 2."""
    new = torch.log(torch.tensor([1.2, 1.5])).requires_grad_()
    policy_loss(new, torch.zeros(2), torch.ones(2), torch.ones(2)).backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-0.6, 0.0])
    assert policy_loss(new, torch.zeros(2), torch.ones(2), torch.zeros(2)).item() == 0


def test_reward_of_a_turn() -> None:
    assert turn_reward(True, 1.5, 0.8) == pytest.approx(3.3)
    assert turn_reward(True, 100.0, 1.0) == 5.0
    assert turn_reward(False, 100.0, 1.0) == 0.0
    assert returns([2.0, 0.0, 1.0]) == [3.0, 1.0, 1.0] and returns([]) == []


def test_right_answers_that_hardly_do_the_work_are_left_out() -> None:
    """Dr. Kernel's lazy kernel has 0.014 % of the time; a share of 0.37 is kept with probability 0.7."""
    assert kept_probability(True, profile_share(0.00658, 47.0)) == 0.0
    assert kept_probability(True, 0.37) == pytest.approx(0.7)
    rng = random.Random(0)
    draws = [kept(True, 0.37, rng) for _ in range(2000)]
    assert 0.66 < sum(draws) / 2000 < 0.74
    assert all(kept(False, 0.0, rng) for _ in range(50)) and not any(kept(True, 0.3, rng) for _ in range(50))


@pytest.mark.parametrize("times", [(2.0, 1.0), (-1.0, 1.0), (0.0, 0.0)])
def test_a_share_is_one_of_a_call(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="same call"):
        profile_share(*times)
