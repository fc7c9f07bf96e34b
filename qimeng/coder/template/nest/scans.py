"""Scans: values that depend on the elements before them along an ordered axis.

A scan combines its operands along the axis with an associative operator and keeps every partial result: element ``t``
is ``x[0] o x[1] o … o x[t]``. An operator may work on tuples, so that running positions and linear recurrences are
scans as well (Blelloch, "Prefix Sums and Their Applications", 1990). Deals in which operators there are and what leaves
their operand as it is. Knows nothing about kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qimeng.coder.template.nest.dtypes import compute_dtype, is_float

PARTS: dict[str, tuple[str, ...]] = {
    "sum": ("value",),
    "prod": ("value",),
    "product": ("digits", "power"),
    "max": ("value",),
    "min": ("value",),
    "argmax": ("best", "at"),
    "argmin": ("best", "at"),
    "sumexp": ("max", "sum"),
    "linear": ("scale", "state"),
}
"""Kind of a scan to the names of what it keeps, in the order of its operands.

``argmax`` and ``argmin`` take a value and its position and keep the last of the best; NaN is better than any number.
``product`` takes x and 0 and keeps the running product as digits of size 1 to 2 times a power of two, so that a part of
a row may leave the range of its dtype where the product does not: 0 times what overflowed would be no number.
``sumexp`` takes x and 1 and keeps the maximum m and the sum of exp(x - m). ``linear`` takes a and b and keeps, in
``state``, h[t] = a[t] h[t - 1] + b[t] with h[-1] = 0; ``scale`` is the product of the a.
"""

UNORDERED = frozenset(("sum", "prod", "max", "min", "sumexp"))
"""Kinds whose operands may change places: totals may be summed up in any order. Not so in a ``product``: one that is
infinite keeps the power of what was before the infinity."""


@dataclass(frozen=True)
class Scan:
    """The `param` of a scan.

    Attributes:
        kind: a key of `PARTS`.
        reverse: begin at the end of the axis.
    """

    kind: str
    reverse: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of what the scan keeps."""
        return PARTS[self.kind]


def neutral(kind: str, part: str, dtype: str) -> float | int:
    """The operand number `part` of a scan that leaves the other as it is.

    >>> neutral("max", "value", "float32"), neutral("argmin", "at", "int64"), neutral("linear", "scale", "float32")
    (-inf, -1, 1.0)
    """
    number = float if is_float(dtype) else int
    if part in ("best", "max") or kind in ("max", "min"):
        lowest = kind in ("max", "argmax", "sumexp")
        if is_float(dtype):
            return float("-inf") if lowest else float("inf")
        info = torch.iinfo(getattr(torch, compute_dtype(dtype)))
        return info.min if lowest else info.max
    if part == "at":
        return -1
    return number(1 if kind == "prod" or part in ("scale", "digits") else 0)


__all__ = ["PARTS", "UNORDERED", "Scan", "neutral"]
