"""Planners and searches by name.

Importing this loads none of them. A language-model planner is added to `PLANNERS` like the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qimeng.envs.loop import Search
    from qimeng.interfaces import Planner

PLANNERS = {
    "heuristic": "qimeng.planner.heuristic:HeuristicPlanner",
    "lower-only": "qimeng.planner.sweep:LowerOnlyPlanner",
    "random": "qimeng.planner.random:RandomPlanner",
    "sweep": "qimeng.planner.sweep:SweepPlanner",
}
"""Name to where the class is; each is made without arguments."""

SEARCHES = {
    "beam": "qimeng.planner.beam:BeamSearch",
    "climb": "qimeng.planner.climb:HillClimb",
    "greedy": "qimeng.planner.greedy:GreedySearch",
}
"""Name to where the class is; each is made with a planner."""


def make_planner(planner: str | Planner) -> Planner:
    """The planner called `planner`, or `planner` itself.

    Raises:
        ValueError: an unknown name; the message lists the names.
    """
    if isinstance(planner, str):
        made: Planner = _class(PLANNERS, planner, "planner")()
        return made
    return planner


def make_search(search: str | Search, planner: str | Planner) -> Search:
    """The search called `search` over `planner`, or `search` itself (which brings its own planner).

    Raises:
        ValueError: an unknown name; the message lists the names.
    """
    if isinstance(search, str):
        made: Search = _class(SEARCHES, search, "search")(make_planner(planner))
        return made
    return search


def _class(table: dict[str, str], name: str, what: str) -> Any:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(sorted(table))}")
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)


__all__ = ["PLANNERS", "SEARCHES", "make_planner", "make_search"]
