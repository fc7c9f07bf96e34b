"""Planners and searches by name.

Importing this loads none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qimeng.envs.loop import Search
    from qimeng.interfaces import Planner

PLANNERS = {
    "heuristic": "qimeng.planner.heuristic:HeuristicPlanner",
    "lm": "qimeng.planner.lm.planner:LanguageModelPlanner",
    "lower-only": "qimeng.planner.sweep:LowerOnlyPlanner",
    "random": "qimeng.planner.random:RandomPlanner",
    "sweep": "qimeng.planner.sweep:SweepPlanner",
}
"""Name to where the class is; each is made without arguments."""

WITH_FOLDER = {"lm"}
"""Planners that may be named with a folder that holds their weights: ``"lm:runs/planner"``."""

SEARCHES = {
    "beam": "qimeng.planner.beam:BeamSearch",
    "climb": "qimeng.planner.climb:HillClimb",
    "greedy": "qimeng.planner.greedy:GreedySearch",
}
"""Name to where the class is; each is made with a planner."""


def make_planner(planner: str | Planner) -> Planner:
    """The planner called `planner`, as in ``"heuristic"`` or ``"lm:runs/planner"``, or `planner` itself.

    Raises:
        ValueError: an unknown name; the message lists the names.
        WeightsError: there are no weights in the folder, or none come with the package.
    """
    if not isinstance(planner, str):
        return planner
    name, _, folder = planner.partition(":")
    if folder and name not in WITH_FOLDER:
        raise ValueError(f"only {', '.join(sorted(WITH_FOLDER))} may be named with a folder, not {planner!r}")
    made: Planner = _class(PLANNERS, name, "planner")(*filter(None, [folder]))
    return made


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


__all__ = ["PLANNERS", "SEARCHES", "WITH_FOLDER", "make_planner", "make_search"]
