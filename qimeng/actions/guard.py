"""What a kind of another package may do wrong, reported in one line that names the kind.

Deals in the calls of a registered kind and in what they return. Knows nothing about any one kind.
"""

from __future__ import annotations

from typing import Any

from qimeng.actions.base import GraphRewrite, Kind, Remainder, ScheduleKind
from qimeng.errors import CoderError, IllegalAction, KindFault
from qimeng.family.guard import schedules_of
from qimeng.graph.partition_check import partition_fault
from qimeng.graph.region import Region
from qimeng.interfaces import Action
from qimeng.plugins import anything, guard, returns, where
from qimeng.program.program import Program
from qimeng.program.schedule import Schedule


def guarded(kind: Kind) -> Kind:
    """`kind`, its calls replaced by ones that raise nothing but `IllegalAction` and return what they should."""

    def fault(text: str) -> KindFault:
        return KindFault(kind.name, f"the kind of action {kind.name!r} ({where(kind)}) is at fault: {text}")

    def proposals(found: Any) -> str:
        if not isinstance(found, (tuple, list)):
            return f"returned {type(found).__name__}, not actions"
        wrong = [a for a in found if not isinstance(a, Action) or a.kind != kind.name]
        return f"yielded {wrong[0]!r}, which is no action of its own" if wrong else ""

    passes = (IllegalAction, CoderError)
    guard(kind, "check", anything, fault, *passes)
    guard(kind, "proposals", proposals, fault, *passes)
    guard(kind, "promising", returns(bool), fault, *passes)
    guard(kind, "left_out", returns(str), fault, *passes)
    guard(kind, "target", returns(Region), fault, *passes)
    guard(kind, "remains", lambda found: "" if found is None else returns(Remainder)(found), fault, *passes)
    guard(kind, "apply", returns(GraphRewrite), fault, *passes)
    apply = kind.apply

    def fitting(program: Program, *args: Any, **kwargs: Any) -> GraphRewrite:
        found = apply(program, *args, **kwargs)
        if text := _unfit(program, found):
            raise fault(f"its apply returned {text}")
        return found

    kind.apply = fitting  # type: ignore[method-assign]
    if isinstance(kind, ScheduleKind):
        rewrite = kind.rewrite

        def checked(schedule: Schedule, *args: Any, **kwargs: Any) -> Any:
            found = rewrite(schedule, *args, **kwargs)
            if text := schedules_of(type(schedule))(found):
                raise fault(f"its rewrite {text}")
            return found

        kind.rewrite = checked  # type: ignore[method-assign]
        guard(kind, "rewrite", anything, fault, *passes)
    return kind


def _unfit(program: Program, found: GraphRewrite) -> str:
    """What is wrong with a rewrite of `program`; empty where nothing is."""
    if found.rewrites:  # the regions follow from them, which is checked where they are made
        return ""
    if found.regions is not None and (text := partition_fault(program.graph, found.regions)):
        return f"a partition that {text}"
    after = {r.id for r in (program.regions if found.regions is None else found.regions)}
    alien = next((r for r in (found.region, *found.each) if r is not None and r.id not in after), None)
    if alien is not None:
        return f"a rewrite of the region {alien.id} ({alien.label()}), which the partition does not have"
    return ""


__all__ = ["guarded"]
