"""Planners and searches by name: those of the library, and those of installed packages (entry points).

A package brings a planner by an entry point of the group ``"qimeng.planners"``: a class, or a function, made without
arguments, or with ``seed``. A search is one of the group ``"qimeng.searches"``, made with a planner. Importing this
loads none of them, and asking for one loads that one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from qimeng.errors import QimengError
from qimeng.plugins import named

if TYPE_CHECKING:
    from qimeng.envs.steps.loop import Search
    from qimeng.interfaces import Planner

PLANNER_GROUP = "qimeng.planners"
"""Entry-point group through which other packages add planners."""

SEARCH_GROUP = "qimeng.searches"
"""Entry-point group through which other packages add searches."""

PLANNERS = {
    "heuristic": "qimeng.planner.heuristic:HeuristicPlanner",
    "lm": "qimeng.planner.lm.planner:LanguageModelPlanner",
    "lower-only": "qimeng.planner.sweep:LowerOnlyPlanner",
    "random": "qimeng.planner.random:RandomPlanner",
    "roofline": "qimeng.planner.sweep:RooflinePlanner",
    "sweep": "qimeng.planner.sweep:SweepPlanner",
}
"""Name to the class's location. Each class is made without arguments."""

PLANNER = "lm"
"""Default planner of `plan_and_code` and ``qimeng optimize``."""

SEARCH = "greedy"
"""Their default search."""

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
        QimengError: an installed package's planner cannot be made; the message names it.
    """
    if not isinstance(planner, str):
        return planner
    name, _, folder = planner.partition(":")
    if planner.endswith(":"):
        raise ValueError(f"{planner!r} names no folder: add one, or leave the colon out")
    if folder and name not in WITH_FOLDER:
        raise ValueError(f"only {', '.join(sorted(WITH_FOLDER))} may be named with a folder, not {planner!r}")
    from qimeng.interfaces import Planner as Base

    cls = _class(PLANNERS, name, "planner")
    given = {"seed": seed} if "seed" in _parameters(cls) else {}
    made: Planner = _made(Base, name in PLANNERS, "planner", name, lambda: cls(*filter(None, [folder]), **given))
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
        QimengError: an installed package's search cannot be made; the message names it.
    """
    if not isinstance(search, str):
        return search
    from qimeng.planner.search import Search as Base

    name = search.partition(":")[0]
    cls = _class(SEARCHES, name, "search")
    known = dict(list(_parameters(cls).items())[1:])
    options = ({"seed": seed} if "seed" in known else {}) | _options(search, known)
    chosen = make_planner(planner, seed)
    made: Search = _made(Base, name in SEARCHES, "search", name, lambda: cls(chosen, **options))
    return made


def draws(search: str, planner: str) -> bool:
    """Whether a seed matters for this search or planner, given by name."""
    classes = (
        _class(SEARCHES, search.partition(":")[0], "search"),
        _class(PLANNERS, planner.partition(":")[0], "planner"),
    )
    return any("seed" in _parameters(cls) for cls in classes)


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


def _parameters(cls: Any) -> Mapping[str, Parameter]:
    try:
        return signature(cls).parameters
    except (TypeError, ValueError):  # a class written in C, which some package names by mistake
        return {}


def _made(base: type, own: bool, what: str, name: str, make: Callable[[], Any]) -> Any:
    """What `make` makes; errors of the library's `own` are passed on, those of another package's get its name."""
    if own:
        return make()
    try:
        found = make()
    except QimengError:
        raise
    except Exception as error:  # another package's code may raise anything
        raise QimengError(f"the {what} {name!r} cannot be made ({type(error).__name__}: {error})") from error
    if not isinstance(found, base):
        raise QimengError(
            f"the {what} {name!r} is a {type(found).__name__}; it must extend {base.__module__}.{base.__qualname__}"
        )
    return found


def _class(table: dict[str, str], name: str, what: str) -> Any:
    if name not in table:
        found = named(PLANNER_GROUP if what == "planner" else SEARCH_GROUP, what, name, table)
        if not callable(found):
            raise QimengError(f"the {what} {name!r} is a {type(found).__name__}; it must be a class or a function")
        return found
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)


__all__ = [
    "PLANNER",
    "PLANNERS",
    "PLANNER_GROUP",
    "SEARCH",
    "SEARCHES",
    "SEARCH_GROUP",
    "WITH_FOLDER",
    "draws",
    "make_planner",
    "make_search",
]
