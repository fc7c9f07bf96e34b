"""What a family of another package may do wrong, reported in one line that names the family.

Deals in the calls of a registered family and in what they return. Knows nothing about any one family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qimeng.errors import FamilyFault, IllegalAction
from qimeng.family.base import AnyFamily, Cost, Needs, Unsupported
from qimeng.plugins import Problem, anything, guard, returns, where
from qimeng.program.program import Implementation
from qimeng.program.schedule import Schedule


def guarded(family: AnyFamily) -> AnyFamily:
    """`family`, its calls replaced by ones that raise nothing but what they may, and return what they should."""
    one = schedule_of(family.schedule)
    several = schedules_of(family.schedule)
    calls: dict[str, Problem] = {
        "plan": anything,
        "concerns": returns(bool),
        "default": one,
        "guesses": several,
        "unmeasured": one,
        "reduced": one,
        "needs": returns(Needs),
        "print": returns(Implementation),
        "cost": returns(Cost),
        "word": _word,
        "intents": _intents,
        "samples": returns(tuple),
    }
    passes = (Unsupported, IllegalAction)
    for name, problem in calls.items():
        guard(family, name, problem, _fault(family), *passes)
    for kind, move in family.moves.items():
        for name, problem in {"check": anything, "schedules": several, "probe": several}.items():
            guard(move, name, problem, _fault(family, f"in its move {kind!r} "), *passes)
    return family


def schedule_of(kind: type[Schedule]) -> Problem:
    """A problem where something else than a well-formed schedule of `kind` is returned."""

    def problem(found: Any) -> str:
        if not isinstance(found, Schedule):
            return f"returned {type(found).__name__}, not a schedule"
        if not isinstance(found, kind):
            return f"returned a schedule of the family {found.family!r}; it must be of {kind().family!r}"
        fault = found.fault()
        return f"returned a schedule with {fault}" if fault else ""

    return problem


def schedules_of(kind: type[Schedule]) -> Problem:
    """A problem where something else than a tuple or list of well-formed schedules of `kind` is returned."""
    one = schedule_of(kind)

    def problem(found: Any) -> str:
        if not isinstance(found, (tuple, list)):
            return f"returned {type(found).__name__}, not a tuple of schedules"
        return next((text for item in found if (text := one(item))), "")

    return problem


def _word(found: Any) -> str:
    one = isinstance(found, str) and found.isascii() and len(found.split()) == 1
    return "" if one else f"returned {found!r}, not one word in ASCII"


def _intents(found: Any) -> str:
    if not isinstance(found, (tuple, list)) or any(not isinstance(i, tuple) or len(i) != 2 for i in found):
        return f"returned {found!r}, not pairs of a kind and an option"
    return ""


def _fault(family: AnyFamily, part: str = "") -> Callable[[str], FamilyFault]:
    name = family.name
    return lambda text: FamilyFault(name, f"the family {name!r} ({where(family)}) is at fault: {part}{text}")


__all__ = ["guarded", "schedule_of", "schedules_of"]
