"""What every search shares: a planner's ranking and prior, and its own trajectory, which searches take first.

Deals in rankings, probabilities and single trajectories. Knows nothing about how steps are carried out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from qimeng.envs.steps.next_kernels import prepare_first
from qimeng.envs.steps.session import Session
from qimeng.errors import PlannerFault
from qimeng.interfaces import Action, Observation, Planner
from qimeng.planner.heuristic import HeuristicPlanner

CHOICE = 0.5
"""Share of the prior that goes to the choice of a planner without scores; the rest is uniform."""

FLOOR = 0.1
"""Uniform share of a search's prior, so that a confident planner rules out no action."""

PATIENCE = 10
"""Evaluations in a row without a better program after which a trajectory is left."""


class Search(ABC):
    """Decides which steps are taken on a session and its forks."""

    @abstractmethod
    def run(self, session: Session) -> str:
        """Take steps until nothing is left to do; why it ended (`qimeng.envs.steps.result.Result.stopped`)."""

    def ahead(self, session: Session) -> None:
        """Have compiled what the first steps may need, while the start program is judged: those of the planner by rule.

        Args:
            session: not yet begun.
        """
        prepare_first(session, HeuristicPlanner().choose)


class ScoringPlanner(Planner):
    """A planner that scores every action, which gives a search a ranking in one call."""

    @abstractmethod
    def scores(self, observation: Observation) -> Sequence[float]:
        """A score for each of `observation.actions`, higher is better (log-probabilities, say)."""

    def scores_of(self, observations: Sequence[Observation]) -> list[Sequence[float]]:
        """`scores` of several observations; a planner that is quicker at many together says so here."""
        return [self.scores(o) for o in observations]

    def choose(self, observation: Observation) -> Action:
        """The action with the highest score, the first of them where several share it."""
        return best_action(observation, self.scores(observation))


def best_action(observation: Observation, scores: Sequence[float]) -> Action:
    """The action with the highest of `scores`, the first of them where several share it."""
    fitting(observation, scores)
    return observation.actions[max(range(len(scores)), key=scores.__getitem__)]


def fitting(observation: Observation, scores: Sequence[float]) -> Sequence[float]:
    """`scores`, if there is one for each action.

    Raises:
        PlannerFault: there are more or fewer.
    """
    if len(scores) != len(observation.actions):
        raise PlannerFault(f"it gave {len(scores)} scores for {len(observation.actions)} actions")
    return scores


class ValuingPlanner(ScoringPlanner):
    """A scoring planner that also says what a state is worth."""

    @abstractmethod
    def look(self, observation: Observation) -> tuple[Sequence[float], float]:
        """The scores, and the value of the state in any unit (a search compares values of one planner only)."""

    def scores(self, observation: Observation) -> Sequence[float]:
        """The scores alone."""
        return self.look(observation)[0]


def top_actions(planner: Planner, observation: Observation, count: int) -> tuple[Action, ...]:
    """The `count` actions that `planner` likes best, best first.

    A planner without scores is asked repeatedly, without its earlier choices. Its `stop` ends the list.
    """
    if isinstance(planner, ScoringPlanner):
        scores = fitting(observation, planner.scores(observation))
        ranked = sorted(zip(scores, observation.actions, strict=True), key=lambda pair: -pair[0])
        return tuple(action for _, action in ranked[:count])
    chosen: list[Action] = []
    while len(chosen) < count:
        left = tuple(a for a in observation.actions if a not in chosen)
        if not left:
            break
        chosen.append(planner.choose(replace(observation, actions=left)))
        if chosen[-1].kind == "stop":
            break
    return tuple(chosen)


def policy(planner: Planner, observation: Observation) -> tuple[float, ...]:
    """The probability that `planner` gives to each of `observation.actions`.

    The softmax of its scores, which leaves log-probabilities what they are. A planner without scores gives `CHOICE` to
    what it would choose; all other actions but `stop` share the rest evenly.
    """
    if isinstance(planner, ScoringPlanner):
        return softmax(fitting(observation, planner.scores(observation)))
    chosen = planner.choose(observation)
    others = [a for a in observation.actions if a.kind != "stop" and a != chosen]
    share = (1 - CHOICE) / len(others) if others else 0.0
    return tuple(
        (CHOICE if others else 1.0) if a == chosen else share if a.kind != "stop" else 0.0 for a in observation.actions
    )


def prior(planner: Planner, observation: Observation) -> tuple[dict[Action, float], float]:
    """The guide of a search: a probability for each action except `stop`, and the value of the state.

    The planner's `policy` without `stop` (a search ends with its budget), of which `FLOOR` is made uniform. The value
    is 0 for a planner that gives none.
    """
    value = 0.0
    if isinstance(planner, ValuingPlanner):
        scores, value = planner.look(observation)
        found = softmax(fitting(observation, scores))
    else:
        found = policy(planner, observation)
    moves = {a: p for a, p in zip(observation.actions, found, strict=True) if a.kind != "stop"}
    total = sum(moves.values())
    if not total:  # the planner would stop
        return {a: 1 / len(moves) for a in moves}, value
    return {a: (1 - FLOOR) * p / total + FLOOR / len(moves) for a, p in moves.items()}, value


def softmax(scores: Sequence[float]) -> tuple[float, ...]:
    """exp(s) over the sum of them.

    >>> [round(p, 2) for p in softmax([0.0, 0.0, -1e9])]
    [0.5, 0.5, 0.0]
    """
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = sum(weights)
    return tuple(w / total for w in weights)


def trajectory(
    session: Session, choose: Callable[[Observation], Action], patience: int = PATIENCE
) -> Iterator[Session]:
    """Step as `choose` says on a fork of `session`, and yield a fork of it at the start and after every step.

    It ends where the choice is to stop, the budget is used up, or `patience` evaluations in a row found no better
    program (0: never for that reason).
    """
    branch, ledger = session.fork(), session.ledger
    branch.begin()
    best, since = ledger.leader, ledger.evaluations
    yield branch.fork()
    while branch.exhausted() is None and not (patience and ledger.evaluations - since >= patience):
        branch.step(choose(branch.observe()))
        if ledger.leader is not best:
            best, since = ledger.leader, ledger.evaluations
        yield branch.fork()


def own_trajectory(planner: Planner, session: Session, patience: int = PATIENCE) -> Iterator[Session]:
    """What `planner` does by itself (`trajectory`).

    Searches run it first, so that they are never worse than their own planner.
    """
    return trajectory(session, planner.choose, patience)


def out_of_budget(session: Session) -> str | None:
    """``"evaluations"`` or ``"seconds"`` where a search has used them up, whatever branch it stands on."""
    reason = session.exhausted()
    return reason if reason in ("evaluations", "seconds") else None


__all__ = [
    "FLOOR",
    "PATIENCE",
    "ScoringPlanner",
    "Search",
    "ValuingPlanner",
    "best_action",
    "fitting",
    "out_of_budget",
    "own_trajectory",
    "policy",
    "prior",
    "softmax",
    "top_actions",
    "trajectory",
]
