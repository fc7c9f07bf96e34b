"""Where families are registered, and which of them covers a region.

Deals in names, entry points, matching, and in faults of other packages' families. Knows nothing about any one family:
the built-in ones are loaded by name when one is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from qimeng.device import Device
from qimeng.errors import FamilyFault, IllegalAction
from qimeng.family.base import AnyFamily, Family, Move, NotConcerned, Unsupported
from qimeng.family.guard import guarded
from qimeng.graph.region import Region, RegionKey
from qimeng.plugins import SHIPPED, Installed, not_an_object
from qimeng.program.schedule import Schedule

GROUP = "qimeng.families"
"""Entry-point group through which other packages add families."""

BUILT_IN = {
    "recurrent": "qimeng.coder.template.families.recurrent.family:Recurrent",
    "gemm": "qimeng.coder.template.families.gemm.family:Gemm",
    "attention": "qimeng.coder.template.families.attention.family:Attention",
    "scan": "qimeng.coder.template.families.scan.family:Scans",
    "tile": "qimeng.coder.template.families.tile.family:Tile",
}
"""Name to where the class is, in the order in which they are asked."""

OTHER = "other"
"""The word for regions that no family has one for."""

_own: dict[str, AnyFamily] = {}
_built_in: dict[str, AnyFamily] = {}
_faults: dict[str, str] = {}
_coverers: dict[tuple[tuple[AnyFamily, ...], str], AnyFamily | Unsupported] = {}

MOST_KEPT = 100_000
"""Regions whose family is kept: those of a network of thousands of operators, and of the fusions it allows."""


def families() -> dict[str, AnyFamily]:
    """Every family by name, in the order in which they are asked: those of other packages know less and go first.

    Families of installed packages (entry points) are loaded at the first call.

    Raises:
        QimengError: an installed package's family cannot be loaded or registered; the message names the package.
    """
    _installed.take()
    for name, place in BUILT_IN.items():
        if name not in _built_in:
            module, _, attribute = place.partition(":")
            _built_in[name] = getattr(import_module(module), attribute)()
    return _own | _built_in


def register_family(family: AnyFamily) -> AnyFamily:
    """Add a family; it is asked before those registered earlier and before the built-in ones.

    Raises:
        ValueError: a family of that name is registered already, the name is not an identifier, the schedule is no
            frozen dataclass of that family whose fields have defaults, rivals are no names of others, or a move is no
            `Move`.
    """
    if text := not_an_object(family, "family", Family):
        raise ValueError(text)
    name, schedule = getattr(family, "name", None), getattr(family, "schedule", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a family's name must be an identifier, {type(family).__qualname__} has {name!r}")
    if name in BUILT_IN or name in _own:
        raise ValueError(f"a family called {name!r} is registered already")
    if not (isinstance(schedule, type) and issubclass(schedule, Schedule) and is_dataclass(schedule)):
        raise ValueError(f"the family {name!r} has the schedule {schedule!r}; it must be a dataclass of Schedule")
    if schedule().family != name:
        raise ValueError(
            f"the schedule of the family {name!r} says that it is of {schedule().family!r}; "
            f"give it the field family: str = family_field({name!r})"
        )
    if not isinstance(family.rivals, tuple) or any(not isinstance(n, str) or n == name for n in family.rivals):
        raise ValueError(f"the family {name!r} has the rivals {family.rivals!r}; give a tuple of other families' names")
    if wrong := [kind for kind, move in family.moves.items() if not isinstance(move, Move)]:
        raise ValueError(f"the family {name!r} has a move {wrong[0]!r} that is no Move")
    mine, others = {name: guarded(family)}, dict(_own)
    _own.clear()
    _own.update(mine | others)
    return family


def unregister_family(name: str) -> None:
    """Take a family out again (for tests and notebooks)."""
    _own.pop(name, None)


def is_built_in(family: AnyFamily) -> bool:
    """Whether this package brought it, so that what it prints need not be checked like anybody's text."""
    shipped = any(type(family).__module__.startswith(f"{package}.") for package in SHIPPED)
    return _built_in.get(family.name) is family or (shipped and _own.get(family.name) is family)


def family_of(schedule: Schedule) -> AnyFamily:
    """The family that prints `schedule`.

    Raises:
        IllegalAction: there is none of that name; the message lists the names.
    """
    try:
        return families()[schedule.family]
    except KeyError:
        raise IllegalAction(f"no family {schedule.family!r}; known: {', '.join(families())}") from None


def plan_of(family: AnyFamily, region: Region) -> Any:
    """The plan of `region` by `family`; equal regions are planned once.

    Raises:
        Unsupported: the family does not cover it.
        FamilyFault: the family fails by itself.
    """
    found = _plan(family, RegionKey(region))
    if isinstance(found, Unsupported):
        raise found.with_traceback(None)
    return found


