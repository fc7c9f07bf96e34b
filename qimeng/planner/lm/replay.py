"""Measures a planner on stored trees: the share of the best-known gain after a number of evaluations.

Deals in scores over explored actions. Knows nothing about the source of the scores, so trained, untrained and random
planners can be compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace

from qimeng.envs.steps.state import State
from qimeng.interfaces import Action, Observation
from qimeng.planner.lm.stored import ENDLESS, StoredTask
from qimeng.planner.search import ScoringPlanner, best_action

AT = (5, 10, 20, 40)
"""Evaluations after which the share is reported."""

STEPS = 32
"""Longest trajectory."""

IDLE = 8
"""Trajectories in a row that judge nothing new, after which no more are begun."""

GAIN = 1.1
"""Trees with a smaller best-known gain cannot tell planners apart."""


@dataclass(frozen=True)
class Replayed:
    """What one planner reached on one tree.

    Attributes:
        name: the spec.
        curve: after 1, 2, 3 … evaluations, the start program's included, log(start / best so far) over log(start / best
            known), device times.
        first: the share that the first, greedy trajectory ends with.
    """

    name: str
    curve: tuple[float, ...]
    first: float

    @property
    def area(self) -> float:
        """Mean of the curve: 1 for a planner that knows the best program at once."""
        return sum(self.curve) / len(self.curve)


Following = Generator[Observation, Sequence[float], Replayed]


class Chance(ScoringPlanner):
    """Gives every action the same score."""

    def scores(self, observation: Observation) -> Sequence[float]:
        """Zeros."""
        return [0.0] * len(observation.actions)


def replay(
    planner: ScoringPlanner, stored: StoredTask, evaluations: int = 20, steps: int = STEPS, seed: int = 0
) -> Replayed:
    """Follow `planner` through the tree.

    The first trajectory takes the best-scored action of each state; then others begin at the start, with actions drawn
    from the softmax of the scores, until the evaluations are used up or nothing is new. After n trajectories in a row
    without anything new, scores are divided by 1 + n, so that a confident planner explores too. Actions without an
    answer in the tree are not offered.
    """
    return _side_by_side(planner, [_follow(stored, evaluations, steps, seed)])[0]


def _follow(stored: StoredTask, evaluations: int, steps: int, seed: int) -> Following:
    """One replay: yields what is to be scored, is sent the scores."""
    draw, session = random.Random(f"{seed} {stored.tree.conditions.spec}"), stored.begin(ENDLESS.steps, evaluations)
    root, ledger, idle, first = session.state, session.ledger, 0, None
    reached: dict[int, float] = {1: 0.0}
    known: dict[object, list[float]] = {}  # a state that comes again (the start, above all) is scored once
    walked: dict[tuple[Action, ...], State] = {}  # and a step that is taken again needs no answer
    while idle < IDLE and ledger.evaluations < evaluations:
        branch, before = session.fork(), ledger.evaluations
        branch.return_to(root)
        path: tuple[Action, ...] = ()
        for _ in range(steps):
            if branch.exhausted() is not None:
                break
            seen = branch.observe()
            seen = replace(seen, actions=stored.offered(seen))
            if first is None:
                action = best_action(seen, (yield seen))
            else:
                key = (seen.program.digest, seen.best_ms, seen.actions, tuple(s.action for s in seen.history))
                if key not in known:
                    scores = yield seen
                    known[key] = [s - max(scores) for s in scores]
                action = draw.choices(seen.actions, [math.exp(s / (1 + idle)) for s in known[key]])[0]
            path = (*path, action)
            if path not in walked:
                branch.step(action)
                walked[path] = branch.state
            branch.state = walked[path]
            reached[ledger.evaluations] = _share(stored, ledger.best.ms if ledger.best else None)
        first = reached[ledger.evaluations] if first is None else first
        idle = 0 if ledger.evaluations > before else idle + 1
    curve = [max(share for count, share in reached.items() if count <= n) for n in range(1, evaluations + 1)]
    return Replayed(stored.tree.name, tuple(curve), first or 0.0)


def _side_by_side(planner: ScoringPlanner, replays: Sequence[Following]) -> list[Replayed]:
    """What comes of each; they go on together, so that the planner scores many states in one pass."""
    ended: dict[int, Replayed] = {}
    given: dict[int, Sequence[float] | None] = dict.fromkeys(range(len(replays)))
    while given:
        asked: dict[int, Observation] = {}
        for number, scores in given.items():
            try:
                asked[number] = next(replays[number]) if scores is None else replays[number].send(scores)
            except StopIteration as end:
                ended[number] = end.value
        given = dict(zip(asked, planner.scores_of(list(asked.values())), strict=True))
    return [ended[i] for i in range(len(replays))]


def worth_replaying(stored: Sequence[StoredTask]) -> list[StoredTask]:
    """Those with a best-known gain of at least `GAIN`."""
    return [s for s in stored if s.gain >= GAIN]


def mean_shares(
    planner: ScoringPlanner, stored: Sequence[StoredTask], evaluations: int = 20, seeds: Sequence[int] = (0,)
) -> dict[str, float]:
    """Means over `stored` and `seeds`.

    Returns:
        ``share at 5`` and so on up to `evaluations`; ``area``; ``greedy``: what the greedy trajectory alone ends with.
    """
    found = _side_by_side(planner, [_follow(s, evaluations, STEPS, seed) for s in stored for seed in seeds])
    if not found:
        return {}
    means = {f"share at {n}": _mean(r.curve[n - 1] for r in found) for n in AT if n <= evaluations}
    return {**means, "area": _mean(r.area for r in found), "greedy": _mean(r.first for r in found)}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _share(stored: StoredTask, best_ms: float | None) -> float:
    whole = math.log(stored.gain)
    return math.log(stored.start_ms / best_ms) / whole if best_ms and whole else 0.0


__all__ = ["AT", "GAIN", "IDLE", "Chance", "Replayed", "mean_shares", "replay", "worth_replaying"]
