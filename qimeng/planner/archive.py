"""An evolutionary archive: islands of MAP-Elites cells. A mutation is an action drawn from the planner's prior.

Deals in cells, elites and mutations. Knows nothing about how steps are carried out. After Kernel-Smith
(https://arxiv.org/abs/2603.28342), which evolves whole programs by an LLM in an archive with islands; here a mutation
is one legal action.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from qimeng.envs.judge.ranking import gain
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.time_shares import region_times
from qimeng.graph.ops import VIEWS, category
from qimeng.interfaces import Action, Planner
from qimeng.planner.search import PATIENCE, Search, out_of_budget, own_trajectory, prior

Cell = tuple[int, int, str]

FREE = 4
"""Steps in a row that a mutation may take while none of them is judged (fusions change the graph alone)."""


def cell_of(session: Session) -> Cell:
    """The cell of a program: features other than its speed.

    Three features: the share of time in generated kernels, in quarters (from roofline bounds if it was not timed); the
    number of working regions, by powers of two; the family of the slowest region's leading operator.
    """
    program, evaluation = session.state.program, session.state.evaluation
    times = region_times(program, evaluation, session.task.context.device)
    total = sum(times.values()) or 1.0
    made = sum(times[r.id] for r in program.regions if program.implementation(r).generated)
    working = [r for r in program.regions if any(n.packet not in VIEWS for n in r.ops)]
    slowest = max(working, key=lambda r: times[r.id], default=None)
    families = sorted({category(n) for n in slowest.ops}) if slowest is not None else []
    leading = next((f for f in ("gemm", "convolution", "scan", "reduction") if f in families), "".join(families[:1]))
    return min(3, int(4 * made / total)), len(working).bit_length(), leading


@dataclass
class Island:
    """One population: the best program of each cell.

    Attributes:
        elites: cell to the branch that stands at its fastest program.
        all: every program that was offered, by its digest.
    """

    elites: dict[Cell, Session] = field(default_factory=dict)
    all: dict[str, Session] = field(default_factory=dict)

    def add(self, branch: Session) -> None:
        """Keep `branch` where its cell is empty or it is faster than what is there."""
        self.all.setdefault(branch.state.program.digest, branch)
        cell = cell_of(branch)
        known = self.elites.get(cell)
        if known is None or _gain(branch) > _gain(known):
            self.elites[cell] = branch

    def best(self) -> Session:
        """The fastest elite."""
        return max(self.elites.values(), key=_gain)


class ArchiveSearch(Search):
    """Follow the planner's own trajectory, then change elites by actions drawn from the planner's prior.

    The islands take turns. Each turn draws an elite: the fastest with probability `greedy`, else that of any cell. If
    no elite has an untried action, another program of the island is used. An untried action is drawn from the prior and
    run. If it is not judged, because it only changes the graph, more actions follow, up to `FREE`. Every program on the
    way is offered to its cell (`cell_of`). The first island starts with the planner's own trajectory, the others with
    the start program. After every `migrate` turns, an island offers its fastest program to the next.

    Args:
        planner: gives the prior of mutations.
        islands: archives that evolve apart.
        greedy: probability that the fastest elite is changed.
        migrate: turns of an island between two migrations.
        seed: of all that is drawn.
        patience: as for `qimeng.planner.search.trajectory`, for the planner's own trajectory.
    """

    def __init__(
        self,
        planner: Planner,
        islands: int = 2,
        greedy: float = 0.5,
        migrate: int = 4,
        seed: int = 0,
        patience: int = PATIENCE,
    ):
        if islands < 1 or migrate < 1 or patience < 0 or not 0 <= greedy <= 1:
            raise ValueError(
                "islands and migrate must be at least 1, patience at least 0 and greedy a probability, got "
                f"{islands}, {migrate}, {patience} and {greedy}"
            )
        self.planner, self.islands, self.greedy, self.migrate = planner, islands, greedy, migrate
        self.patience, self._random = patience, random.Random(f"archive {seed}")

    def run(self, session: Session) -> str:
        """Go on until the budget is used up, or nothing is left to try on any program (``"stop"``)."""
        own = list(own_trajectory(self.planner, session, self.patience))
        islands = [Island() for _ in range(self.islands)]
        untried = _Untried(self.planner)
        for branch in own:
            islands[0].add(branch)
            untried.note(branch)
        for island in islands[1:]:
            island.add(own[0])
        turn = idle = 0
        while (reason := out_of_budget(session)) is None and idle < len(islands):
            island = islands[turn % len(islands)]
            parent = self._pick(island, untried)
            if parent is not None:
                self._mutate(island, parent, untried)
            idle = idle + 1 if parent is None else 0
            turn += 1
            if turn % (self.migrate * len(islands)) == 0:
                for here, there in zip(islands, islands[1:] + islands[:1], strict=True):
                    there.add(here.best())
        return reason or "stop"

    def _pick(self, island: Island, untried: _Untried) -> Session | None:
        """The elite to change, else any program of the island; None where nothing is left to try on any."""
        elites = self._random.sample(list(island.elites.values()), len(island.elites))
        if self._random.random() < self.greedy:
            elites = [island.best(), *elites]
        return next((b for b in (*elites, *island.all.values()) if untried.of(b)), None)

    def _mutate(self, island: Island, parent: Session, untried: _Untried) -> None:
        """Take a step that is judged on a fork of `parent`, after steps that need not be."""
        judged, branch = parent.ledger.evaluations, parent
        for _ in range(FREE):
            moves = untried.of(branch)
            if not moves:
                return
            action = self._random.choices(list(moves), list(moves.values()))[0]
            branch = branch.fork()
            branch.step(action)
            untried.note(branch)
            island.add(branch)
            if branch.ledger.evaluations > judged:
                return


class _Untried:
    """Untried actions of each program with their prior. All islands share it, so none repeats another."""

    def __init__(self, planner: Planner):
        self.planner = planner
        self._tried: dict[str, set[Action]] = {}
        self._priors: dict[str, dict[Action, float]] = {}

    def note(self, branch: Session) -> None:
        """The last step of `branch` was tried."""
        state = branch.state
        if state.history:
            before = state.parent if state.history[-1].accepted and state.parent is not None else state
            self._tried.setdefault(before.program.digest, set()).add(state.history[-1].action)

    def of(self, branch: Session) -> dict[Action, float]:
        """The actions not tried at the program of `branch`; none where it has no steps left."""
        if branch.exhausted() is not None:
            return {}
        digest = branch.state.program.digest
        if digest not in self._priors:
            self._priors[digest] = prior(self.planner, branch.observe())[0]
        tried = self._tried.get(digest, set())
        return {a: p for a, p in self._priors[digest].items() if a not in tried}


def _gain(branch: Session) -> float:
    """Log-gain over the start program. A program without a time counts with the best one on its path."""
    for state in reversed(branch.state.path()):
        found = gain(state.evaluation, branch.ledger.start)
        if found is not None:
            return math.log(found)
    return 0.0


__all__ = ["ArchiveSearch", "Island", "cell_of"]
