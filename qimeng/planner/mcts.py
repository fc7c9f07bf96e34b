"""Monte Carlo tree search with the planner's policy as prior (PUCT).

Deals in visits and values of a tree whose nodes are programs. Knows nothing about how steps are carried out. The rule
is AlphaZero's (Silver et al., "Mastering the game of Go without human knowledge", Nature 550, 2017); what is different
here is said at `TreeSearch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qimeng.envs.ranking import gain
from qimeng.envs.session import Session
from qimeng.interfaces import Action, Planner
from qimeng.planner.search import PATIENCE, Search, out_of_budget, own_trajectory, prior


@dataclass(eq=False)
class Node:
    """A program where it was first reached.

    Attributes:
        session: stands at the program; steps are taken on forks of it.
        parent: the program it was reached from.
        gain: the most log-gain over the start program on the way here, this program included.
        moves: the prior of each action that may still be tried or leads to a child; made at the first visit.
        children: the programs that actions led to.
        best: the most log-gain in the subtree.
        hopes: sum of the planner's values over the subtree.
        visits: nodes of the subtree that were made or looked at.
        seen: whether the planner was asked about it.
    """

    session: Session
    parent: Node | None
    gain: float
    moves: dict[Action, float] = field(default_factory=dict)
    children: dict[Action, Node] = field(default_factory=dict)
    best: float = 0.0
    hopes: float = 0.0
    visits: int = 0
    seen: bool = False


class TreeSearch(Search):
    """Follow the planner's own trajectory, then grow the tree where value and prior promise most.

    From the start program down, the action with the greatest ``Q + c P sqrt(N) / (1 + n)`` is taken until one was not
    tried yet: P is its prior, n its visits, N those of the program. One step is carried out there, and what came of it
    is told to all programs above. Steps are deterministic and only the best program counts, so, unlike in a game:

    - Q is the most log-gain in the subtree, over the most found so far; of an action not tried, the most on the way.
    - Where the planner gives values, `value` of Q is the mean of them over the subtree, scaled to 0 … 1 over all
      programs seen.
    - A program has one node, where it was first reached; actions that lead to a known program, and refused ones, are
      closed. No rollouts: a program's time is measured, not guessed.

    Args:
        planner: gives the prior, and values where it is a `ValuingPlanner`.
        c: how much the prior counts against what was found.
        value: share of the planner's value in Q, 0 to 1.
        patience: as for `qimeng.planner.search.trajectory`, for the planner's own trajectory.
    """

    def __init__(self, planner: Planner, c: float = 1.5, value: float = 0.25, patience: int = PATIENCE):
        if not c > 0 or not 0 <= value <= 1 or patience < 0:
            raise ValueError(f"c must be above 0, value a share, patience at least 0: got {c}, {value}, {patience}")
        self.planner, self.c, self.value, self.patience = planner, c, value, patience

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
        """Take in where `branch` stands after its last step: a new program, or one that closes an action."""
        state = branch.state
        if self.root is None:
            self.root = self.nodes[state.program.digest] = Node(branch, None, 0.0)
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
        start = branch.ledger.start
        measured = math.log(gain(state.evaluation, start) or 1.0) if start is not None else 0.0
        node = Node(branch, parent, max(parent.gain, measured))
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
            node.moves, hope = prior(self.search.planner, branch.observe())
        self.low, self.high = min(self.low, hope), max(self.high, hope)
        self.best = max(self.best, node.gain)
        above: Node | None = node
        while above is not None:
            above.visits += 1
            above.hopes += hope
            above.best = max(above.best, node.gain)
            above = above.parent

    def _score(self, node: Node, action: Action) -> float:
        child = node.children.get(action)
        known, visits = (node.gain, 0) if child is None else (child.best, child.visits)
        hopes = node.hopes / node.visits if child is None else child.hopes / child.visits
        q = known / self.best if self.best else 0.0
        if self.high > self.low:
            q = (1 - self.search.value) * q + self.search.value * (hopes - self.low) / (self.high - self.low)
        return q + self.search.c * node.moves[action] * math.sqrt(node.visits) / (1 + visits)
