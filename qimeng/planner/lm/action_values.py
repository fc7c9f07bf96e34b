"""The value of each action in a stored tree: the later gain, and the number of evaluations until it.

Deals in times, evaluations and steps. Knows nothing about what is made of the worth of an action.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qimeng.interfaces import Action, Observation
from qimeng.planner.data.tree import Tree
from qimeng.store import StoredStep

STEPS = 16
"""This many steps count as one evaluation, so the shorter of two ways with equal evaluations is better."""

WORTH = 0.99
"""A program gains nothing if it takes this share of the best time so far, or more: the difference is noise."""

EPSILON = 1e-9


class ActionValues:
    """The worth of actions in a tree: the best discounted return that follows from them.

    A gain is the logarithm of the best time so far over a better one, paid when it is found. With the cost of a step
    its evaluations and a `STEPS` th for itself, p the program, b the best time so far and a a step that leads to p'::

        worth(p, b, a) = discount^cost(a) (gain(b, p') + value(p', min(b, time of p')))
        value(p, b)    = the largest worth, 0 where nothing is gained any more

    So early gains count more than late ones, large gains come first, and fusing first and measuring once is worth more
    than measuring in between.

    Args:
        tree: what was explored, with the names of today's programs (`Tree.today`).
    """

    def __init__(self, tree: Tree):
        self._edges = {(e.parent, e.action): e for e in tree.edges if e.accepted and e.child is not None}
        self._tried = {(e.parent, e.action) for e in tree.edges}
        start = {t for t in tree.times.values() if t > 0}
        self._levels = np.asarray(sorted(start) or [1.0])
        self._after = {e.child: self._reached(tree.times.get(e.child or "")) for e in self._edges.values()}
        self._values: dict[float, Mapping[str, np.ndarray]] = {}

    def worth(self, seen: Observation, discount: float) -> dict[Action, float]:
        """Of each of `seen.actions` that leads to a gain, and nearer to it than one is already, what it is worth.

        Nearer: what it gains and what is to be gained after it are together more than what is to be gained now.
        """
        if discount not in self._values:
            self._values[discount] = self._solved(discount)
        values, here = self._values[discount], seen.program.digest
        if seen.best_ms is None or here not in values:
            return {}
        level = int(np.abs(self._levels - seen.best_ms).argmin())
        found = dict[Action, float]()
        for action in seen.actions:
            edge = self._edges.get((here, action))
            if edge is not None:
                then, gained = self._after[edge.child]
                after = gained[level] + values[edge.child or ""][then[level]]
                if after > values[here][level] + EPSILON:
                    found[action] = float(after) * discount ** _cost(edge)
        return found

    def tried(self, seen: Observation, action: Action) -> bool:
        """Whether the tree knows the result of `action`, refused or not."""
        return (seen.program.digest, action) in self._tried

    def _reached(self, ms: float | None) -> tuple[np.ndarray, np.ndarray]:
        """For each best time so far: the number of the one after a program of `ms` milliseconds, and the gain."""
        numbers = np.arange(len(self._levels))
        if ms is None:
            return numbers, np.zeros(len(numbers))
        then = np.where(ms < WORTH * self._levels, int(np.searchsorted(self._levels, ms)), numbers)
        return then, np.log(self._levels / self._levels[then])

    def _solved(self, discount: float) -> Mapping[str, np.ndarray]:
        """The value of each program, for each best time so far: passes over the steps until nothing changes."""
        steps = [(e.parent, e.child or "", *self._after[e.child], discount ** _cost(e)) for e in self._edges.values()]
        found = {d: np.zeros(len(self._levels)) for p, c, *_ in steps for d in (p, c)}
        changed = {child for _, child, *_ in steps}
        while changed:
            now = set[str]()
            for parent, child, then, gained, factor in reversed(steps):
                if child in changed or child in now:
                    worth = factor * (gained + found[child][then])
                    if (worth > found[parent] + EPSILON).any():
                        np.maximum(found[parent], worth, out=found[parent])
                        now.add(parent)
            changed = now
        return found


def _cost(edge: StoredStep) -> float:
    return (edge.evaluation is not None) + 1 / STEPS


__all__ = ["STEPS", "WORTH", "ActionValues"]
