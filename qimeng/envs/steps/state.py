"""What a search has: its budget, the states that it reached, and the ledger that its branches share.

Deals in plain data. Knows nothing about how a step is taken (`qimeng.envs.steps.session`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from qimeng.envs.steps.caching import UNKNOWN
from qimeng.interfaces import Action, Evaluation, Patch, Scope, Step, Ticket
from qimeng.program.program import Program
from qimeng.recipe import Recipe, RecipeStep

STOP = Action("stop")
"""Ends a branch of the search."""

ACCIDENTS = 3
"""Times that a program is judged before a possible accident, such as a timeout on a busy machine, counts as its
failure."""

RECENT = 3
"""Evaluations, the last ones, of which the longest says how long the next one takes: early ones wait for compilers."""

FINAL = {"reference": 4.0, "check": 3.0, "time": 3.0}
"""How many times as long each part takes in a final verification as in the first evaluation: it has more trials, more
rounds of timing, and baselines beside them. (Four networks on an H200, by logs that are not stored: 3.1 to 5.3, 2.5 to
3.7, 3.3 to 5.5.)"""


@dataclass(frozen=True)
class Budget:
    """What an optimization may use; it ends with whichever is used up first.

    Attributes:
        seconds: wall-clock seconds, the final verification included as far as it can be foreseen. Waiting for a device
            that others use does not count where the session is told of it (`Ledger.waited`).
        evaluations: programs sent to the judge before the final verification, the start program included.
        steps: steps of one trajectory.
        repairs: times that a coder may repair one refused patch.
        wall_seconds: wall-clock seconds after which all has to be over, waiting included; infinite for a search that
            nobody ends. What does not fit is not begun, and what is not over then is ended
            (`qimeng.envs.steps.time_up`).
    """

    seconds: float = 60.0
    evaluations: int = 40
    steps: int = 64
    repairs: int = 2
    wall_seconds: float = math.inf


@dataclass(frozen=True)
class Progress:
    """Progress report for `on_step`.

    Attributes:
        phase: ``"start"``, ``"try"`` (before an evaluation), ``"done"`` (after a step), ``"interrupted"``,
            ``"final"`` or ``"end"``.
        text: what is tried, or what came of it.
        best_ms: device milliseconds of the best program so far.
        eager_ms: device milliseconds of PyTorch eager.
        seconds_left: wall-clock seconds left.
        evaluations: evaluations used.
        steps: steps taken, over all branches.
    """

    phase: str
    text: str
    best_ms: float | None
    eager_ms: float | None
    seconds_left: float
    evaluations: int
    steps: int


@dataclass(frozen=True, eq=False)
class State:
    """Where a trajectory stands.

    Attributes:
        program: the program.
        evaluation: of this program; its `timing` is None where a step changed only the graph and dropped a kernel.
        parent: the state before the last accepted step; None at the start.
        record: the last accepted step, as a recipe keeps it.
        history: every step so far, refused ones included.
        masked: actions that were refused here, or on the path here on a region that has the same kernel; that the coder
            had no answer for; or that were already taken from this program on the path here.
        judged: whether this very program was sent to the judge.
        done: whether the planner stopped.
    """

    program: Program
    evaluation: Evaluation | None = None
    parent: State | None = None
    record: RecipeStep | None = None
    history: tuple[Step, ...] = ()
    masked: frozenset[Action] = frozenset()
    judged: bool = False
    done: bool = False

    def __repr__(self) -> str:
        time = "not timed" if self.ms is None else f"{self.ms:.4g} ms"
        return f"<State after {len(self.path()) - 1} accepted of {len(self.history)} steps: {time}, {self.program!r}>"

    @property
    def ms(self) -> float | None:
        """Device milliseconds, where known."""
        return self.evaluation.ms if self.evaluation else None

    @property
    def is_sum(self) -> bool:
        """Whether its regions were judged, some of them alone, and not yet the program as a whole."""
        return self.evaluation is not None and self.evaluation.scope is Scope.SUM

    def path(self) -> tuple[State, ...]:
        """The accepted states from the start to this one."""
        states: list[State] = []
        state: State | None = self
        while state is not None:
            states.append(state)
            state = state.parent
        return tuple(reversed(states))

    def recipe(self) -> Recipe:
        """The accepted steps that lead here."""
        return Recipe(tuple(s.record for s in self.path() if s.record is not None), self.program.digest)


@dataclass(frozen=True)
class Unchosen:
    """The ways that an accepted step did not take.

    Attributes:
        before: the state before the step.
        action: of the step.
        patch: with those of its alternatives that compute otherwise than the chosen one.
    """

    before: State
    action: Action
    patch: Patch

    @classmethod
    def of(cls, before: State, action: Action, patch: Patch, chosen: int) -> Unchosen | None:
        """What is left of `patch` where alternative number `chosen` turns out wrong; None where nothing is."""
        if patch.others or len(patch.alternatives) < 2:
            return None
        taken = patch.alternatives[chosen]
        numerics = taken.schedule.numerics if taken.schedule else ""
        left = tuple(
            other
            for other in patch.alternatives
            if other is not taken and not (numerics and other.schedule and other.schedule.numerics == numerics)
        )
        return cls(before, action, replace(patch, alternatives=left)) if left else None


@dataclass(frozen=True)
class Attempt(Step):
    """A step for a report.

    Attributes:
        text: the action in words.
        before_ms: device milliseconds of the program before the step; None where not known.
        gain: how many times faster the step made the program; None where it was refused or not timed.
        parent: digest of the program before the step.
        child: of the program after it; empty where it was refused.
    """

    text: str = ""
    before_ms: float | None = None
    gain: float | None = None
    parent: str = ""
    child: str = ""


@dataclass
class Ledger:
    """What the branches of one search share: used budget, known evaluations, the best program.

    Attributes:
        budget: what may be used.
        clock: wall seconds, monotonic.
        began: when the search began.
        waited: tells how many of them the judge has waited for a device that others use; such seconds do not count
            against `Budget.seconds`.
        evaluations: programs sent to the judge.
        took: seconds of the last `RECENT` evaluations.
        milestone: seconds that checking and timing the whole program takes; 0 where times are estimated.
        waiting: seconds that an evaluation has waited, in the mean.
        later: steps that are taken after the search, for which it leaves time (`qimeng.envs.steps.compiled_first`).
        writing: seconds that the coder took longest.
        explores: whether steps are taken to learn what comes of them: no time is left for a final verification, and
            what a planner may do next is not compiled ahead.
        final: seconds that a final verification takes, by what the first evaluation took; 0 where times are estimated.
        known: evaluations of this search by what was judged; asking again is free, except after an accident.
        accidents: number of failures of a program that may be accidents (`Evaluation.lasting`); the program is judged
            again on the next request, up to `ACCIDENTS` times.
        refused: program digest to the actions refused there.
        attempts: every step over all branches, in order.
        best: the judged state to prefer so far (see `qimeng.envs.judge.ranking`).
        leader: the same, states whose time is a sum of their regions' included (`qimeng.envs.steps.milestones`); `best`
            where every step is judged on the whole program.
        torch_ms: milliseconds of each operator on PyTorch, in whole programs that were measured.
        start: evaluation of the start program.
        faults: faults of kinds of action; such a kind is not offered once a step has reported it.
        reported: those kinds that a step has reported.
        written: patches that were written ahead of their steps, by program, action and mode of precision.
        submitted: tickets of requests that were submitted ahead, by the digest of the request.
        prepared: signatures of the regions whose kernels were compiled ahead (`qimeng.envs.steps.next_kernels`).
        guessed: patches of actions that may come, by the digest of their region's implementation before.
        unchosen: the ways that an accepted step did not take, by the digest of the program that it led to.
    """

    budget: Budget
    clock: Callable[[], float]
    began: float
    waited: Callable[[], float] = lambda: 0.0
    evaluations: int = 0
    took: deque[float] = field(default_factory=partial(deque, maxlen=RECENT))
    milestone: float = 0.0
    waiting: float = 0.0
    later: int = 0
    writing: float = 0.0
    explores: bool = False
    final: float = 0.0
    known: dict[str, Evaluation] = field(default_factory=dict)
    accidents: dict[str, int] = field(default_factory=dict)
    refused: dict[str, frozenset[Action]] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    best: State | None = None
    leader: State | None = None
    torch_ms: dict[str, float] = field(default_factory=dict)
    start: Evaluation | None = None
    faults: dict[str, str] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    written: dict[tuple[str, Action, str], Patch] = field(default_factory=dict)
    submitted: dict[str, Ticket] = field(default_factory=dict)
    prepared: set[str] = field(default_factory=set)
    guessed: dict[tuple[str, Action], Patch] = field(default_factory=dict)
    unchosen: dict[str, Unchosen] = field(default_factory=dict)

    @property
    def longest(self) -> float:
        """Seconds that the next evaluation is expected to take at most."""
        return max(self.milestone, *self.took, 0.0)

    @property
    def seconds_left(self) -> float:
        """Seconds left to work: of the budget, or until the wall limit where that comes first.

        Until the wall limit, one step and the final verification are expected to wait as long as evaluations did.
        """
        passed = self.clock() - self.began
        in_budget = self.budget.seconds - (passed - self.waited())
        return min(in_budget, self.budget.wall_seconds - passed - 2 * self.waiting)

    @property
    def wall_left(self) -> float:
        """Wall-clock seconds until all has to be over."""
        if math.isinf(self.budget.wall_seconds):
            return math.inf
        return self.budget.wall_seconds - (self.clock() - self.began)

    def clone(self) -> Ledger:
        """An independent copy."""
        return replace(
            self,
            took=deque(self.took, RECENT),
            known=dict(self.known),
            accidents=dict(self.accidents),
            refused=dict(self.refused),
            attempts=list(self.attempts),
            torch_ms=dict(self.torch_ms),
            faults=dict(self.faults),
            reported=set(self.reported),
            written=dict(self.written),
            prepared=set(self.prepared),
            guessed=dict(self.guessed),
            submitted={},  # a ticket is answered once
            unchosen=dict(self.unchosen),
        )

    def still_refused(self, before: Program, after: Program) -> frozenset[Action]:
        """What was refused of `after`: itself, and in `before`, on one region that has the same kernel in both."""
        refused = self.refused.get(before.digest, frozenset())
        if refused:
            was, made = ({r.id: p.implementation(r) for r in p.regions} for p in (before, after))
            one = (a for a in refused if len(a.regions) == 1 and a.regions[0] in was)
            same = frozenset(a for a in one if made.get(a.regions[0]) == was[a.regions[0]])
            self.refused[after.digest] = self.refused.get(after.digest, frozenset()) | same
        return self.refused.get(after.digest, frozenset())

    def settled(self, subject: str) -> bool:
        """Whether the evaluation of `subject` answers for it from now on."""
        known = self.known.get(subject)
        if known is None or known.lasting:
            return known is not None
        return known.failure == UNKNOWN or self.accidents[subject] >= ACCIDENTS


__all__ = ["ACCIDENTS", "FINAL", "STOP", "Attempt", "Budget", "Ledger", "Progress", "State", "Unchosen"]
