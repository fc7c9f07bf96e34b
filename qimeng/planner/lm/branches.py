"""What to imitate: the best branches of stored trees, and what would have been best off them.

Deals in pairs of what is seen and what is to be chosen. Knows nothing about models.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from qimeng.envs.session import STOP, Session
from qimeng.interfaces import Action, Observation
from qimeng.planner.lm.stored import StoredTask

WORTH = 0.99
"""A branch whose end takes this share of the best time so far, or more, is not worth going: the choice is `stop`."""

WALK = 16
"""Longest random walk that is imitated."""

Pair = tuple[Observation, Action]


def best_choice(stored: StoredTask, session: Session) -> Action:
    """The first step of the best branch from here, where it leads to a program faster than the best so far; `stop`."""
    branch, best = stored.branch(session.state.program.digest), session.ledger.best
    if not branch or best is None or best.ms is None:
        return STOP
    return branch[0].action if stored.tree.times[branch[-1].child or ""] < WORTH * best.ms else STOP


def best_branch_pairs(stored: StoredTask, steps: int) -> Iterator[Pair]:
    """Along the best branch from the start to the end, `stop` there included; at most `steps` pairs."""
    session = stored.begin(steps)
    while session.exhausted() is None:
        seen, choice = session.observe(), best_choice(stored, session)
        if choice not in seen.actions:  # its kind is not registered here, or it was cut
            return
        yield seen, choice
        session.step(choice)


def walk_pairs(stored: StoredTask, steps: int, seed: int) -> Iterator[Pair]:
    """Along a random walk through the tree, the best choice in each state; at most `steps` pairs.

    States from which the tree knows nothing better are passed over: more was never tried there, which is no reason to
    stop, and a policy that imitates it stops too soon.
    """
    draw, session = random.Random(f"{seed} {stored.tree.conditions.spec}"), stored.begin(steps)
    while session.exhausted() is None:
        seen, choice = session.observe(), best_choice(stored, session)
        if choice != STOP and choice in seen.actions:
            yield seen, choice
        session.step(draw.choice([a for a in stored.offered(seen) if a != STOP] or [STOP]))


def imitation_pairs(stored: Sequence[StoredTask], walks: int = 0, steps: int = 16, seed: int = 0) -> Iterator[Pair]:
    """The best branch of each tree, at most `steps` steps, and `walks` random walks through each, at most `WALK`."""
    for one in stored:
        yield from pairs_of(one, walks, steps, seed)


def pairs_of(stored: StoredTask, walks: int = 0, steps: int = 16, seed: int = 0) -> list[Pair]:
    """Those of one tree."""
    found = list(best_branch_pairs(stored, steps))
    for number in range(walks):
        found += walk_pairs(stored, min(steps, WALK), seed + number)
    return found


__all__ = ["WALK", "WORTH", "Pair", "best_branch_pairs", "best_choice", "imitation_pairs", "pairs_of", "walk_pairs"]
