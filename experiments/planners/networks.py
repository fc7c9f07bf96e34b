"""Planners on networks whose programs are put together from parts: what each finds, beside one that knows everything.

Deals in networks and bundles (`qimeng.planner.data`), and in methods. Knows nothing about how parts were found
(`qimeng collect`), or how rows are summed up (`experiments.planners.summary`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from experiments.planners.replay import SEEDS, Method, ReplayRow, Stage
from qimeng.bench.row import Environment
from qimeng.planner import make_search
from qimeng.planner.data.oracle import OraclePlanner
from qimeng.planner.data.put_together import PartsSession
from qimeng.planner.lm.networks import STEPS, NetworkTask

EVALUATIONS = 40
"""Of each run, the start program included."""

ORACLE = Method("knows everything", "oracle")
"""The bound: it takes what saves most for each evaluation (`qimeng.planner.data.oracle`)."""

CHANCES = Method("knows savings and chances", "oracle:chances")
"""What can be known beforehand: the same, but of a kernel that is not written yet it knows how likely it is right."""

KNOWING = (ORACLE, CHANCES)
"""Planners that know what comes of actions; they draw nothing."""

METHODS = (
    ORACLE,
    Method("fuse, lower by roofline", "roofline"),
    Method("heuristic", "heuristic", "climb"),
    Method("chance", "random", "best-of-n"),
)
"""Compared whatever else is; with a writer that is not always right, `CHANCES` as well."""


class NetworkStage(Stage):
    """A network made ready: gains are over its start program, both put together from parts.

    Args:
        task: of the network.
    """

    def __init__(self, task: NetworkTask):
        self.tree, self._task = task.tree, task
        self.known = math.log(max(task.gain, 1.0))

    def run(self, method: Method, seed: int, evaluations: int = EVALUATIONS) -> PartsSession:
        """The session on which `method` was run."""
        session = self._task.begin(STEPS, evaluations)
        if method in KNOWING:
            search: Any = make_search("greedy", OraclePlanner(self._task.parts, method == ORACLE))
        else:
            search = method.make(seed)
        session.stopped = search.run(session)
        return session


def play(
    tasks: Iterable[NetworkTask],
    methods: Sequence[Method],
    environment: Environment,
    seeds: Sequence[int] = SEEDS,
    evaluations: int = EVALUATIONS,
    done: Sequence[ReplayRow] = (),
) -> Iterator[ReplayRow]:
    """A row for each method on each network from each seed.

    Args:
        tasks: networks, or bundles.
        methods: what is compared.
        environment: where this runs.
        seeds: of what is drawn.
        evaluations: of each run.
        done: rows that are there already.
    """
    known = {row.key for row in done if len(row.gains) == evaluations}
    for task in tasks:
        tree, stage = task.tree, NetworkStage(task)
        for method in methods:
            for seed in seeds if method not in KNOWING and method.draws else seeds[:1]:
                if (tree.conditions.spec, tree.conditions.device, method, seed) not in known:
                    yield stage.play(method, seed, environment, evaluations)


__all__ = ["CHANCES", "EVALUATIONS", "KNOWING", "METHODS", "ORACLE", "NetworkStage", "play"]
