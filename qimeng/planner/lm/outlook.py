"""What each action leads to, by a stored tree: how much is gained, and after how many evaluations.

Deals in times, evaluations and steps. Knows nothing about what is made of the worth of an action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from qimeng.interfaces import Action, Observation
from qimeng.planner.data.tree import Tree
from qimeng.store import StoredStep

AHEAD = 16
"""Evaluations that are looked ahead."""

STEPS = 16
"""So many steps count as much as an evaluation: of two ways with as many evaluations the shorter one is better."""

WORTH = 0.99
"""What takes this share of the best time so far, or more, gains nothing: that much is noise."""


class Outlook:
    """The worth of actions in a tree.

    Args:
        tree: what was explored, with the names of today's programs (`Tree.today`).
    """

    def __init__(self, tree: Tree):
        self._edges = {(e.parent, e.action): e for e in tree.edges if e.accepted and e.child is not None}
        self._least = _least_times(tree)

    def worth(self, seen: Observation, discount: float) -> dict[Action, float]:
        """Of each of `seen.actions` that leads to a gain, and nearer to it than one is already, what it is worth.

        With b the best time so far, and t(k) the least time that is reached at a cost of k, which is the number of
        evaluations and a `STEPS` th of that of steps::

            worth = max over k of discount^k log(b / t(k))        0 where nothing gains more than noise
        """
        best, here = seen.best_ms, self._least.get(seen.program.digest)
        if best is None or here is None:
            return {}
        standing, found = _gain(here, best, discount), dict[Action, float]()
        for action in seen.actions:
            edge = self._edges.get((seen.program.digest, action))
            if edge is not None and edge.child is not None:
                after = _gain(self._least[edge.child], best, discount)
                if after > standing:
                    found[action] = after * discount ** (_cost(edge) / STEPS)
        return found


def _gain(times: np.ndarray, best: float, discount: float) -> float:
    gains = np.where(times < WORTH * best, np.log(best / np.minimum(times, best)), 0.0)
    return float((gains * discount ** (np.arange(len(times)) / STEPS)).max())


def _cost(edge: StoredStep) -> int:
    return 1 + STEPS * (edge.evaluation is not None)


def _least_times(tree: Tree) -> Mapping[str, np.ndarray]:
    """Of each program, the least milliseconds of those reached at a cost of at most 0, 1, 2 … steps."""
    steps = [e for e in tree.edges if e.accepted and e.child is not None]
    names = {d for e in steps for d in (e.parent, e.child) if d is not None}
    found = {d: np.full(AHEAD * (STEPS + 1), tree.times.get(d, math.inf)) for d in names}
    changed = True
    while changed:
        changed = False
        for edge in reversed(steps):
            then, now, cost = found[edge.child or ""], found[edge.parent], _cost(edge)
            if (then[:-cost] < now[cost:]).any():
                np.minimum(now[cost:], then[:-cost], out=now[cost:])
                changed = True
    return found


__all__ = ["AHEAD", "STEPS", "WORTH", "Outlook"]
