"""Planners and searches replayed on stored trees: what each would have found, and with how many evaluations.

Deals in methods (a planner and a search), stored trees, and rows. Knows nothing about how rows are summed up
(`experiments.planners.summary`) or which trees are held out (`experiments.planners.heldout`).

A replay asks the tree where a live run asks the GPU, so that every method meets the same answers, at no cost, as often
as wanted. An action that is legal but was never tried has no answer: it is not offered, to any method, and each row
says what share of the legal actions was explored where the method had to decide (`ReplayRow.coverage`). The trees are
therefore explored with the methods that are compared (`experiments.planners.heldout.explorers_of`). Orders of fusions
that nobody tried (`qimeng.planner.data.closure`) are left out as well: with all fusions and only some of the lowerings
offered, chance would fuse far more than it does where all is legal. A step of the graph alone after which nothing was
tried (`Tree.answered`) has no answer either: a method that was led there would end with what it has, where a live run
goes on.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qimeng.bench.row import Environment, RowError, append_line, whole_lines
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import STOP, Budget
from qimeng.errors import QimengError
from qimeng.interfaces import Action, Coder, Evaluation, Planner
from qimeng.planner import WITH_FOLDER, draws, make_planner, make_search
from qimeng.planner.data.put_together import PartsSession
from qimeng.planner.data.tree import Tree
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.lm.planner import LanguageModelPlanner

EVALUATIONS = 40
"""Programs judged in a replay, the start program included, as in `plan_and_code(evaluations=…)`."""

SEEDS = (0, 1, 2)

SEED = "{seed}"
"""In the name of a planner's folder: the seed of the run."""


@dataclass(frozen=True)
class Method:
    """A way of choosing.

    Attributes:
        label: what tables call it.
        planner: name of the planner, with its folder where it has one; ``{seed}`` in it is the seed of a run, so that
            planners from several seeds of training are one method.
        search: name of the search, with options.
    """

    label: str
    planner: str
    search: str = "greedy"

    @classmethod
    def parse(cls, text: str) -> Method:
        """The method written as ``PLANNER``, ``PLANNER+SEARCH`` or ``LABEL=PLANNER+SEARCH``.

        Raises:
            ValueError: an unknown planner or search, or options that it does not take.
            WeightsError: the planner's folder holds no weights.

        >>> Method.parse("heuristic+beam:8")
        Method(label='heuristic, beam:8', planner='heuristic', search='beam:8')
        >>> Method.parse("chance=random").label
        'chance'
        """
        match = re.fullmatch(r"(?:([^:+=]+)=)?([^+]+?)(?:\+([^+]+))?", text.strip())
        if match is None:
            raise ValueError(f"cannot read the method {text!r}; write PLANNER+SEARCH, as in 'heuristic+mcts:c=2'")
        label, planner, search = match[1], match[2], match[3] or "greedy"
        make_search(search, planner.replace(SEED, "0"))
        name = planner.rpartition("/")[2] if planner.partition(":")[0] in WITH_FOLDER else planner
        return cls(label or (name if search == "greedy" else f"{name}, {search}"), planner, search)

    @property
    def draws(self) -> bool:
        """Whether a seed makes a difference."""
        return SEED in self.planner or draws(self.search, self.planner)

    def make(self, seed: int) -> Any:
        """The search, ready to run."""
        name = self.planner.replace(SEED, str(seed))
        fixed = name.partition(":")[0] in WITH_FOLDER
        planner = _weights(name) if fixed else make_planner(name, seed)
        return make_search(self.search, planner, seed)


@cache
def _weights(planner: str) -> Planner:
    """A planner whose weights are read once, on a GPU if there is one; it keeps nothing between decisions."""
    made = make_planner(planner)
    if isinstance(made, LanguageModelPlanner) and torch.cuda.is_available():
        made.device = "cuda"
    return made


UNANSWERED = "unanswered"
"""Why a trajectory ended that went where nobody had explored, though actions were legal there."""


