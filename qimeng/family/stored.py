"""Schedules from stored data: today's, and those written when one class had the fields of all families.

Deals in names and fields. Knows nothing about what they mean.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from qimeng.family.registry import families
from qimeng.program.schedule import Schedule

OLD_FAMILIES = ("tile", "gemm")
"""The families of that one class."""

OLD_FIELDS = frozenset(
    "form block_p block_r splits lag per_sm block_m block_n block_k group_m warps stages precision cat promote packed "
    "inline persistent descriptors fast".split()
)
"""Its fields; those of other families say nothing about a schedule."""


def schedule_from_data(data: dict[str, Any]) -> Schedule:
    """The schedule from its fields (`dataclasses.asdict`), those that it lacks at their defaults.

    Raises:
        ValueError: an unknown family, or a field that its schedules do not have.
    """
    name = data.get("family", "")
    family = families().get(name)
    if family is None:
        known_names = ", ".join(families())
        raise ValueError(
            f"there is no family {name!r} (known: {known_names}); install the package that brings it, or give its file "
            "(--plugin)"
        )
    known = {f.name for f in fields(family.schedule) if f.init}
    ignored = {"family"} | (OLD_FIELDS if name in OLD_FAMILIES else frozenset())
    if unknown := sorted(set(data) - known - ignored):
        raise ValueError(f"a schedule of the family {name!r} has no field {unknown[0]!r}")
    found: Schedule = family.schedule(**{key: value for key, value in data.items() if key in known})
    return found


__all__ = ["OLD_FAMILIES", "OLD_FIELDS", "schedule_from_data"]
