"""Planners on networks whose programs are put together from parts: what each finds, beside one that knows everything.

Deals in trees of networks that share regions, and in methods. Knows nothing about how parts were found
(`qimeng collect`), or how rows are summed up (`experiments.planners.summary`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from experiments.planners.replay import SEEDS, Method, ReplayRow, Stage, log_gain
from qimeng.actions import Context
from qimeng.bench.row import Environment, RowError
from qimeng.device import row_name
from qimeng.envs.steps.setup import make_coder, make_device
from qimeng.envs.steps.state import Budget
from qimeng.errors import QimengError
from qimeng.interfaces import Coder
from qimeng.planner import make_search
from qimeng.planner.data.oracle import OraclePlanner
from qimeng.planner.data.parts import WHOLE, Parts, parts_of
from qimeng.planner.data.put_together import Known, PartsSession, parts_task
from qimeng.planner.data.tree import Tree
from qimeng.program.program import Program

EVALUATIONS = 40
"""Of each run, the start program included."""

STEPS = 256
"""Steps of a run; those of the graph alone count."""

ALL = 400
"""Evaluations after which what the planner that knows everything found counts as the best known."""

ORACLE = Method("knows everything", "oracle")
"""The bound: it takes what saves most for each evaluation (`qimeng.planner.data.oracle`)."""

METHODS = (
    ORACLE,
    Method("fuse, lower by roofline", "roofline"),
    Method("heuristic", "heuristic", "climb"),
    Method("chance", "random", "best-of-n"),
)
"""Compared whatever else is."""


class NetworkStage(Stage):
    """A network made ready: gains are over its start program, both put together from parts.

    Args:
        tree: of the network, with the names of today's programs.
        start: its start program.
        parts: what is known of regions, from this tree and others.
        coder: says what is legal.

    Raises:
        RowError: the tree or the parts do not hold the start program.
    """

    def __init__(self, tree: Tree, start: Program, parts: Parts, coder: str | Coder = "template"):
        judged = {s: e for purpose, s, e in tree.evaluations if purpose == WHOLE}
        first = judged.get(start.digest)
        made = None if first is None else parts.evaluation(start, first)
        if first is None or made is None:
            raise RowError(f"nothing is known of the start program of {tree.name}")
        context = Context(make_device(row_name(tree.conditions.device)), make_coder(coder), tree.mode)
        task = parts_task(parts, start, replace(first, eager=made.timing), context, tree.conditions, tree.name)
        self.tree, self._of = tree, Known(task)
        self.known = 0.0
        run = self.run(ORACLE, 0, ALL)
        self.known = max((log_gain(e) for e in run.ledger.known.values()), default=0.0)

    def run(self, method: Method, seed: int, evaluations: int = EVALUATIONS) -> PartsSession:
        """The session on which `method` was run."""
        session = PartsSession(self._of, Budget(math.inf, evaluations, steps=STEPS))
        session.begin()
        search: Any = make_search("greedy", OraclePlanner(self._of)) if method == ORACLE else method.make(seed)
        session.stopped = search.run(session)
        return session


def play(
    trees: Iterable[Tree],
    methods: Sequence[Method],
    environment: Environment,
    seeds: Sequence[int] = SEEDS,
    evaluations: int = EVALUATIONS,
    done: Sequence[ReplayRow] = (),
    refused: Any = print,
) -> Iterator[ReplayRow]:
    """A row for each method on each network from each seed.

    Args:
        trees: of networks; what is known of one's regions is known of the others'.
        methods: what is compared.
        environment: where this runs.
        seeds: of what is drawn.
        evaluations: of each run.
        done: rows that are there already.
        refused: told in a sentence of a tree that cannot be used.
    """
    begun = list[tuple[Tree, Program]]()
    for tree in trees:
        try:
            start = tree.start()
            begun.append((tree.today(start), start))
        except QimengError as error:
            refused(f"{tree.name}: {error}")
    parts, known = parts_of(begun), {row.key for row in done if len(row.gains) == evaluations}
    for tree, start in begun:
        try:
            stage = NetworkStage(tree, start, parts)
        except QimengError as error:
            refused(f"{tree.name}: {error}")
            continue
        for method in methods:
            for seed in seeds if method != ORACLE and method.draws else seeds[:1]:
                if (tree.conditions.spec, tree.conditions.device, method, seed) not in known:
                    yield stage.play(method, seed, environment, evaluations)


__all__ = ["ALL", "EVALUATIONS", "METHODS", "ORACLE", "NetworkStage", "play"]