@dataclass(frozen=True)
class ReplayRow:
    """One method on one tree from one seed.

    Attributes:
        spec: digest of the spec.
        name: what it is called.
        family: its family; ``"kernelbench"`` for a problem of KernelBench.
        method: the method.
        seed: of all that the method draws.
        gains: log of eager's time over that of the best program so far, both timed in turns, at least 0; after 1, 2, 3
            … evaluations, the start program's included. A method that stops keeps its last.
        known: the same of the best program in the tree.
        programs: programs of the tree that were judged.
        coverage: mean share of the legal actions that the tree has an answer for, over the programs where the method
            was to decide, at their first sight.
        evaluations: programs judged.
        steps: steps taken.
        stopped: why it ended; ``"unanswered"``: at a program from which the tree has no answer for any action.
        best: digest of the best program; `experiments.planners.live` times it live.
        seconds: processor seconds of the replay, the planner's included.
        device: name of the device whose times the tree holds.
        estimated: whether those are an analytic model's.
        environment: where the replay ran.
    """

    spec: str
    name: str
    family: str
    method: Method
    seed: int
    gains: tuple[float, ...]
    known: float
    programs: int
    coverage: float
    evaluations: int
    steps: int
    stopped: str
    best: str
    seconds: float
    device: str
    estimated: bool
    environment: Environment = field(default_factory=Environment)

    @property
    def key(self) -> tuple[str, str, Method, int]:
        """What makes two replays the same one."""
        return self.spec, self.device, self.method, self.seed

    def share(self, evaluations: int) -> float:
        """Share of the best-known log-gain reached after so many evaluations, 0 to 1."""
        if not self.known:
            return 1.0
        return self.gains[min(evaluations, len(self.gains)) - 1] / self.known

    def evaluations_to(self, share: float) -> int:
        """Evaluations until so much of the best-known log-gain was reached; a miss counts as all of them."""
        reached = (n for n in range(1, len(self.gains) + 1) if self.share(n) >= share)
        return next(reached, len(self.gains))

    def to_json(self) -> str:
        """One line; `from_json` gives an equal row back."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> ReplayRow:
        """The row that `to_json` wrote.

        Raises:
            RowError: the text is no such row.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            data["method"] = Method(**data["method"])
            data["environment"] = Environment(**data["environment"])
            data["gains"] = tuple(data["gains"])
            return cls(**data)
        except (ValueError, KeyError, TypeError) as error:
            raise RowError(f"not a row of a replay: {text[:80]!r} ({type(error).__name__}: {error})") from error


class StoredSession(Session):
    """A session on a tree: it offers what the tree has an answer for.

    Args:
        tree: what was explored, with the names of today's programs (`Tree.today`).
        budget: what may be used.
        coder: says what is legal; patches come from the tree.

    Attributes:
        covered: digest of each program looked at to the share of its legal actions that the tree has an answer for.
        stopped: why the search on it ended.
    """

    def __init__(self, tree: Tree, budget: Budget, coder: str | Coder = "template"):
        super().__init__(tree.task(coder, current=True), budget)
        self.tree = tree
        self.covered: dict[str, float] = {}
        self.stopped = ""

    def offered(self) -> tuple[tuple[Action, ...], int]:
        """Those of the legal actions that the tree has an answer for, in their order, and `stop`."""
        actions, cut = super().offered()
        digest = self.state.program.digest
        answered = self.tree.answered.get(digest, ())
        kept = tuple(a for a in actions if a == STOP or a in answered)
        if len(actions) > 1:
            self.covered.setdefault(digest, (len(kept) - 1) / (len(actions) - 1))
        return kept, cut

    def unanswered(self, planner: Planner) -> bool:
        """Whether `planner` would go on from here if the tree had an answer for what it would do then."""
        seen = self.observe()
        return len(seen.actions) == 1 and planner.choose(replace(seen, actions=super().offered()[0])) != STOP

    def again(self, budget: Budget) -> StoredSession:
        """A session at the start program, judged, that remembers nothing but which actions are legal where."""
        twin = self.clone()
        assert isinstance(twin, StoredSession)
        twin.ledger.budget, twin.covered = budget, {}
        return twin


