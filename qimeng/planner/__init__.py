"""Planners and searches by name.

Importing this loads none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qimeng.envs.steps.loop import Search
    from qimeng.interfaces import Planner

PLANNERS = {
    "heuristic": "qimeng.planner.heuristic:HeuristicPlanner",
    "lm": "qimeng.planner.lm.planner:LanguageModelPlanner",
    "lower-only": "qimeng.planner.sweep:LowerOnlyPlanner",
    "random": "qimeng.planner.random:RandomPlanner",
    "sweep": "qimeng.planner.sweep:SweepPlanner",
}
"""Name to the class's location. Each class is made without arguments."""

PLANNER, SEARCH = "lm", "greedy"
"""Defaults of `plan_and_code` and ``qimeng optimize``."""

WITH_FOLDER = {"lm"}
"""Planners that may be named with a folder that holds their weights: ``"lm:runs/planner"``."""

SEARCHES = {
    "archive": "qimeng.planner.archive:ArchiveSearch",
    "beam": "qimeng.planner.beam:BeamSearch",
    "best-of-n": "qimeng.planner.sampling:BestOfN",
    "climb": "qimeng.planner.climb:HillClimb",
    "greedy": "qimeng.planner.greedy:GreedySearch",
    "mcts": "qimeng.planner.mcts:TreeSearch",
}
"""Name to the class's location. Each class is made with a planner; numbers may be given for its other parameters."""


def make_planner(planner: str | Planner, seed: int = 0) -> Planner:
    """The planner called `planner`, as in ``"heuristic"`` or ``"lm:runs/planner"``, or `planner` itself.

    Args:
        planner: a name, or a planner.
        seed: for a named planner that draws.

    Raises:
        ValueError: an unknown name; the message lists the names.
        WeightsError: there are no weights in the folder.
    """
    if not isinstance(planner, str):
        return planner
    name, _, folder = planner.partition(":")
    if folder and name not in WITH_FOLDER:
        raise ValueError(f"only {', '.join(sorted(WITH_FOLDER))} may be named with a folder, not {planner!r}")
    cls = _class(PLANNERS, name, "planner")
    made: Planner = cls(*filter(None, [folder]), **({"seed": seed} if "seed" in signature(cls).parameters else {}))
    return made


def make_search(search: str | Search, planner: str | Planner, seed: int = 0) -> Search:
    """The search called `search` over `planner`, or `search` itself (which brings its own planner).

    A name may be followed by numbers: ``"mcts:c=2"``, ``"archive:islands=4,migrate=8"``; the first one's name may be
    left out: ``"beam:8"``.

    Args:
        search: a name with or without options, or a search.
        planner: a name, or a planner.
        seed: for a named search or planner that draws; an option ``seed=`` counts more.

    Raises:
        ValueError: an unknown name, or options that the search does not take; the message lists what is known.
    """
    if not isinstance(search, str):
        return search
    cls = _class(SEARCHES, search.partition(":")[0], "search")
    known = dict(list(signature(cls).parameters.items())[1:])
    options = {"seed": seed} if "seed" in known else {}
    made: Search = cls(make_planner(planner, seed), **options | _options(search, known))
    return made


def draws(search: str, planner: str) -> bool:
    """Whether a seed matters for this search or planner, given by name."""
    classes = (
        _class(SEARCHES, search.partition(":")[0], "search"),
        _class(PLANNERS, planner.partition(":")[0], "planner"),
    )
    return any("seed" in signature(cls).parameters for cls in classes)


def _options(search: str, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """The numbers that stand behind the name, as whole numbers where the default is one."""
    name, colon, text = search.partition(":")
    found: dict[str, Any] = {}
    for number, part in enumerate(text.split(",") if colon else ()):
        key, equals, value = (p.strip() for p in part.rpartition("="))
        if not equals and number == 0:
            key = next(iter(known), "")
        try:
            if key in found:
                raise ValueError
            found[key] = type(known[key].default)(value)
        except (KeyError, ValueError):
            takes = ", ".join(f"{k}={p.default}" for k, p in known.items())
            raise ValueError(
                f"cannot read {part!r} in the search {search!r}: {name} takes "
                + (f"numbers by these names (their defaults): {takes}" if takes else "no options")
            ) from None
    return found


def _class(table: dict[str, str], name: str, what: str) -> Any:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(sorted(table))}")
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)


__all__ = ["PLANNER", "PLANNERS", "SEARCH", "SEARCHES", "WITH_FOLDER", "draws", "make_planner", "make_search"]
