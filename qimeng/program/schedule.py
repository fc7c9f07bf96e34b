"""Schedules: the numbers from which a family prints a kernel.

Deals in what every family's schedule has in common: a name, a text, fields that say what values they admit. The fields
themselves (block sizes, forms, precisions) are each family's own. Knows nothing about a region's operators or about
kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self


def power_of_two(default: int) -> Any:
    """A field of a schedule whose value is a power of two (block sizes, warps)."""
    return field(default=default, metadata={"admits": "power"})


def count(default: int = 1) -> Any:
    """A field of a schedule whose value is a positive integer (splits, stages)."""
    return field(default=default, metadata={"admits": "count"})


def device_flag() -> Any:
    """A field that a family turns on wherever the device can do it: no choice, and so not shown in texts."""
    return field(default=False, metadata={"shown": False})


def family_field(name: str) -> Any:
    """The field `family` of a family's own schedule class; it is no argument."""
    return field(default=name, init=False)


@dataclass(frozen=True)
class Schedule:
    """How a region's loop nest is cut and mapped to the GPU; each family extends it by the fields it needs.

    Every field has a default, so that a text shows what is out of the ordinary alone and older recipes load.

    Attributes:
        family: name of the family that prints it.
    """

    family: str = family_field("")

    def but(self, **changes: Any) -> Self:
        """This schedule with some fields changed."""
        return replace(self, **changes)

    @property
    def numerics(self) -> str:
        """What of it decides on rounding errors; empty where all schedules of the family round alike."""
        return ""

    def fault(self) -> str:
        """Which field has a value that no kernel can be printed from; empty where all are well formed."""
        for f in fields(self):
            value, admits = getattr(self, f.name), f.metadata.get("admits")
            whole = type(value) is int and value >= 1
            if admits == "power" and not (whole and value & (value - 1) == 0):
                return f"{f.name} = {value!r}; it must be a power of two"
            if admits == "count" and not whole:
                return f"{f.name} = {value!r}; it must be a positive integer"
        return ""

    def __str__(self) -> str:
        chosen = [f for f in fields(self) if f.metadata.get("shown", True) and getattr(self, f.name) != f.default]
        return f"{self.family}({', '.join(f'{f.name}={getattr(self, f.name)}' for f in chosen)})"


__all__ = ["Schedule", "count", "device_flag", "family_field", "power_of_two"]
