"""Best-of-n sampling: the planner's own trajectory, then others drawn from its policy, none of them twice.

Deals in independent trajectories from a seed. Knows nothing about branches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import STOP
from qimeng.interfaces import Action, Observation, Planner
from qimeng.planner.search import FLOOR, PATIENCE, Search, own_trajectory, policy, trajectory

MOST_STOP = 0.5
"""Largest probability of `stop`: a planner that stops too soon would end the same way on every trajectory."""
END = ""
"""Where a trajectory ends: in place of the digest of a next program."""


class BestOfN(Search):
    """Take the planner's choices once, then draw `n` - 1 more trajectories from its policy; the best program counts.

    Each begins at the start program and ends where `stop` is drawn or nothing better was found for a while. They are
    drawn without replacement, so that a confident planner does not repeat the same trajectory (Shi, Bieber and Singh,
    "Incremental sampling without replacement for sequence models", ICML 2020; here for programs, which several orders
    of steps lead to). What was judged before is not judged again, so it costs no evaluation.

    Args:
        planner: gives the policy (`qimeng.planner.search.policy`).
        n: trajectories at most; the budget usually ends them earlier.
        seed: of what is drawn.
        patience: evaluations in a row without a better program after which a trajectory is left; 0 for never.
        floor: share of the policy's other actions than `stop` that is uniform; `stop` has `MOST_STOP` at most.
    """

    def __init__(self, planner: Planner, n: int = 1000, seed: int = 0, patience: int = PATIENCE, floor: float = FLOOR):
        if n < 1 or patience < 0 or not 0 <= floor <= 1:
            raise ValueError(
                f"n must be at least 1, patience at least 0 and floor a share, got {n}, {patience} and {floor}"
            )
        self.planner, self.n, self.patience, self.floor = planner, n, patience, floor
        self._random = random.Random(f"best of n {seed}")

    def run(self, session: Session) -> str:
        """Go on until all trajectories have ended or the budget is used up; ``"stop"`` in the first case."""
        left = _Left(self)
        left.take_out(own_trajectory(self.planner, session, self.patience))
        for _ in range(self.n - 1):
            if reason := session.exhausted():
                return reason
            if not left.anything(session):
                break
            left.take_out(trajectory(session, left.draw, self.patience))
        return session.exhausted() or "stop"

    def chances(self, observation: Observation) -> dict[Action, float]:
        """The probability of each action: the planner's policy, `stop` at most `MOST_STOP`, the others with a floor."""
        found = dict(zip(observation.actions, policy(self.planner, observation), strict=True))
        moves = [a for a in observation.actions if a != STOP]
        if not moves:
            return {STOP: 1.0}
        stop = min(found.get(STOP, 0.0), MOST_STOP)
        total = sum(found[a] for a in moves)
        shares = {a: found[a] / total if total else 1 / len(moves) for a in moves}
        return {STOP: stop} | {
            a: (1 - stop) * ((1 - self.floor) * p + self.floor / len(moves)) for a, p in shares.items()
        }

    def pick(self, actions: Sequence[Action], weights: Sequence[float]) -> Action:
        """One of `actions`, by their weights."""
        return self._random.choices(actions, weights)[0]


class _Left:
    """Trajectories that were not drawn yet: for each program the remaining share of those that start there.

    A program's share is that of its next programs, weighed by the chances of the actions that lead there.
    """

    def __init__(self, search: BestOfN):
        self.search = search
        self._chances: dict[str, dict[Action, float]] = {}
        self._next: dict[str, dict[Action, str]] = {}
        self._share: dict[str, float] = {END: 0.0}

    def anything(self, session: Session) -> bool:
        """Whether there is a trajectory from where `session` stands that was not drawn."""
        return self._share.get(session.state.program.digest, 1.0) > 1e-9

    def draw(self, observation: Observation) -> Action:
        """An action by its remaining probability; `stop` if nothing remains."""
        digest = observation.program.digest
        if digest not in self._chances:
            self._chances[digest] = self.search.chances(observation)
        weights = [self._weight(digest, a) for a in observation.actions]
        return self.search.pick(observation.actions, weights) if sum(weights) > 0 else STOP

    def take_out(self, steps: Iterator[Session]) -> None:
        """Exclude a trajectory, and every continuation of it, from later draws."""
        passed: list[str] = []
        last: tuple[str, Action] | None = None
        for branch in steps:
            digest = branch.state.program.digest
            if passed:
                step = branch.state.history[-1]
                goes_on = step.accepted and step.action != STOP
                self._next.setdefault(passed[-1], {})[step.action] = digest if goes_on else END
                last = (passed[-1], step.action) if goes_on or step.action == STOP else last
            if not passed or digest != passed[-1]:
                passed.append(digest)
        if last is not None:
            self._next[last[0]][last[1]] = END
        for digest in reversed(passed):
            if self._share.get(digest, 1.0) > 0 and digest in self._chances:
                self._share[digest] = sum(self._weight(digest, a) for a in self._chances[digest])

    def _weight(self, digest: str, action: Action) -> float:
        after = self._next.get(digest, {}).get(action)
        return self._chances[digest].get(action, 0.0) * (1.0 if after is None else self._share.get(after, 1.0))


__all__ = ["BestOfN"]