class Stage:
    """A tree made ready to be replayed on; legality is looked up once for all replays.

    Args:
        tree: what was explored.
        coder: says what is legal.

    Raises:
        SpecError: the spec cannot be made.
        RowError: the tree does not hold its start program.
    """

    def __init__(self, tree: Tree, coder: str | Coder = "template"):
        self.tree = tree
        start = tree.start()
        self._root = StoredSession(tree.today(start), Budget(math.inf, EVALUATIONS), coder)
        if not self._root.begin().ok:
            raise RowError(f"the tree of {tree.name} does not hold its start program: {self._root.begin().error}")
        best = max((log_gain(e) for purpose, _, e in tree.evaluations if purpose == "step"), default=0.0)
        self.known = max(best, log_gain(self._root.begin()))

    def run(self, method: Method, seed: int, evaluations: int = EVALUATIONS) -> StoredSession | PartsSession:
        """The session on which `method` was run."""
        session = self._root.again(Budget(math.inf, evaluations))
        search = method.make(seed)
        session.stopped = search.run(session)
        if session.state.done and isinstance(search, GreedySearch) and session.unanswered(search.planner):
            session.stopped = UNANSWERED
        return session

    def play(self, method: Method, seed: int, environment: Environment, evaluations: int = EVALUATIONS) -> ReplayRow:
        """What `method` does on the tree."""
        began = time.process_time()
        session = self.run(method, seed, evaluations)
        ledger, tree = session.ledger, self.tree
        gains = [0.0]
        for evaluation in ledger.known.values():  # in the order they were asked for
            gains.append(max(gains[-1], log_gain(evaluation)))
        gains = [*gains[1 : evaluations + 1], *[gains[-1]] * (evaluations - len(ledger.known))]
        return ReplayRow(
            spec=tree.conditions.spec,
            name=tree.name,
            family=tree.family,
            method=method,
            seed=seed,
            gains=tuple(round(g, 5) for g in gains),
            known=round(self.known, 5),
            programs=judged(tree),
            coverage=round(sum(session.covered.values()) / max(1, len(session.covered)), 4),
            evaluations=ledger.evaluations,
            steps=len(ledger.attempts),
            stopped=session.stopped,
            best=ledger.best.program.digest if ledger.best else "",
            seconds=round(time.process_time() - began, 3),
            device=tree.conditions.device,
            estimated=tree.conditions.estimated,
            environment=environment,
        )


def log_gain(evaluation: Evaluation) -> float:
    """Log of eager's time over the program's, at least 0; 0 for a program that was refused."""
    speedup = evaluation.speedup if evaluation.ok else None
    return max(0.0, math.log(speedup)) if speedup else 0.0


def judged(tree: Tree) -> int:
    """Programs of the tree that were sent to the judge, the start program included; a sweep counts as one."""
    return 1 + len({edge.evaluation for edge in tree.edges if edge.evaluation is not None})


def replay(
    trees: Iterable[Tree],
    methods: Sequence[Method],
    environment: Environment,
    seeds: Sequence[int] = SEEDS,
    evaluations: int = EVALUATIONS,
    done: Sequence[ReplayRow] = (),
    coder: str | Coder = "template",
    on_refused: Callable[[Tree, QimengError], None] = lambda tree, error: None,
) -> Iterator[ReplayRow]:
    """Replay every method on every tree from every seed, one that draws nothing from the first seed only.

    Args:
        trees: what was explored.
        methods: what is compared.
        environment: where this runs.
        seeds: of what is drawn.
        evaluations: of each replay.
        done: rows that are there already, and are not made again.
        coder: says what is legal.
        on_refused: told of a tree that cannot be replayed; the others are.

    Yields:
        New rows, as they are made.
    """
    known = {row.key for row in done if len(row.gains) == evaluations}
    for tree in trees:
        about = tree.conditions.spec, tree.conditions.device
        runs = [(m, seed) for m in methods for seed in (seeds if m.draws else seeds[:1])]
        left = [run for run in runs if (*about, *run) not in known]
        try:
            stage = Stage(tree, coder) if left else None
        except QimengError as error:
            on_refused(tree, error)
            continue
        for method, seed in left:
            assert stage is not None
            yield stage.play(method, seed, environment, evaluations)


def read_replays(path: Path | str) -> tuple[ReplayRow, ...]:
    """The rows of a file; where two are of the same replay, the later one.

    Raises:
        RowError: no such file, or a line in it is no such row.
    """
    rows = [ReplayRow.from_json(line) for line in whole_lines(path)]
    return tuple({(row.key, len(row.gains)): row for row in rows}.values())


def append_replay(path: Path | str, row: ReplayRow) -> None:
    """Add `row` at the end of the file, durably."""
    append_line(path, row.to_json())


__all__ = [
    "EVALUATIONS",
    "SEEDS",
    "UNANSWERED",
    "Method",
    "ReplayRow",
    "Stage",
    "StoredSession",
    "append_replay",
    "judged",
    "log_gain",
    "read_replays",
    "replay",
]
