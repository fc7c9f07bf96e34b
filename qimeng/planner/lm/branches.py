"""What to imitate: the best choices on and beside the best branches of stored trees.

A tree knows little about most of its states. Most of the tried actions lead to the same gain, and nothing is known
about the others. There a rule-based planner, the guide, chooses among all legal actions. Where the tree knows better,
it decides. Deals in pairs of an observation and the probability of each action. Knows nothing about models, nor about
how the worth of an action is found (`qimeng.planner.lm.action_values`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import STOP
from qimeng.interfaces import Action, Observation
from qimeng.planner import make_planner
from qimeng.planner.lm.action_values import ActionValues
from qimeng.planner.lm.stored import StoredTask

WALK = 16
"""Longest random walk that is imitated."""

ASTRAY = 0.5
"""Probability that a step of a walk is random instead of one of the best."""

LEAST = 0.01
"""Actions less likely than this share of the likeliest are not imitated."""

Choice = Mapping[Action, float]
"""How likely each action is to be chosen; the sum is 1."""

Pair = tuple[Observation, Choice]
"""An observation and a choice. Without a guide, the observation offers only actions that the tree has an answer for."""


@dataclass(frozen=True)
class Teacher:
    """What is best in a state, by what the trees know (`ActionValues.worth`).

    Attributes:
        discount: of a gain, for each evaluation before it; between 0, for what is gained at once, and 1, for the best
            program in the end, however late, both excluded.
        tolerance: an action that is worth less than the best one, by this share of it, is chosen 1/e times as often:
            several orders of the same steps are equally good, and times are noisy. 0 for the best only.
        power: an action is as likely as this power of what it is worth, in place of `tolerance`; 0 for `tolerance`.
            Where chance has a part in what an action is worth, as with the kernels of a language model, a planner that
            imitates this learns from all outcomes, with 1 their mean. The larger it is, the more the best actions
            count. By the best action alone, it would learn what has luck most often.
        guide: name of the planner (`make_planner`) that chooses where the tree does not; empty for none.
        trust: factor on the tree's probability for the guide's choice. A choice that the tree has no answer for is as
            likely as all that the tree finds good.
    """

    discount: float = 0.9
    tolerance: float = 0.03
    power: float = 0.0
    guide: str = "heuristic"
    trust: float = 8.0

    def __post_init__(self) -> None:
        if not 0 < self.discount < 1 or self.tolerance < 0 or self.power < 0:
            raise ValueError(
                "the discount must lie between 0 and 1, the tolerance and the power must not be negative; "
                f"got {self.discount}, {self.tolerance} and {self.power}"
            )
        if self.trust <= 0:
            raise ValueError(f"the trust in the guide must be positive, got {self.trust}")
        if self.guide:
            make_planner(self.guide)

    def choice(self, action_values: ActionValues, seen: Observation) -> Choice:
        """How likely each action is to be chosen; `stop` where the tree knows nothing better than the best so far."""
        worth = action_values.worth(seen, self.discount)
        if not worth:
            return {STOP: 1.0}
        return self.among(worth)

    def among(self, worth: Mapping[Action, float]) -> Choice:
        """How likely each action is to be chosen, by what it is worth."""
        best = max(worth, key=lambda a: worth[a])
        scale = self.tolerance * worth[best]
        if self.power and worth[best] > 0:
            weights = {a: max(0.0, w / worth[best]) ** self.power for a, w in worth.items()}
        else:
            weights = {a: math.exp((w - worth[best]) / scale) if scale else float(a == best) for a, w in worth.items()}
        kept = {a: w for a, w in weights.items() if w >= LEAST}
        total = sum(kept.values())
        return {a: w / total for a, w in kept.items()}

    def advice(self, action_values: ActionValues, seen: Observation, choice: Choice) -> Choice:
        """`choice` of what the tree knows about, and the guide's of all that `seen` offers, as one.

        The guide's choice is `trust` times as likely as in the tree, or as likely as all of `choice` if the tree has no
        answer for it. If the tree knows nothing better than the best so far, only the guide's choice counts; but `stop`
        if the tree knows that it leads nowhere.
        """
        if not self.guide:
            return choice
        chosen = make_planner(self.guide).choose(seen)
        known = chosen == STOP or action_values.tried(seen, chosen)
        if STOP in choice:
            return choice if known else {chosen: 1.0}
        weights = dict(choice)
        weights[chosen] = self.trust * weights.get(chosen, 0.0) if known else 1.0
        total = sum(weights.values())
        return {a: w / total for a, w in weights.items() if w}


def likeliest(choice: Choice) -> Action:
    """The likeliest action; of equal ones the first."""
    return max(choice, key=lambda a: choice[a])


def best_branch_pairs(stored: StoredTask, steps: int, teacher: Teacher | None = None) -> Iterator[Pair]:
    """Along the best branch from the start to the end; at most `steps` pairs, none of which says to stop."""
    session, action_values, teacher = stored.begin(steps), ActionValues(stored.tree), teacher or Teacher()
    while session.exhausted() is None:
        seen, known = _seen(stored, session)
        choice = teacher.choice(action_values, known)
        pair = _pair(teacher, action_values, seen, known, choice)
        if STOP not in pair[1]:
            yield pair
        session.step(likeliest(choice))


def walk_pairs(stored: StoredTask, steps: int, seed: int, teacher: Teacher | None = None) -> Iterator[Pair]:
    """The best choice in each state of a walk with random detours; at most `steps` pairs.

    States are skipped if neither the tree nor a guide knows anything better. Nothing more was tried there, but that is
    no reason to stop, and a policy that imitates it would stop too soon.
    """
    draw, session = random.Random(f"{seed} {stored.tree.conditions.spec}"), stored.begin(steps)
    action_values, teacher = ActionValues(stored.tree), teacher or Teacher()
    while session.exhausted() is None:
        seen, known = _seen(stored, session)
        pair = _pair(teacher, action_values, seen, known, teacher.choice(action_values, known))
        if STOP not in pair[1]:
            yield pair
        choice = {a: w for a, w in pair[1].items() if a in known.actions}
        if not choice or draw.random() < ASTRAY:
            session.step(draw.choice(known.actions))
        else:
            session.step(draw.choices(list(choice), list(choice.values()))[0])


def _seen(stored: StoredTask, session: Session) -> tuple[Observation, Observation]:
    """What is seen, and the same with the actions that the tree has an answer for alone."""
    seen = session.observe()
    return seen, replace(seen, actions=stored.offered(seen))


def _pair(teacher: Teacher, action_values: ActionValues, seen: Observation, known: Observation, choice: Choice) -> Pair:
    return (seen, teacher.advice(action_values, seen, choice)) if teacher.guide else (known, choice)


def imitation_pairs(
    stored: Sequence[StoredTask], walks: int = 0, steps: int = 16, seed: int = 0, teacher: Teacher | None = None
) -> Iterator[Pair]:
    """The best branch of each tree, at most `steps` steps, and `walks` random walks through each, at most `WALK`."""
    for one in stored:
        yield from pairs_of(one, walks, steps, seed, teacher)


def pairs_of(
    stored: StoredTask, walks: int = 0, steps: int = 16, seed: int = 0, teacher: Teacher | None = None
) -> list[Pair]:
    """Those of one tree."""
    found = list(best_branch_pairs(stored, steps, teacher))
    for number in range(walks):
        found += walk_pairs(stored, min(steps, WALK), seed + number, teacher)
    return found


__all__ = [
    "ASTRAY",
    "WALK",
    "Choice",
    "Pair",
    "Teacher",
    "best_branch_pairs",
    "imitation_pairs",
    "likeliest",
    "pairs_of",
    "walk_pairs",
]
