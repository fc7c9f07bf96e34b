"""Rewards: their formulas, their ranges, and that cycling gains nothing."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest

from qimeng.envs.gym.reward import (
    REWARDS,
    AnytimeReward,
    CoverageReward,
    LogSpeedupReward,
    MilestoneReward,
    PaperReward,
    Reward,
    Transition,
    make_reward,
)
from qimeng.envs.judge.ranking import beats
from qimeng.interfaces import Action, Evaluation, Gate, Step, Timing

ACTION = Action("tiling", ("r1",), "taller")


def timed(ms: float, spread: float = 0.0, eager_ms: float = 10.0) -> Evaluation:
    return Evaluation(Gate.PASSED, timing=Timing(ms, spread), eager=Timing(eager_ms, spread))


def right(before: float, after: float, number: int = 1, spread: float = 0.0, **best: float) -> Transition:
    old, new = timed(before, spread), timed(after, spread)
    best_before, best_after = best.get("best_before", before), best.get("best_after", min(before, after))
    return Transition(Step(ACTION, new, True), number, old, new, timed(best_before), timed(best_after))


FIVE = timed(5.0)


def refused(gate: Gate, number: int = 1) -> Transition:
    return Transition(Step(ACTION, Evaluation(gate, "no", "wrong"), False), number, FIVE, FIVE, FIVE, FIVE)


NOTHING = Transition(None, 1)
GRAPH_ONLY = Transition(Step(ACTION, None, True), 1, FIVE, FIVE, FIVE, FIVE)


def test_milestones_are_paid_once() -> None:
    reward = MilestoneReward()
    assert reward.update(right(10.0, 9.0)) == pytest.approx(-0.01 + 0.1 + 1.0)
    assert reward.update(right(9.0, 10.0)) == pytest.approx(-0.01)
    assert reward.update(right(10.0, 9.0)) == pytest.approx(-0.01)
    assert reward.update(right(9.0, 4.0)) == pytest.approx(-0.01 + 3.0)
    reward.reset()
    assert reward.update(right(10.0, 3.0)) == pytest.approx(reward.high)


def test_a_milestone_must_be_passed_by_two_spreads() -> None:
    assert MilestoneReward().update(right(10.0, 10 / 1.06, spread=0.01)) == pytest.approx(0.09)
    assert MilestoneReward().update(right(10.0, 10 / 1.08, spread=0.01)) == pytest.approx(1.09)


@pytest.mark.parametrize("slow", [1.0, 1.12], ids=["as before", "in slower memory"])
def test_times_count_as_shares_of_the_eager_time_beside_them(slow: float) -> None:
    """A program and eager beside it both take longer in some memory: that earns nothing and costs nothing."""
    before, after = timed(10.0), timed(9.0 * slow, eager_ms=10.0 * slow)
    moved = Transition(Step(ACTION, after, True), 1, before, after, before, after)
    assert MilestoneReward().update(moved) == pytest.approx(1.09)
    assert PaperReward(decay=0.0).update(moved) == pytest.approx(1.6)
    assert LogSpeedupReward().update(moved) == pytest.approx(math.log(10 / 9))
    same = timed(10.0 * slow, eager_ms=10.0 * slow)
    still = Transition(Step(ACTION, same, True), 1, before, same, before, same)
    assert MilestoneReward().update(still) == pytest.approx(0.09)
    assert PaperReward(decay=0.0).update(still) == pytest.approx(0.6)
    assert LogSpeedupReward().update(still) == pytest.approx(0.0)


def test_gains_within_the_noise_of_the_ranking_earn_nothing() -> None:
    for new, old in ((timed(4.0), timed(5.0)), (timed(4.99), timed(5.0)), (timed(4.8, 0.03), timed(5.0, 0.03))):
        paid = PaperReward(decay=0.0).update(Transition(Step(ACTION, new, True), 1, old, new)) > 1
        assert paid == beats(new, old)


def test_failures_cost() -> None:
    reward = MilestoneReward()
    assert reward.update(refused(Gate.COMPILE)) == pytest.approx(-0.11) == reward.low
    assert reward.update(NOTHING) == pytest.approx(-0.11)
    assert reward.update(GRAPH_ONLY) == pytest.approx(-0.01)


def test_the_papers_table() -> None:
    reward = PaperReward(decay=0.0)
    assert reward.update(refused(Gate.COMPILE)) == -1.0
    assert reward.update(refused(Gate.PROGRAM)) == pytest.approx(-0.4)
    assert reward.update(right(5.0, 6.0)) == pytest.approx(0.6)
    assert reward.update(right(5.0, 4.0)) == pytest.approx(1.6)
    assert PaperReward(decay=0.1).update(right(5.0, 4.0, number=3)) == pytest.approx(1.3)


def test_the_log_speedup_telescopes() -> None:
    reward = LogSpeedupReward()
    times = [10.0, 8.0, 9.0, 4.0]
    total, best = 0.0, times[0]
    for before, after in zip(times, times[1:], strict=False):
        moved = right(before, after, best_before=best, best_after=min(best, after))
        total, best = total + reward.update(moved), min(best, after)
    assert total == pytest.approx(math.log(10 / 4))


def test_what_is_found_soon_is_worth_more() -> None:
    reward = AnytimeReward(discount=0.5)
    for _ in range(2):
        assert reward.update(GRAPH_ONLY) == 0  # which costs no evaluation
        assert reward.update(right(10.0, 8.0)) == pytest.approx(math.log(10 / 8))
        assert reward.update(refused(Gate.COMPILE)) == 0  # which costs one: what comes after it is worth less
        assert reward.update(right(8.0, 4.0)) == pytest.approx(0.25 * math.log(2))
        reward.reset()
    assert AnytimeReward(failure=0.02).update(refused(Gate.COMPILE)) == -0.02


@pytest.mark.parametrize(
    "reward",
    [MilestoneReward(), PaperReward(), LogSpeedupReward(), CoverageReward(PaperReward())],
    ids=lambda r: type(r).__name__,
)
def test_rewards_stay_in_their_range(reward: Reward) -> None:
    found = [NOTHING, GRAPH_ONLY, *(refused(g, 64) for g in Gate if g is not Gate.PASSED)]
    found += [right(10.0, 10.0 * f, n) for f in (1e-3, 0.5, 1, 2) for n in (1, 64, 1000)]
    for transition in found:
        reward.reset()
        assert reward.low <= reward.update(transition) <= reward.high


def test_a_copy_goes_its_own_way() -> None:
    reward = MilestoneReward()
    twin = copy.deepcopy(reward)
    reward.update(right(10.0, 4.0))
    assert twin.update(right(10.0, 4.0)) > reward.update(right(10.0, 4.0))


def generated(share: float | None) -> Transition:
    """A step that changes no time, after which this share of it is in generated kernels."""
    moved = right(5.0, 5.0)
    assert moved.step is not None and moved.step.evaluation is not None
    step = replace(moved.step, evaluation=replace(moved.step.evaluation, generated_share=share))
    return replace(moved, step=step)


def test_coverage_is_paid_once_and_taken_back() -> None:
    reward = CoverageReward(LogSpeedupReward(failure=0.0), weight=0.5)
    shares = (0.4, 0.4, None, 0.0, 0.4)
    assert [reward.update(generated(s)) for s in shares] == pytest.approx([0.2, 0, 0, -0.2, 0.2])
    assert reward.update(refused(Gate.COMPILE)) == reward.update(GRAPH_ONLY) == 0
    reward.reset()
    assert reward.update(generated(1.0)) == pytest.approx(0.5)


def test_rewards_are_made_by_name() -> None:
    assert type(make_reward("milestones")) is MilestoneReward and set(REWARDS) == {
        "milestones",
        "paper",
        "log-speedup",
        "anytime",
    }
    made = make_reward("paper", 0.3)
    assert isinstance(made, CoverageReward) and isinstance(made.inner, PaperReward) and made.weight == 0.3
    with pytest.raises(ValueError, match="unknown reward 'speed'; known: anytime, log-speedup, milestones, paper"):
        make_reward("speed")
    with pytest.raises(ValueError, match="must not be negative"):
        make_reward("paper", -1)
