"""What a kind of another package may do wrong, told in one line that names the kind.

Deals in the calls of a registered kind and in what they return. Knows nothing about any one kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from qimeng.errors import CoderError, IllegalAction, KindFault
from qimeng.interfaces import Action, Patch
from qimeng.program.schedule import Schedule

if TYPE_CHECKING:
    from qimeng.actions.base import Kind

FAMILIES = ("tile", "gemm")
_BLOCKS = ("block_p", "block_r", "block_m", "block_n", "block_k", "warps")
_COUNTS = ("splits", "lag", "per_sm", "group_m", "stages")


def guarded(kind: Kind) -> Kind:
    """`kind`, its calls replaced by ones that raise nothing but `IllegalAction` and return what they should."""
    for name, problem in (
        ("check", _nothing),
        ("proposals", _not_proposals),
        ("rewrite", _not_schedules),
        ("apply", _not_a_patch),
    ):
        setattr(kind, name, _guard(kind, name, getattr(kind, name), problem))
    return kind


def _guard(kind: Kind, name: str, call: Callable[..., Any], problem: Callable[[Kind, Any], str]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            found = call(*args, **kwargs)
            found = tuple(found) if isinstance(found, Iterator) else found  # what it raises, it raises here
        except (IllegalAction, CoderError):
            raise
        except Exception as error:  # another package's code may raise anything
            raise _fault(kind, name, f"raised {type(error).__name__}: {error}") from error
        if text := problem(kind, found):
            raise _fault(kind, name, text)
        return found

    return run


def _fault(kind: Kind, name: str, text: str) -> KindFault:
    where = f"{type(kind).__module__}.{type(kind).__qualname__}"
    return KindFault(kind.name, f"the kind of action {kind.name!r} ({where}) is at fault: its {name} {text}")


def _nothing(kind: Kind, found: Any) -> str:
    return ""


def _not_proposals(kind: Kind, found: Any) -> str:
    if not isinstance(found, (tuple, list)):
        return f"returned {type(found).__name__}, not actions"
    wrong = [a for a in found if not isinstance(a, Action) or a.kind != kind.name]
    return f"yielded {wrong[0]!r}, which is no action of its own" if wrong else ""


def _not_a_patch(kind: Kind, found: Any) -> str:
    return "" if found is None or isinstance(found, Patch) else f"returned {type(found).__name__}, not a patch"


def _not_schedules(kind: Kind, found: Any) -> str:
    if not isinstance(found, (tuple, list)):
        return f"returned {type(found).__name__}, not a tuple of schedules"
    return next((text for item in found if (text := schedule_fault(item))), "")


def schedule_fault(schedule: Any) -> str:
    """Why nothing can be printed from `schedule`; empty where it is well formed.

    >>> schedule_fault(Schedule(block_p=3))
    'returned a schedule with block_p = 3; it must be a power of two'
    """
    if not isinstance(schedule, Schedule):
        return f"returned {type(schedule).__name__} among its schedules"
    if schedule.family not in FAMILIES:
        return f"returned a schedule of the family {schedule.family!r}; known: {', '.join(FAMILIES)}"
    for name in _BLOCKS:
        value = getattr(schedule, name)
        if type(value) is not int or value < 1 or value & (value - 1):
            return f"returned a schedule with {name} = {value!r}; it must be a power of two"
    for name in _COUNTS:
        value = getattr(schedule, name)
        if type(value) is not int or value < 1:
            return f"returned a schedule with {name} = {value!r}; it must be a positive integer"
    return ""


__all__ = ["FAMILIES", "guarded", "schedule_fault"]
