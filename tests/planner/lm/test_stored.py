"""Stored trees as environments: only what has an answer is offered; the best choices lead to the best program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from qimeng.envs.gym.environment import KernelOptimizationEnv
from qimeng.envs.steps.state import STOP
from qimeng.envs.steps.time_shares import MAX_ACTIONS
from qimeng.interfaces import Action, Evaluation, Gate, Observation, Planner, Timing
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.lm import branches
from qimeng.planner.lm.action_values import STEPS, WORTH, ActionValues
from qimeng.planner.lm.branches import Teacher, best_branch_pairs, imitation_pairs, likeliest, walk_pairs
from qimeng.planner.lm.config import TrainingError
from qimeng.planner.lm.reading import PAD, Reader, ReadObservation
from qimeng.planner.lm.replay import Chance, mean_shares, replay, worth_replaying
from qimeng.planner.lm.sources import split, within
from qimeng.planner.lm.stored import Offer, StoredTask
from qimeng.planner.search import ScoringPlanner
from qimeng.store import StoredStep

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
            assert not masks[0] or masks.sum() == 1, "to stop is a choice where there is no other"
            assert ((seen["action_ids"].reshape(MAX_ACTIONS, -1)[:, 0] != PAD) == masks).all()
            left_out += KernelOptimizationEnv.action_masks(env.unwrapped).sum() - masks.sum()
            seen, _, terminated, truncated, _ = env.step(draw.choice(np.flatnonzero(masks)))
            step = env.unwrapped.session.state.history[-1]
            assert step.evaluation is None or step.evaluation.failure != "unknown"
            taken, over = taken + 1, terminated or truncated
    assert taken > 20 and left_out > 0 and 0 < offer.coverage < 1


def test_what_is_not_offered_may_be_read_all_the_same(stored: Stored, reader: Reader) -> None:
    base = KernelOptimizationEnv([s.task for s in stored], max_steps=8)
    env = ReadObservation(base, reader, Offer.of(stored), whole=True)
    seen, _ = env.reset(seed=0)
    read = seen["action_ids"].reshape(MAX_ACTIONS, -1)[:, 0] != PAD
    assert (read == base.action_masks()).all() and env.action_masks().sum() < read.sum()


def test_a_live_task_offers_all(stored: Stored) -> None:
    offer = Offer.of(stored[:1])
    seen = stored[1].begin().observe()
    assert offer(stored[1].task, seen).all() and offer.coverage == 1
    before = offer.states
    assert not offer(stored[0].task, stored[0].begin().observe()).all() and offer.states == before + 1


def test_the_best_choices_lead_to_the_best_program(stored: Stored) -> None:
    for one in stored:
        session = one.begin()
        pairs = list(best_branch_pairs(one, 32, Teacher(0.999, guide="")))
        assert all(set(choice) <= set(seen.actions) - {STOP} for seen, choice in pairs)
        assert all(sum(choice.values()) == pytest.approx(1) for _, choice in pairs)
        for _, choice in pairs:
            session.step(likeliest(choice))
        assert session.ledger.best is not None and one.best_ms < one.start_ms
        assert session.ledger.best.ms == pytest.approx(one.best_ms, rel=1 - WORTH)


def test_walks_are_labelled_by_what_would_be_best(stored: Stored) -> None:
    alone = Teacher(guide="")
    found = list(walk_pairs(stored[0], 12, 3, alone))
    assert [c for _, c in found] == [c for _, c in walk_pairs(stored[0], 12, 3, alone)]
    assert any(STOP not in choice for _, choice in found)
    both = list(imitation_pairs(stored[:2], walks=1, steps=8))
    assert len(both) > sum(len(list(best_branch_pairs(s, 8))) for s in stored[:2])


def test_of_two_ways_the_one_with_fewer_evaluations_is_worth_more(stored: Stored) -> None:
    for one in stored:
        seen, action_values = one.begin().observe(), ActionValues(one.tree)
        late, soon = action_values.worth(seen, 0.999), action_values.worth(seen, 0.5)
        assert STOP not in soon and set(soon) <= set(one.offered(seen))
        assert max(soon.values()) < max(late.values(), default=0) or not late
        for action, worth in soon.items():
            session = one.begin()
            assert session.step(action).accepted
            then = session.observe()
            judged = session.state.history[-1].evaluation is not None
            assert then.best_ms is not None
            gained = math.log(one.start_ms / then.best_ms) if judged else 0.0
            to_come = max(action_values.worth(then, 0.5).values(), default=0.0)
            assert worth == pytest.approx(0.5 ** (judged + 1 / STEPS) * (gained + to_come), abs=0.02)


def test_the_larger_gain_comes_first(stored: Stored) -> None:
    """Two kernels on a way: both orders end with the same program, one finds most of the gain an evaluation sooner."""
    one = stored[0]
    a, b = (Action("lowering", (r,)) for r in ("large", "small"))
    ms = {"start": 10.0, "a": 4.0, "b": 8.0, "ab": 3.2}
    ways = (("start", a, "a"), ("start", b, "b"), ("a", b, "ab"), ("b", a, "ab"))
    edges = tuple(StoredStep(p, action, None, f"{p}{c}", True, c) for p, action, c in ways)
    judged = tuple(("step", d, Evaluation(Gate.PASSED, timing=Timing(t))) for d, t in ms.items())
    action_values = ActionValues(replace(one.tree, edges=edges, evaluations=judged))
    seen = one.begin().observe()
    program = replace(seen.program, fallback="start")
    object.__setattr__(program, "digest", "start")
    worth = action_values.worth(replace(seen, program=program, actions=(STOP, a, b), best_ms=10.0), 0.9)
    one_step = 0.9 ** (1 + 1 / STEPS)
    assert worth[a] == pytest.approx(one_step * (math.log(10 / 4) + one_step * math.log(4 / 3.2)))
    assert worth[b] == pytest.approx(one_step * (math.log(10 / 8) + one_step * math.log(8 / 3.2)))
    assert worth[a] > worth[b]


def test_nothing_leads_away_from_what_is_to_be_gained(stored: Stored) -> None:
    for one in stored:
        for discount in (0.9, 0.999):
            passed = [seen.program.digest for seen, _ in best_branch_pairs(one, 64, Teacher(discount, guide=""))]
            assert len(passed) == len(set(passed))


def test_what_is_about_as_good_is_about_as_likely(stored: Stored) -> None:
    for one in stored:
        seen, action_values = one.begin().observe(), ActionValues(one.tree)
        worth = action_values.worth(seen, 0.9)
        alone, some = (
            Teacher(tolerance=0).choice(action_values, seen),
            Teacher(tolerance=0.5).choice(action_values, seen),
        )
        assert list(alone.values()) == [1.0] and set(alone) <= set(some)
        by_worth = sorted(some, key=lambda a: worth[a])
        assert [some[a] for a in by_worth] == sorted(some.values())


def test_an_action_can_be_as_likely_as_it_is_worth() -> None:
    a, b, c, d = (Action(kind, ("r",)) for kind in ("lowering", "library", "special", "split"))
    worth = {a: 0.3, b: 0.1, c: 0.0, d: 0.0001}
    assert Teacher(power=1).among(worth) == pytest.approx({a: 0.75, b: 0.25}), (
        "what is worth next to nothing is left out"
    )
    assert Teacher(power=2).among({**worth, d: -0.1}) == pytest.approx({a: 0.9, b: 0.1})
    assert Teacher(power=1, tolerance=0).among({a: 0.0, b: -1.0}) == {a: 1.0}, "nothing is worth anything"


def test_the_guide_decides_where_the_tree_does_not(stored: Stored) -> None:
    teacher, guide = Teacher(), HeuristicPlanner()
    for one in stored:
        session, action_values = one.begin(), ActionValues(one.tree)
        seen = session.observe()
        choice, chosen = teacher.choice(action_values, replace(seen, actions=one.offered(seen))), guide.choose(seen)
        other = next(a for a in seen.actions if a not in (STOP, chosen))
        known = next(a for a in seen.actions if a != STOP and action_values.tried(seen, a))
        unknown = Action("tiling", ("elsewhere",))
        # equally good for the tree: the guide's is likelier by its trust, and what is not the guide's stays possible
        advised = (
            teacher.advice(action_values, seen, {chosen: 0.5, other: 0.5}) if action_values.tried(seen, chosen) else {}
        )
        assert not advised or advised[chosen] == pytest.approx(teacher.trust * advised[other])
        for action, expected in ((known, {STOP: 1.0}), (unknown, {unknown: 1.0})):  # nothing better is known
            assert _advised_by(action, teacher, action_values, seen, {STOP: 1.0}) == expected
        # what the tree knows to be worse does not become better, what it does not know may be as good
        assert _advised_by(known, teacher, action_values, seen, {other: 1.0}).get(known, 0.0) == float(known == other)
        assert _advised_by(unknown, teacher, action_values, seen, {known: 1.0}) == {known: 0.5, unknown: 0.5}
        assert Teacher(guide="").advice(action_values, seen, choice) is choice


def _advised_by(
    action: Action, teacher: Teacher, action_values: ActionValues, seen: Observation, choice: Mapping[Action, float]
) -> Mapping[Action, float]:
    """The advice of `teacher` with a guide that chooses `action`."""

    class Guide(Planner):
        def choose(self, observation: Observation) -> Action:
            return action

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "make_planner", lambda name: Guide())
        return teacher.advice(action_values, seen, choice)


def test_guided_pairs_offer_all_that_is_legal(stored: Stored) -> None:
    for one in stored:
        guided, alone = (list(walk_pairs(one, 8, 1, Teacher(guide=guide))) for guide in ("heuristic", ""))
        assert all(set(choice) <= set(seen.actions) for seen, choice in guided)
        assert max(len(seen.actions) for seen, _ in guided) > max((len(seen.actions) for seen, _ in alone), default=0)
        assert not any(STOP in choice for _, choice in guided)


class Knowing(ScoringPlanner):
    """Scores the best branch's step above all."""

    def __init__(self, stored: StoredTask):
        pairs = best_branch_pairs(stored, 32, Teacher(guide=""))
        self.pairs = [(seen.program.digest, likeliest(choice)) for seen, choice in pairs]

    def scores(self, observation: Observation) -> Sequence[float]:
        wanted = dict(self.pairs).get(observation.program.digest)
        return [float(a == wanted) for a in observation.actions]


