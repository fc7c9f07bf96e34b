"""Explores one spec with several planners into a store: the tree that training reads.

Deals in which planners go, in what order, with how much of the budget. Knows nothing about other specs or processes.
Earlier evaluations come from the store, so a killed exploration resumes where it ended.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from qimeng.bench.region_sweep import Claims, RegionSweep
from qimeng.envs.steps.loop import Search
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.envs.steps.task import Task
from qimeng.interfaces import Evaluation
from qimeng.planner.beam import BeamSearch
from qimeng.planner.climb import HillClimb
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.mixture import MixturePlanner
from qimeng.planner.random import RandomPlanner
from qimeng.store import Store

STEPS = 16
"""Steps of a trajectory with random choices: many short ones explore more of the tree than one long one."""

SHARES = (("heuristic", 0.35), ("beam", 0.25))
"""Explorers that go first, and the most of the evaluations that each may use; the rest is for mixtures and chance."""

LEAST = 4
"""New programs that each explorer may evaluate at least: enough to follow its first choices."""

IDLE = 8
"""Trajectories in a row that judge no new program, after which the tree counts as explored."""


ENDLESS = 1 << 30
"""Steps of an explorer that no number of steps ends."""


class Explorer(NamedTuple):
    """Who explores.

    Attributes:
        name: in the row.
        share: the most of the evaluations that it may use.
        steps: of its trajectory.
        search: takes them.
    """

    name: str
    share: float
    steps: int
    search: Search


@dataclass(frozen=True)
class Explored:
    """What came of one spec: a row of the collection's log.

    Attributes:
        spec: digest of the spec.
        name: what it is called.
        family: its family.
        seed: of the sequence it was drawn from.
        index: its number there.
        device: for which device.
        asked: evaluations that it might use.
        estimated: whether times come from the analytic model.
        conditions: digest of the conditions of its rows in the store.
        evaluations: programs judged, failures included.
        right: how many of them were right.
        steps: steps taken over all trajectories.
        accepted: steps after which the state advanced.
        programs: different programs in the stored tree, those that differ in the graph alone included.
        eager_ms: device milliseconds of PyTorch eager.
        best_ms: of the best program.
        by: explorer to the programs that it was the first to have judged.
        seconds: wall seconds.
        spent: seconds by part of the programs judged now; what is left of `seconds` made the task, and chose and wrote.
        stopped: ``"evaluations"``, ``"seconds"``, ``"explored"`` where nothing new was found, or ``"known"`` where
            others explore every region of a network.
        error: why it was not explored; None where it was.
    """

    spec: str
    name: str
    family: str
    seed: int
    index: int
    device: str
    asked: int
    estimated: bool = False
    conditions: str = ""
    evaluations: int = 0
    right: int = 0
    steps: int = 0
    accepted: int = 0
    programs: int = 0
    eager_ms: float | None = None
    best_ms: float | None = None
    by: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    error: str | None = None

    @property
    def gain(self) -> float | None:
        """Eager's time over the best program's."""
        return self.eager_ms / self.best_ms if self.eager_ms and self.best_ms else None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Explored:
        """The row that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        return cls(**data)


def explore(
    task: Task,
    row: Explored,
    store: Store,
    seconds: float,
    began: float | None = None,
    explorers: Iterable[Explorer] | None = None,
) -> Explored:
    """Explore the tree of `task` until `row.asked` programs are judged, time is up, or nothing new is found.

    All explorers share the budget and what was judged; each starts at the start program.

    Args:
        task: what is explored.
        row: says how many evaluations may be used; returned with the figures filled in.
        store: where every attempt is recorded.
        seconds: wall-clock budget.
        began: the time (`time.monotonic`) when the budget's seconds began; now by default.
        explorers: the explorers in order; by default `planned`, or `of_networks` where steps are judged by region.
    """
    budget = Budget(seconds, row.asked)
    root = Session(task, budget, store, began=began)
    root.ledger.explores = task.by_region  # else what planners are likely to take next is compiled ahead
    if explorers is None:
        explorers = of_networks() if task.by_region else planned()
    ledger, first = root.ledger, root.begin()
    row = replace(row, conditions=task.conditions.digest, estimated=task.estimated, device=task.context.device.name)
    if not first.ok:
        return replace(row, evaluations=1, error=f"the start program is refused: {first.error}"[:500])
    idle, by, stopped = 0, dict[str, int](), ""
    for name, share, steps, search in explorers:
        before = ledger.evaluations
        ledger.budget = replace(
            budget, evaluations=min(row.asked, before + max(LEAST, int(share * row.asked))), steps=steps
        )
        branch = root.fork()
        branch.return_to(root.state)
        search.run(branch)
        ledger.budget = budget
        by[name] = by.get(name, 0) + ledger.evaluations - before
        idle = 0 if ledger.evaluations > before else idle + 1
        stopped = root.exhausted() or ("explored" if idle >= IDLE else "")
        if stopped:
            break
    stopped = stopped or "explored"
    tree = store.steps(task.conditions)
    return replace(
        row,
        evaluations=ledger.evaluations,
        right=sum(e.ok for e in ledger.known.values()),
        steps=len(ledger.attempts),
        accepted=sum(a.accepted for a in ledger.attempts),
        programs=len({task.start.digest, *(s.child for s in tree if s.child is not None)}),
        eager_ms=first.eager.device_ms if first.eager else None,
        best_ms=ledger.best.ms if ledger.best else None,
        by=by,
        seconds=round(ledger.clock() - ledger.began, 2),
        spent=_spent(ledger.known.values()),
        stopped=stopped,
    )


def _spent(evaluations: Iterable[Evaluation]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for evaluation in evaluations:
        total.update(evaluation.seconds)
    return {part: round(seconds, 2) for part, seconds in total.items()}


def planned() -> Iterator[Explorer]:
    """A heuristic that climbs and one with a beam, each with its share, then `chance`."""
    searches: dict[str, Search] = {
        "heuristic": HillClimb(HeuristicPlanner()),
        "beam": BeamSearch(HeuristicPlanner(), width=3, branch=3),
    }
    for name, share in SHARES:
        yield Explorer(name, share, Budget.steps, searches[name])
    yield from chance()


def of_networks(claims: Claims | None = None) -> Iterator[Explorer]:
    """A few actions on every region: from a start of a hundred regions a search would lower a few of them.

    Args:
        claims: of regions (`RegionSweep`).
    """
    yield Explorer("regions", 1.0, ENDLESS, RegionSweep(claims))


def chance() -> Iterator[Explorer]:
    """Mixtures of the heuristic and chance, and chance alone, without end."""
    for seed in count():
        for epsilon in (0.2, 0.5):
            yield Explorer("mixture", 1.0, STEPS, GreedySearch(MixturePlanner(HeuristicPlanner(), epsilon, seed)))
        yield Explorer("random", 1.0, STEPS, GreedySearch(RandomPlanner(seed)))


__all__ = [
    "ENDLESS",
    "IDLE",
    "SHARES",
    "STEPS",
    "Explored",
    "Explorer",
    "chance",
    "explore",
    "of_networks",
    "planned",
]
