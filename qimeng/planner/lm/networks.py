"""Stored trees of networks as something to train on: programs put together from parts, and what the best planner does.

Deals in tasks of `qimeng.planner.data.put_together`, walked like those of other trees. Knows nothing about policies.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from qimeng.actions import Context, kind_named
from qimeng.actions.large import is_large
from qimeng.device import row_name
from qimeng.envs.steps.setup import make_coder, make_device
from qimeng.envs.steps.state import STOP
from qimeng.errors import QimengError
from qimeng.interfaces import Action, Coder, Observation
from qimeng.planner.data.first_steps import after_first_steps
from qimeng.planner.data.oracle import OraclePlanner
from qimeng.planner.data.parts import ALONE, COMPOSED, WHOLE, Captured, Parts, parts_of
from qimeng.planner.data.put_together import REGIONED, Known, PartsSession, parts_task
from qimeng.planner.data.tree import Tree
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.lm.branches import ASTRAY, Choice, Pair, Teacher
from qimeng.planner.lm.learnt import Learnt, action_name
from qimeng.planner.lm.stored import ENDLESS, StoredTask
from qimeng.program.program import Program

ALL = 400
"""Evaluations after which what the planner that knows everything found counts as the best known."""

STEPS = 256
"""Steps of its run; those of the graph alone count."""


@dataclass(frozen=True)
class NetworkTask(StoredTask):
    """A network whose programs are put together from parts (`parts_task`), walked as a stored tree is."""

    portable: ClassVar[bool] = True

    @property
    def parts(self) -> Known:
        """What is known of its actions."""
        known = self.task.offers
        assert isinstance(known, Known)
        return known

    def begin(self, steps: int = ENDLESS.steps, evaluations: int = ENDLESS.evaluations) -> PartsSession:
        """An episode at the start program, judged."""
        session = PartsSession(self.task, replace(ENDLESS, steps=steps, evaluations=evaluations))
        session.begin()
        return session

    def offered(self, seen: Observation) -> tuple[Action, ...]:
        """`seen.actions` without `stop`, since their outcome is known (`Task.offers`); `stop` where there is none."""
        return tuple(a for a in seen.actions if a != STOP) or (STOP,)

    @property
    def learnt(self) -> Learnt:
        """Every action that was tried on one of its regions, those on many at once, and as many regions as it has."""
        start, known = self.task.start, self.parts.coder.parts
        names = {action_name(Action(kind, (), param)) for moves in known.moves.values() for kind, param in moves}
        names |= {action_name(Action(kind, (), option)) for kind in REGIONED for option in kind_named(kind).options}
        names.add("library")  # back to PyTorch, whose times are known
        regions = len(after_first_steps(start, self.task.context).called)
        return Learnt(tuple(sorted(names)), regions, is_large(start))

    @cached_property
    def start_ms(self) -> float:
        """Device milliseconds of the start program."""
        return self.begin().state.ms or math.inf

    @cached_property
    def best_ms(self) -> float:
        """Device milliseconds of what a planner that knows everything ends with."""
        session = self.begin(STEPS, ALL)
        GreedySearch(OraclePlanner(self.parts)).run(session)
        best = session.ledger.best
        return (best.ms if best is not None else None) or self.start_ms


def learnt_of(stored: Sequence[StoredTask]) -> Learnt:
    """What the trees of `stored` have to teach; of networks, what was tried on any of their regions."""
    found = Learnt.of(one.tree for one in stored if not isinstance(one, NetworkTask))
    for one in stored:
        if isinstance(one, NetworkTask):
            found |= one.learnt
    return found


def is_network(tree: Tree) -> bool:
    """Whether `tree` was explored region by region, or composed of regions that others explored."""
    return any(purpose in (ALONE, COMPOSED) for purpose, _, _ in tree.evaluations)


def network_tasks(
    captured: Sequence[Captured], coder: str | Coder = "template", others: Sequence[Captured] = ()
) -> Iterator[NetworkTask]:
    """Tasks of the networks whose start program was judged right.

    What is known of a region is known of it in all networks of the same device and precision mode.

    Args:
        captured: the networks.
        coder: says what is legal.
        others: more that tell of regions.
    """
    known = [*captured, *others]
    kinds = {(tree.conditions.device, tree.mode) for tree, _ in known}
    parts = {kind: parts_of([c for c in known if (c[0].conditions.device, c[0].mode) == kind]) for kind in kinds}
    for tree, start in captured:
        task = network_task(tree, start, parts[tree.conditions.device, tree.mode], coder)
        if task is not None:
            yield task


def network_task(tree: Tree, start: Program, parts: Parts, coder: str | Coder = "template") -> NetworkTask | None:
    """The task of one network; None where nothing is known of its start program.

    Gains are over the start program as it is put together, so that both times are of one kind.

    Args:
        tree: with the names of today's programs.
        start: its start program.
        parts: what was found of regions.
        coder: says what is legal.
    """
    first = next((e for p, s, e in tree.evaluations if p in (WHOLE, COMPOSED) and s == start.digest and e.ok), None)
    made = None if first is None else parts.evaluation(start, first)
    if first is None or made is None:
        return None
    context = Context(make_device(row_name(tree.conditions.device)), make_coder(coder), tree.mode)
    task = parts_task(parts, start, replace(first, eager=made.timing), context, tree.conditions, tree.name)
    return NetworkTask(tree, task)


def captured_networks(trees: Iterable[Tree]) -> list[Captured]:
    """Those of `trees` whose spec is captured today as it was then."""
    found = []
    for tree in trees:
        with suppress(QimengError):
            start = tree.start()
            found.append((tree.today(start), start))
    return found


def network_pairs(
    tasks: Sequence[NetworkTask], walks: int = 0, steps: int = 16, seed: int = 0, teacher: Teacher | None = None
) -> Iterator[Pair]:
    """What a planner that knows everything would do, from the start to the end and on walks with random detours.

    The walks are those of a planner that does not know beforehand which kernels are written right (`OraclePlanner`).
    One that knows takes the right ones first. In its later states, what looks promising is wrong, and a planner that
    imitated there would learn to avoid what looks promising.

    Args:
        tasks: the networks.
        walks: with detours, through each.
        steps: of each, at most.
        seed: of the detours.
        teacher: says how much worse an action may be to be imitated as well.
    """
    for task in tasks:
        for walk in range(walks + 1):
            yield from _pairs(task, steps, random.Random(f"{seed + walk} {task.tree.conditions.spec}"), walk, teacher)


def _pairs(task: NetworkTask, steps: int, draw: random.Random, walk: int, teacher: Teacher | None) -> Iterator[Pair]:
    session, oracle = task.begin(steps), OraclePlanner(task.parts)
    walker = OraclePlanner(task.parts, foresees=False)
    while session.exhausted() is None and not session.state.done:
        seen = session.observe()
        choice = _choice(oracle, seen, teacher or Teacher())
        if not choice:
            return
        yield seen, choice
        moves = [a for a in seen.actions if a != STOP]
        astray = walk > 0 and draw.random() < ASTRAY
        session.step(draw.choice(moves) if astray else walker.choose(seen))


def _choice(oracle: OraclePlanner, seen: Observation, teacher: Teacher) -> Choice:
    """How likely each action is to be chosen, by what it saves; empty where nothing saves anything."""
    worth: dict[Action, float] = {}
    for saved, action in oracle.ranked(seen):
        if math.isinf(saved):
            return {action: 1.0}
        worth[action] = max(saved, worth.get(action, 0.0))
    return teacher.among(worth) if worth else {}


__all__ = [
    "ALL",
    "STEPS",
    "NetworkTask",
    "captured_networks",
    "is_network",
    "learnt_of",
    "network_pairs",
    "network_task",
    "network_tasks",
]
