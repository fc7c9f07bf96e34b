"""The range of a number among settings, which stands in its dataclass field.

Deals in numbers and fields. Knows nothing about what a setting is for.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """Which finite numbers a setting may be.

    >>> [str(r) for r in (Range(), Range(1), Range(most=1), Range(below=1))]
    ['from 0 on', 'from 1 on', 'from 0 to 1', 'from 0 to below 1']

    Attributes:
        least: smallest number.
        most: largest number.
        below: every number is smaller than this.
    """

    least: float = 0
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.least <= value <= self.most and value < self.below

    def __str__(self) -> str:
        if self.below < math.inf:
            return f"from {self.least} to below {self.below}"
        return f"from {self.least} to {self.most}" if self.most < math.inf else f"from {self.least} on"


RANGE = "range"
"""Under this name a field's metadata has its `Range`."""

POSITIVE = {RANGE: Range(1)}
"""Metadata of a field of which there is at least one."""

SHARE = {RANGE: Range(most=1)}
"""Metadata of a field that is at most 1."""

PROPER_SHARE = {RANGE: Range(below=1)}
"""Metadata of a field that is less than 1."""


def range_of(field: dataclasses.Field[Any]) -> Range:
    """The range of a field: what its metadata says, or any number that is not negative."""
    found = field.metadata.get(RANGE, Range())
    assert isinstance(found, Range)
    return found


__all__ = ["POSITIVE", "PROPER_SHARE", "RANGE", "SHARE", "Range", "range_of"]