def test_who_knows_the_tree_is_not_behind_chance(stored: Stored) -> None:
    one = max(stored, key=lambda s: s.gain)
    assert worth_replaying([one]) == [one]
    known, chance = replay(Knowing(one), one), replay(Chance(), one)
    assert known.first == pytest.approx(1.0, abs=0.02) and known.area > chance.area - 1e-3  # chance may be lucky
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
    with pytest.raises(TrainingError, match=r"no tree is of family 'a,b'; there are .*several are a list, such as \["):
        split(trees, 0.0, ("a,b",))
    with pytest.raises(TrainingError, match=r"all 2 trees are held out: give more trees, or lower held_out"):
        split(trees[:1] * 2, 0.9)


def test_a_budget_pays_for_whole_trees(stored: Stored) -> None:
    trees = [s.tree for s in stored]
    most = max(len(t.evaluations) for t in trees)
    chosen = within(trees, 2 * most)
    assert 1 <= len(chosen) < len(trees) and sum(len(t.evaluations) for t in chosen) <= 2 * most
    with pytest.raises(TrainingError, match="no tree holds at most 1 evaluations"):
        within(trees, 1)


def test_a_teacher_with_impossible_settings_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Teacher(discount=1.0)
    with pytest.raises(ValueError, match="must not be negative; got 0.9, -1 and 0.0"):
        Teacher(0.9, -1)
    with pytest.raises(ValueError, match="heuristic"):
        Teacher(guide="me")
    with pytest.raises(ValueError, match="must be positive, got 0"):
        Teacher(trust=0)
