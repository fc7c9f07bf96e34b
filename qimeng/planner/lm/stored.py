"""Stored trees as something to train on: which actions a tree can answer, how much of the legal ones that is.

Deals in masks over legal actions. Knows nothing about policies. An action that is legal and was never tried is not
offered: no answer is made up for it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, TypeVar

import numpy as np

from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import STOP, Budget
from qimeng.envs.steps.task import Task
from qimeng.errors import QimengError
from qimeng.interfaces import Action, Coder, Observation
from qimeng.planner.data.closure import closed
from qimeng.planner.data.tree import Tree
from qimeng.planner.lm.disk_cache import cached
from qimeng.planner.lm.processes import in_processes
from qimeng.program.program import Program
from qimeng.store import Conditions, StoredStep

T = TypeVar("T")

ENDLESS = Budget(seconds=float("inf"), evaluations=1 << 30, steps=1 << 30)
"""No limit but the tree's own."""


@dataclass(frozen=True)
class StoredTask:
    """A tree, with the names of today's programs, and the task that walks it.

    Attributes:
        tree: what was explored.
        task: answers from it.
        portable: whether it can be sent to another process; a store in memory cannot.
    """

    tree: Tree
    task: Task
    portable: ClassVar[bool] = False

    def begin(self, steps: int = ENDLESS.steps, evaluations: int = ENDLESS.evaluations) -> Session:
        """An episode at the start program, judged."""
        session = Session(self.task, replace(ENDLESS, steps=steps, evaluations=evaluations))
        session.begin()
        return session

    def offered(self, seen: Observation) -> tuple[Action, ...]:
        """Of `seen.actions`, those that the tree has an answer for; `stop` where there is none.

        To stop is no choice elsewhere, as for the planner that comes of it (`LanguageModelPlanner`).
        """
        known = self.known.get(seen.program.digest, frozenset())
        return tuple(a for a in seen.actions if a != STOP and a in known) or (STOP,)

    @cached_property
    def known(self) -> dict[str, frozenset[Action]]:
        """Digest of a program to the actions on it that the tree can answer (`Tree.answered`)."""
        return {parent: frozenset(actions) for parent, actions in self.tree.answered.items()}

    @cached_property
    def best_ms(self) -> float:
        """Device milliseconds of the fastest program that is reached from the start."""
        branch = self.branch(self.task.start.digest)
        return self.tree.times[branch[-1].child or ""] if branch else self.start_ms

    @property
    def start_ms(self) -> float:
        """Device milliseconds of the start program."""
        return self.tree.times[self.task.start.digest]

    @property
    def gain(self) -> float:
        """The start program's time over the best-known one's."""
        return self.start_ms / self.best_ms

    def branch(self, digest: str) -> tuple[StoredStep, ...]:
        """`Tree.best_branch`, looked up once for each program."""
        if digest not in self._branches:
            self._branches[digest] = self.tree.best_branch(digest)
        return self._branches[digest]

    @cached_property
    def _branches(self) -> dict[str, tuple[StoredStep, ...]]:
        return {}


def stored_tasks(trees: Iterable[Tree], coder: str | Coder = "template") -> Iterator[StoredTask]:
    """Tasks of those trees that can be walked: captured as they were, their start program judged right.

    Each tree has the steps of `closed` besides.

    Many trees are captured on all cores (`in_processes`), by processes that import the script that is running: keep
    what it does below ``if __name__ == "__main__":``.
    """
    return (one for one, _ in looked_through(trees, coder))


def looked_through(
    trees: Iterable[Tree], coder: str | Coder, look: Callable[[StoredTask], Sequence[T]] | None = None
) -> Iterator[tuple[StoredTask, Sequence[T]]]:
    """The tasks of `stored_tasks`, each with what `look` finds in it, in the process that captured it.

    Args:
        trees: of which some cannot be walked.
        coder: says what is legal.
        look: a function that can be pickled, and so can what it returns; None to look for nothing.
    """
    listed = list(trees)
    # in an order of each process's own: of several that start at once, one finds what another has kept
    order = random.Random(os.getpid()).sample(range(len(listed)), len(listed))
    work = partial(_begun, coder=coder, look=look)
    made = dict(zip(order, in_processes(work, [listed[i] for i in order], chunk=2), strict=True))
    begun = (made[i] for i in range(len(listed)))
    for found in begun:
        if found is not None and (one := _task(*found[:2], coder)) is not None:
            yield one, found[2]


def _begun(
    tree: Tree, coder: str | Coder, look: Callable[[StoredTask], Sequence[T]] | None
) -> tuple[Tree, Program, Sequence[T]] | None:
    """The tree as it is walked, the program that it begins with, and what `look` finds; None where it cannot be."""

    def walked() -> tuple[Tree, Program]:
        start = tree.start()
        return closed(tree.today(start), start, coder), start

    try:
        now, start = cached(f"{tree.digest} {coder}", walked) if isinstance(coder, str) else walked()
    except QimengError:
        return None
    one = _task(now, start, coder) if look is not None else None
    return now, start, look(one) if look is not None and one is not None else ()


def _task(tree: Tree, start: Program, coder: str | Coder) -> StoredTask | None:
    try:
        task = tree.task(coder, start, current=True)
    except QimengError:
        return None
    return StoredTask(tree, task) if task.start.digest in tree.times else None


@dataclass
class Offer:
    """Says which of a state's legal actions may be chosen, and counts how many those are.

    Tasks without a tree (live ones) offer everything that is legal.

    Attributes:
        stored: the trees, by the conditions of their tasks.
        states: states asked about.
        shares: sum over them of the share of legal actions, `stop` left out, that were offered.
    """

    stored: dict[Conditions, StoredTask] = field(default_factory=dict)
    states: int = 0
    shares: float = 0.0

    @classmethod
    def of(cls, stored: Sequence[StoredTask]) -> Offer:
        """For these trees."""
        return cls({s.task.conditions: s for s in stored})

    def __call__(self, task: Task, seen: Observation) -> np.ndarray:
        """One bool for each of `seen.actions`."""
        found = np.ones(len(seen.actions), dtype=bool)
        stored = self.stored.get(task.conditions)
        if stored is not None:
            offered = set(stored.offered(seen))
            found = np.asarray([a in offered for a in seen.actions], dtype=bool)
        moves = np.asarray([a != STOP for a in seen.actions], dtype=bool)
        if moves.any():
            self.states += 1
            self.shares += float((found & moves).sum() / moves.sum())
        return found

    @property
    def coverage(self) -> float:
        """Mean share of the legal actions that were offered, over the states so far; 1 where there were none."""
        return self.shares / self.states if self.states else 1.0


__all__ = ["ENDLESS", "Offer", "StoredTask", "looked_through", "stored_tasks"]
