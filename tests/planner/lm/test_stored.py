"""Stored trees as environments: only what has an answer is offered; the best choices lead to the best program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from qimeng.envs.environment import KernelOptimizationEnv
from qimeng.envs.session import STOP
from qimeng.envs.shares import MAX_ACTIONS
from qimeng.interfaces import Observation
from qimeng.planner.lm.branches import WORTH, best_branch_pairs, imitation_pairs, walk_pairs
from qimeng.planner.lm.config import TrainingError
from qimeng.planner.lm.reading import PAD, Reader, ReadObservation
from qimeng.planner.lm.replay import Chance, mean_shares, replay, worth_replaying
from qimeng.planner.lm.sources import split, within
from qimeng.planner.lm.stored import Offer, StoredTask
from qimeng.planner.search import ScoringPlanner

Stored = tuple[StoredTask, ...]


def test_only_what_was_explored_is_offered(stored: Stored, reader: Reader) -> None:
    offer = Offer.of(stored)
    env = ReadObservation(KernelOptimizationEnv([s.task for s in stored], max_steps=8), reader, offer)
    draw, taken, left_out = np.random.default_rng(0), 0, 0
    for seed in range(6):
        seen, _ = env.reset(seed=seed)
        over = False
        while not over:
            masks = env.action_masks()
            assert masks[0] and ((seen["action_ids"].reshape(MAX_ACTIONS, -1)[:, 0] != PAD) == masks).all()
            left_out += KernelOptimizationEnv.action_masks(env.unwrapped).sum() - masks.sum()
            choices = np.flatnonzero(masks)
            seen, _, terminated, truncated, _ = env.step(draw.choice(choices[1:] if len(choices) > 1 else choices))
            step = env.unwrapped.session.state.history[-1]
            assert step.evaluation is None or step.evaluation.failure != "unknown"
            taken, over = taken + 1, terminated or truncated
    assert taken > 20 and left_out > 0 and 0 < offer.coverage < 1


def test_a_live_task_offers_all(stored: Stored) -> None:
    offer = Offer.of(stored[:1])
    seen = stored[1].begin().observe()
    assert offer(stored[1].task, seen).all() and offer.coverage == 1
    before = offer.states
    assert offer(stored[0].task, stored[0].begin().observe())[0] and offer.states == before + 1


def test_the_best_choices_lead_to_the_best_program(stored: Stored) -> None:
    for one in stored:
        session = one.begin()
        pairs = list(best_branch_pairs(one, 32))
        assert pairs[-1][1] == STOP and all(choice in seen.actions for seen, choice in pairs)
        for _, choice in pairs:
            session.step(choice)
        assert session.ledger.best is not None and one.best_ms < one.start_ms
        assert session.ledger.best.ms == pytest.approx(one.best_ms, rel=1 - WORTH)


def test_walks_are_labelled_by_what_would_be_best(stored: Stored) -> None:
    found = list(walk_pairs(stored[0], 12, seed=3))
    assert [c for _, c in found] == [c for _, c in walk_pairs(stored[0], 12, seed=3)]
    assert any(choice != STOP for _, choice in found)
    both = list(imitation_pairs(stored[:2], walks=1, steps=8))
    assert len(both) > sum(len(list(best_branch_pairs(s, 8))) for s in stored[:2])


class Knowing(ScoringPlanner):
    """Scores the best branch's step above all."""

    def __init__(self, stored: StoredTask):
        self.pairs = [(seen.program.digest, choice) for seen, choice in best_branch_pairs(stored, 32)]

    def scores(self, observation: Observation) -> Sequence[float]:
        wanted = dict(self.pairs).get(observation.program.digest)
        return [float(a == wanted) for a in observation.actions]


def test_who_knows_the_tree_is_ahead_of_chance(stored: Stored) -> None:
    one = max(stored, key=lambda s: s.gain)
    assert worth_replaying([one]) == [one]
    known, chance = replay(Knowing(one), one), replay(Chance(), one)
    assert known.first == pytest.approx(1.0, abs=0.02) and known.area >= chance.area
    assert known.first > chance.first
    assert chance == replay(Chance(), one) and list(chance.curve) == sorted(chance.curve) and chance.curve[0] == 0
    means = mean_shares(Chance(), stored, 10, (0, 1))
    assert set(means) == {"share at 5", "share at 10", "area", "greedy"} and 0 < means["share at 10"] <= 1


def test_specs_are_held_out_whole(stored: Stored) -> None:
    trees = [s.tree for s in stored] * 2
    kept, held = split(trees, 0.4, seed=1)
    assert len(held) == 4 and not {t.conditions.spec for t in kept} & {t.conditions.spec for t in held}
    family = trees[0].family
    kept, held = split(trees, 0.0, (family,))
    assert {t.family for t in held} == {family} and family not in {t.family for t in kept}


def test_a_budget_pays_for_whole_trees(stored: Stored) -> None:
    trees = [s.tree for s in stored]
    most = max(len(t.evaluations) for t in trees)
    chosen = within(trees, 2 * most)
    assert 1 <= len(chosen) < len(trees) and sum(len(t.evaluations) for t in chosen) <= 2 * most
    with pytest.raises(TrainingError, match="no tree holds at most 1 evaluations"):
        within(trees, 1)
