"""Monte Carlo tree search with the planner's policy as prior (PUCT).

Deals in visits and values of a tree whose nodes are programs. Knows nothing about how steps are carried out. The rule
is AlphaZero's (Silver et al., "Mastering the game of Go without human knowledge", Nature 550, 2017); `TreeSearch`
describes the differences.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from qimeng.envs.judge.ranking import gain
from qimeng.envs.steps.session import Session
from qimeng.interfaces import Action, Planner
from qimeng.planner.search import PATIENCE, Search, out_of_budget, own_trajectory, prior

FEW = 0.1
"""Parameter of the Dirichlet distribution of the noise; AlphaZero's is about 10 over the number of moves."""


@dataclass(eq=False)
class Node:
    """A program where it was first reached.

    Attributes:
        session: stands at the program; steps are taken on forks of it.
        parent: the program it was reached from.
        most: the most log-gain over the start program on the way here, this program included.
        worth: mean of `most` and of its own log-gain (of the last program on the way, where it was not timed).
        moves: the prior of each action that may still be tried or leads to a child; made at the first visit.
        children: the programs that actions led to.
        best: the greatest worth in the subtree.
        hopes: sum of the planner's values over the subtree.
        visits: nodes of the subtree.
    """

    session: Session
    parent: Node | None
    most: float = 0.0
    worth: float = 0.0
    moves: dict[Action, float] = field(default_factory=dict)
    children: dict[Action, Node] = field(default_factory=dict)
    best: float = 0.0
    hopes: float = 0.0
    visits: int = 0


class TreeSearch(Search):
    """Follow the planner's own trajectory, then expand the tree where value and prior are highest.

    From the start program down, the action with the greatest ``Q + c P sqrt(N) / (1 + n)`` is taken until one was not
    tried yet: P is its prior, n its visits, N those of the program. One step is run there, and its result updates all
    programs above. Steps are deterministic and only the best program counts. So, unlike in a game:

    - Q is the greatest worth in the subtree, divided by the largest log-gain found so far. An untried action has the
      worth of the program it would change. The worth of a program is the mean of its own log-gain and the largest
      log-gain on its path, since a step may cost time before a later one pays off.
    - Where the planner gives values, `value` of Q is the mean of them over the subtree, scaled to 0 … 1 over all
      programs seen.
    - A share `noise` of every program's prior is drawn from a Dirichlet distribution that favours few actions. So with
      a flat prior the search follows one branch instead of trying each once. (AlphaZero does this at the root only.)
    - A program has one node, where it was first reached; actions that lead to a known program, and refused ones, are
      closed. No rollouts: a program's time is measured, not guessed.

    Args:
        planner: gives the prior, and values where it is a `ValuingPlanner`.
        c: weight of the prior against the values found.
        value: share of the planner's value in Q, 0 to 1.
        noise: share of the prior that is drawn, 0 to 1.
        seed: of what is drawn.
        patience: as for `qimeng.planner.search.trajectory`, for the planner's own trajectory.
    """

    def __init__(
        self,
        planner: Planner,
        c: float = 1.5,
        value: float = 0.25,
        noise: float = 0.5,
        seed: int = 0,
        patience: int = PATIENCE,
    ):
        if not c > 0 or not (0 <= value <= 1 and 0 <= noise <= 1) or patience < 0:
            raise ValueError(
                "c must be above 0, value and noise shares, patience at least 0: got "
                f"{c}, {value}, {noise} and {patience}"
            )
        self.planner, self.c, self.value, self.noise, self.patience = planner, c, value, noise, patience
        self._random = random.Random(f"mcts {seed}")

    def prior(self, branch: Session) -> tuple[dict[Action, float], float]:
        """The planner's prior with its noise, and the value of the program that `branch` stands at."""
        moves, value = prior(self.planner, branch.observe())
        drawn = [self._random.gammavariate(FEW, 1) for _ in moves]
        total = sum(drawn) or 1.0
        return {
            a: (1 - self.noise) * p + self.noise * g / total for (a, p), g in zip(moves.items(), drawn, strict=True)
        }, value

    def run(self, session: Session) -> str:
        """Go on until the budget is used up, or every program that can be reached was tried (``"stop"``)."""
        tree = _Tree(self)
        for branch in list(own_trajectory(self.planner, session, self.patience)):
            tree.add(branch)
        while (reason := out_of_budget(session)) is None:
            found = tree.select()
            if found is None:
                return "stop"
            node, action = found
            branch = node.session.fork()
            branch.step(action)
            tree.add(branch)
        return reason


class _Tree:
    """The nodes of one search, by the digest of their program."""

    def __init__(self, search: TreeSearch):
        self.search = search
        self.nodes: dict[str, Node] = {}
        self.root: Node | None = None
        self.best = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, branch: Session) -> None:
        """Record the program that `branch` reached: a new node, or a known program, which closes the action."""
        state = branch.state
        if self.root is None:
            self.root = self.nodes[state.program.digest] = Node(branch, None)
            self._look(self.root)
            return
        action = state.history[-1].action
        before = state.parent if state.history[-1].accepted and action.kind != "stop" else state
        assert before is not None
        parent = self.nodes[before.program.digest]
        if state.program.digest in self.nodes:
            if action not in parent.children:
                parent.moves.pop(action, None)
            return
        found = gain(state.evaluation, branch.ledger.start)
        own = math.log(found) if found is not None else 2 * parent.worth - parent.most
        most = max(parent.most, own)
        node = Node(branch, parent, most, (most + own) / 2)
        node.best = node.worth
        self.nodes[state.program.digest] = parent.children[action] = node
        self._look(node)

    def select(self) -> tuple[Node, Action] | None:
        """The program and the action to try next; None where nothing is left."""
        assert self.root is not None
        node = self.root
        while True:
            action = max(node.moves, key=lambda a: self._score(node, a), default=None)
            if action is None:  # nothing left below: its parent forgets it
                if node.parent is None:
                    return None
                node.parent.moves.pop(next(a for a, child in node.parent.children.items() if child is node), None)
                node = self.root
            elif action not in node.children:
                return node, action
            else:
                node = node.children[action]

    def _look(self, node: Node) -> None:
        """Ask the planner about a new program and tell those above what was found."""
        branch = node.session
        hope = 0.0
        if branch.exhausted() is None or out_of_budget(branch):
            node.moves, hope = self.search.prior(branch)
        self.low, self.high = min(self.low, hope), max(self.high, hope)
        self.best = max(self.best, node.most)
        above: Node | None = node
        while above is not None:
            above.visits += 1
            above.hopes += hope
            above.best = max(above.best, node.worth)
            above = above.parent

    def _score(self, node: Node, action: Action) -> float:
        child = node.children.get(action)
        known, visits = (node.worth, 0) if child is None else (child.best, child.visits)
        hopes = node.hopes / node.visits if child is None else child.hopes / child.visits
        q = known / self.best if self.best else 0.0
        if self.high > self.low:
            q = (1 - self.search.value) * q + self.search.value * (hopes - self.low) / (self.high - self.low)
        return q + self.search.c * node.moves[action] * math.sqrt(node.visits) / (1 + visits)


__all__ = ["Node", "TreeSearch"]
