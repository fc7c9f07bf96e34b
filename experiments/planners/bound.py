"""The most that any trajectory on a stored tree can have found: what a planner that knows the tree would do.

Deals in trees and gains. Where a method is as good as this bound, the tree has no room left to tell it from a better
one. Knows nothing about methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import networkx as nx

from experiments.planners.replay import EVALUATIONS, log_gain
from experiments.planners.summary import AT, bootstrap, percents
from qimeng.bench.markdown import markdown
from qimeng.bench.row import Environment, RowError, whole_lines
from qimeng.planner.data.tree import Tree


@dataclass(frozen=True)
class Bound:
    """What the tree of one spec allows.

    Attributes:
        spec: digest of the spec.
        name: what it is called.
        device: name of the device whose times the tree holds.
        gains: largest log-gain of a program that some path of the tree reaches with 1, 2, 3 … evaluations, the start
            program's included. Each comes from a path of its own, so that no single run need reach all of them.
        known: largest log-gain of all programs in the tree.
        environment: where it was computed.
    """

    spec: str
    name: str
    device: str
    gains: tuple[float, ...]
    known: float
    environment: Environment

    def share(self, evaluations: int) -> float:
        """Share of the best-known log-gain, 0 to 1."""
        return self.gains[min(evaluations, len(self.gains)) - 1] / self.known if self.known else 1.0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))


def bound(tree: Tree, environment: Environment, evaluations: int = EVALUATIONS) -> Bound:
    """The bound of `tree`: shortest paths, a judged step counting 1 and one of the graph alone nothing.

    Args:
        tree: what was explored.
        environment: where this runs.
        evaluations: up to how many.

    Raises:
        SpecError: the spec cannot be made.
        TreeError: the tree does not begin with the program that this version makes of its spec.
    """
    start = tree.start()
    tree = tree.today(start)
    gains = {key: log_gain(e) for key, e in tree.keyed.items()}
    steps = {subject: log_gain(e) for purpose, subject, e in tree.evaluations if purpose == "step"}
    needed, reached = _needed(tree, start.digest), [steps.get(start.digest, 0.0)] * evaluations
    for edge in tree.edges:  # what a step was judged by may be another program than the one that it leads to
        count, gain = needed.get(edge.parent, evaluations), gains.get(edge.evaluation or "", 0.0)
        reached[count:] = [max(gain, g) for g in reached[count:]]
    about = tree.conditions.spec, tree.name, tree.conditions.device
    return Bound(*about, tuple(round(g, 5) for g in reached), round(max(steps.values(), default=0.0), 5), environment)


def read_bounds(path: Path | str) -> tuple[Bound, ...]:
    """The bounds of a file, one a line.

    Raises:
        RowError: no such file, or a line in it is no bound.
    """
    return tuple(map(_from_json, whole_lines(path)))


def table(bounds: Sequence[Bound]) -> str:
    """Mean shares over the trees of each device, one line a device."""
    lines = [["times", "trees", *(f"after {n}" for n in AT)]]
    for device in dict.fromkeys(b.device for b in bounds):
        some = [b for b in bounds if b.device == device]
        figures = [bootstrap([b.share(n) for b in some]) for n in AT]
        lines.append([device, str(len(some)), *map(percents, figures)])
    return markdown(lines)


BOUNDS: dict[str, Callable[[Sequence[Bound]], str]] = {"bound": table}
"""What a table in a document may ask for."""


def _needed(tree: Tree, start: str) -> dict[str, int]:
    """Each program that can be reached to the fewest evaluations that it takes."""
    steps = nx.MultiDiGraph()
    steps.add_node(start)
    for edge in tree.edges:
        if edge.accepted and edge.child is not None:
            steps.add_edge(edge.parent, edge.child, judged=int(edge.evaluation is not None))
    more = nx.single_source_dijkstra_path_length(steps, start, weight="judged")
    return {program: 1 + count for program, count in more.items()}


def _from_json(text: str) -> Bound:
    try:
        data = json.loads(text)
        return Bound(**{**data, "gains": tuple(data["gains"]), "environment": Environment(**data["environment"])})
    except (ValueError, KeyError, TypeError) as error:
        raise RowError(f"not a bound: {text[:80]!r} ({type(error).__name__}: {error})") from error


__all__ = ["BOUNDS", "Bound", "bound", "read_bounds", "table"]
