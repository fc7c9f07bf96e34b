"""What to imitate: the best choices along the best branches of stored trees, and off them.

Deals in pairs of what is seen and how likely each action is to be chosen. Knows nothing about models, nor about how the
worth of an action is found (`qimeng.planner.lm.outlook`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qimeng.envs.session import STOP, Session
from qimeng.interfaces import Action, Observation
from qimeng.planner.lm.outlook import Outlook
from qimeng.planner.lm.stored import StoredTask

WALK = 16
"""Longest random walk that is imitated."""

ASTRAY = 0.5
"""How likely a step of a walk is any, and not one of the best: a policy strays now and then, not all the time."""

LEAST = 0.01
"""Actions less likely than this share of the likeliest are not imitated."""

Choice = Mapping[Action, float]
"""How likely each action is to be chosen; the sum is 1."""

Pair = tuple[Observation, Choice]
"""The observation offers what the tree has an answer for alone: of all else, nothing is known to be worse."""


@dataclass(frozen=True)
class Teacher:
    """What is best in a state, by what the trees know (`Outlook.worth`).

    Attributes:
        discount: of a gain, for each evaluation before it; between 0, for what is gained at once, and 1, for the best
            program in the end, however late, both excluded.
        tolerance: an action that is worth less than the best one, by this share of it, is chosen 1/e times as often:
            several orders of the same steps are equally good, and times have noise. 0 for the best alone.
    """

    discount: float = 0.9
    tolerance: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.discount < 1 or self.tolerance < 0:
            raise ValueError(
                "the discount must lie between 0 and 1, the tolerance must not be negative; "
                f"got {self.discount} and {self.tolerance}"
            )

    def choice(self, outlook: Outlook, seen: Observation) -> Choice:
        """How likely each action is to be chosen; `stop` where the tree knows nothing better than the best so far."""
        worth = outlook.worth(seen, self.discount)
        if not worth:
            return {STOP: 1.0}
        best = max(worth, key=lambda a: worth[a])
        scale = self.tolerance * worth[best]
        weights = {a: math.exp((w - worth[best]) / scale) if scale else float(a == best) for a, w in worth.items()}
        kept = {a: w for a, w in weights.items() if w >= LEAST}
        total = sum(kept.values())
        return {a: w / total for a, w in kept.items()}


def likeliest(choice: Choice) -> Action:
    """The likeliest action; of equal ones the first."""
    return max(choice, key=lambda a: choice[a])


def best_branch_pairs(stored: StoredTask, steps: int, teacher: Teacher | None = None) -> Iterator[Pair]:
    """Along the best branch from the start to the end, `stop` there included; at most `steps` pairs."""
    session, outlook, teacher = stored.begin(steps), Outlook(stored.tree), teacher or Teacher()
    while session.exhausted() is None:
        choice = teacher.choice(outlook, seen := _offered(stored, session))
        yield seen, choice
        session.step(likeliest(choice))


def walk_pairs(stored: StoredTask, steps: int, seed: int, teacher: Teacher | None = None) -> Iterator[Pair]:
    """Along a walk through the tree that goes astray, the best choice in each state; at most `steps` pairs.

    States from which the tree knows nothing better are passed over: more was never tried there, which is no reason to
    stop, and a policy that imitates it stops too soon.
    """
    draw, session = random.Random(f"{seed} {stored.tree.conditions.spec}"), stored.begin(steps)
    outlook, teacher = Outlook(stored.tree), teacher or Teacher()
    while session.exhausted() is None:
        choice = teacher.choice(outlook, seen := _offered(stored, session))
        if STOP not in choice:
            yield seen, choice
        if STOP in choice or draw.random() < ASTRAY:
            session.step(draw.choice([a for a in seen.actions if a != STOP] or [STOP]))
        else:
            session.step(draw.choices(list(choice), list(choice.values()))[0])


def _offered(stored: StoredTask, session: Session) -> Observation:
    seen = session.observe()
    return replace(seen, actions=stored.offered(seen))


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
    "WALK", "Choice", "Pair", "Teacher", "best_branch_pairs", "imitation_pairs", "likeliest", "pairs_of", "walk_pairs",
]  # fmt: skip
