"""Where losses of a convolution's copy are noted: for each image, and each step of the rows along a dimension of it.

A row's window reaches a short range of that dimension. So an element that planes do not hold costs the exact form in
those tiles whose windows reach it, not in all tiles of its image. Deals in positions of the copy and lines of kernel
text. Knows nothing about what planes lose (see `guard`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.positions import summed
from qimeng.coder.template.families.gemm.staging import images_of
from qimeng.coder.template.nest.axes import Axes
from qimeng.coder.template.nest.expr import Expr, Sum, positions, sum_of


@dataclass(frozen=True)
class Losses:
    """The losses of an image: that of step `o` is of positions ``step * o + least`` to ``step * o + most``.

    Attributes:
        count: losses of an image.
        step: positions between those of neighbouring steps.
        least: first position that step 0 reaches.
        most: last position that step 0 reaches.
        size: positions of the copy along the dimension.
        inner: elements of the copy's further spatial dimensions, for each position.
    """

    count: int
    step: int
    least: int
    most: int
    size: int
    inner: int

    def note(self, rows: int, noted: str) -> list[str]:
        """Lines of a program of the copy that note what it loses of each of its positions, where that is anything.

        Args:
            rows: positions of the copy that `p` counts, inside those that `z` counts.
            noted: the loss to note where `lost` is more than 0.
        """
        index, outer = ("z", self.inner // rows) if self.along_z(rows) else ("p", self.inner)
        reached = ["(lost > 0)", "(o >= 0)", f"(h <= {summed([f'o * {self.step}', str(self.most)])})"]
        if self.least > 0:  # a quotient that is negative is rounded up
            reached.append(f"(h >= o * {self.step} + {self.least})")
        at = f"a_loss_ptr + image * {self.count} + o"
        return [
            f"h = {index} // {outer} % {self.size}",
            f"last = tl.minimum(({summed(['h', str(-self.least)])}) // {self.step}, {self.count - 1})",
            f"for j in range({min(self.count, (self.most - self.least) // self.step + 1)}):",
            "    o = last - j",
            f'    tl.atomic_max({at}, {noted}, mask={" & ".join(reached)}, sem="relaxed")',
        ]

    def along_z(self, rows: int) -> bool:
        """Whether a program that has several of `rows` positions has one position of the dimension."""
        return self.inner % rows == 0


def losses_of(plan: GemmPlan) -> Losses:
    """The losses of the copy that `plan` reads; one for each image where its rows do not walk along the copy."""
    staging, axes = plan.staging, plan.nest.axes
    assert staging is not None
    sizes = [plan.extent(d) for d in staging.order[1:-1]]
    for axis in plan.m[len(images_of(plan)) :][:1]:
        for i, (position, _) in enumerate(positions(staging.read)):
            place = sum_of(axes, position)
            step = place.steps.get(axis, 0)
            ends = _ends(axes, place.plus(Sum({axis: -step})))
            if step > 0 and ends is not None:
                return Losses(plan.extent((axis,)), step, *ends, sizes[i], prod(sizes[i + 1 :]))
    return Losses(1, 1, 0, sizes[0] - 1, sizes[0], prod(sizes[1:]))


def _ends(axes: Axes, e: Any) -> tuple[int, int] | None:
    """No more than the least and no less than the largest value of a position; None where neither is known."""
    if isinstance(e, int):
        return e, e
    place = e if isinstance(e, Sum) else sum_of(axes, e)
    least = most = place.constant
    ranges = [((0, axes.size(atom) - 1), step) for atom, step in place.steps.items()]
    for term, factor in place.others:
        found = _quotient_ends(axes, term)
        if found is None:
            return None
        ranges.append((found, factor))
    for ends, factor in ranges:
        low, high = sorted(end * factor for end in ends)
        least, most = least + low, most + high
    return least, most


def _quotient_ends(axes: Axes, e: Expr) -> tuple[int, int] | None:
    """`_ends` of a quotient or remainder by a number."""
    if e.op not in ("idiv", "imod") or not isinstance(e.args[1], int):
        return None
    ends, by = _ends(axes, e.args[0]), e.args[1]
    if ends is None:
        return None
    least, most = ends
    if e.op == "idiv":
        return least // by, -(-most // by)  # whichever way it is rounded
    return (0, min(most, by - 1)) if least >= 0 else (1 - by, by - 1)


__all__ = ["Losses", "losses_of"]