def covering(region: Region) -> tuple[AnyFamily, Any]:
    """The first family that covers `region`, and its plan.

    A family that fails by itself is passed over; what it did is for `take_faults`.

    Raises:
        Unsupported: none does; the message is that of the first family whose business such regions are.
        FamilyFault: one failed by itself, and no other covers the region.
    """
    found = _coverer(region)
    if isinstance(found, Unsupported):
        raise found.with_traceback(None)
    return found, plan_of(found, region)


def rivals(region: Region, family: AnyFamily) -> list[tuple[AnyFamily, Any]]:
    """The rivals of `family` that cover `region` as well, and their plans; one that fails by itself is left out."""
    found = []
    for name in (n for n in family.rivals if n in families()):
        try:
            found.append((families()[name], plan_of(families()[name], region)))
        except Unsupported:
            continue
        except FamilyFault as fault:
            _faults[name] = str(fault)
    return found


def uncovered(region: Region) -> str | None:
    """None where a family covers `region`, else the reason.

    Raises:
        FamilyFault: one failed by itself, and no other covers the region.
    """
    found = _coverer(region)
    return str(found) if isinstance(found, Unsupported) else None


def _coverer(region: Region) -> AnyFamily | Unsupported:
    """The first family that covers `region`, or why none does; kept, as steps ask about the same regions again."""
    asked = tuple(families().values())
    key = asked, region.signature
    if key in _coverers:
        return _coverers[key]
    reasons: dict[str, Unsupported] = {}
    failed: FamilyFault | None = None
    found: AnyFamily | None = None
    for family in asked:
        try:
            plan_of(family, region)
            found = family
            break
        except Unsupported as error:
            reasons[family.name] = error
        except FamilyFault as fault:
            _faults[family.name], failed = str(fault), fault
    if failed is not None:  # it is reported again each time
        if found is None:
            raise failed
        return found
    if len(_coverers) >= MOST_KEPT:
        _coverers.clear()
    _coverers[key] = found or _telling(region, reasons)
    return _coverers[key]


def _telling(region: Region, reasons: Mapping[str, Unsupported]) -> Unsupported:
    """The reason to tell: of a family that looked at the region closely, else of the one whose business it is."""
    mine = concerned(region)
    found = [*([reasons[mine.name]] if mine is not None else []), *reasons.values()]
    return min(found, key=lambda reason: isinstance(reason, NotConcerned))


def is_covered(region: Region) -> bool:
    """Whether a family covers `region`."""
    return uncovered(region) is None


def concerned(region: Region) -> AnyFamily | None:
    """The family whose business regions like this are, covered or not; None where nobody's.

    Kept, since every state asks for it again; but not where a family failed, which is reported each time.
    """
    known: dict[Any, AnyFamily | None] = region.graph.memo.setdefault("concerned", {})
    asked = tuple(families().values())
    key = asked, region.nodes
    if key in known:
        return known[key]
    found, failed = None, False
    for family in asked:
        try:
            if family.concerns(region):
                found = family
                break
        except FamilyFault as fault:
            _faults[family.name], failed = str(fault), True
    if not failed:
        known[key] = found
    return found


def word_of(region: Region) -> str:
    """What planners read `region` is: the word of the family whose business it is, ``"other"`` where nobody's."""
    family = concerned(region)
    try:
        return OTHER if family is None else family.word(region)
    except FamilyFault as fault:
        _faults[fault.family] = str(fault)
        return OTHER


def take_faults() -> dict[str, str]:
    """Families that failed by themselves and were passed over since this was last asked: name to message."""
    found = dict(_faults)
    _faults.clear()
    return found


def refusal(family: AnyFamily, plan: Any, schedule: Schedule, device: Device) -> str | None:
    """None where `schedule` fits `device`, else why not, with the numbers."""
    return family.needs(plan, schedule).refusal(device)


@lru_cache(4096)
def _plan(family: AnyFamily, key: RegionKey) -> Any:
    """The plan, or the `Unsupported` that says why there is none."""
    try:
        return family.plan(key.region)
    except Unsupported as error:
        error.__context__ = error.__cause__ = None  # which hold what the family worked on, as its traceback does
        return error.with_traceback(None)


_installed = Installed(GROUP, "family", lambda found: register_family(found() if isinstance(found, type) else found))


__all__ = [
    "BUILT_IN",
    "GROUP",
    "OTHER",
    "concerned",
    "covering",
    "families",
    "family_of",
    "is_built_in",
    "is_covered",
    "plan_of",
    "refusal",
    "register_family",
    "rivals",
    "take_faults",
    "uncovered",
    "unregister_family",
    "word_of",
]
