"""How the scan family cuts a nest: the axis that scans go along is the columns, the other axes are rows.

Deals in axes and extents. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from qimeng.coder.template.families.common import special_functions
from qimeng.coder.template.nest.expr import Expr, reach
from qimeng.coder.template.nest.ir import Nest, by_stride
from qimeng.coder.template.nest.loads import Loads
from qimeng.coder.template.nest.rows import MOST_REPEATS, RowPlan, groups_of, memory_of
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.coder.template.rules.regions import region_nest
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.region import Region

LONGEST_TILE = 32768
"""Most elements of a row in registers, 64 a thread at 16 warps, where scans keep one or two values for each."""


@dataclass(frozen=True, eq=False)
class ScanPlan(RowPlan):
    """A region as rows and ordered columns; `passes` counts reductions over the columns that scans may need."""

    @cached_property
    def special(self) -> tuple[str, ...]:
        """Special functions that every element takes in fp32."""
        return special_functions(self)

    @cached_property
    def scans(self) -> list[Expr]:
        """The scans, those that others are computed from first."""
        return self.nest.scans()

    @cached_property
    def directions(self) -> frozenset[bool]:
        """Whether there are forward (False) and reverse (True) scans."""
        return frozenset(e.param.reverse for e in self.scans)

    @property
    def turns(self) -> bool:
        """Whether the axis may be walked from its end (`ScanSchedule.backwards`)."""
        return self.directions == {True} and len(self.columns) == 1

    @cached_property
    def forms(self) -> tuple[str, ...]:
        """The forms of schedules that can be printed (see `ScanSchedule.form`)."""
        return tuple(form for form in ("resident", "loop", "split") if not self.why_not(form))

    def why_not(self, form: str) -> str:
        """Why there is no schedule of this form, with the numbers; empty where there is."""
        if form == "resident":
            most = LONGEST_TILE * 2 // max(self.parts, 2)
            long = f"a row of {self.column_count} elements does not stay in registers, which hold {most}"
            return long if power_of_two(self.column_count) > most else ""
        if len(self.directions) > 1:
            return "scans in both directions need the whole row at once"
        if self._below(self.nest.reductions()):
            return "a reduction of a scan needs the whole row at once"
        if form == "split" and self.passes:
            return f"{self.passes} passes of reductions come before the scan"
        if form == "split" and self._below(self.scans):
            return "a scan of a scan needs more than the totals of what comes before"
        return ""

    def _below(self, exprs: Iterable[Expr]) -> bool:
        """Whether one of `exprs` is computed from a scan."""
        return any(a.op == "scan" for a in reach(a for e in exprs for a in e.operands()))

    @cached_property
    def parts(self) -> int:
        """Values that the scans keep for each element."""
        return sum(len(e.param.parts) for e in self.scans)


def plan_scan(region: Region) -> ScanPlan:
    """The plan for `region`.

    Raises:
        Unsupported: no template covers it; or it has scans or reductions along different axes, a matrix product, or a
            scan that would be computed many times over.
    """
    return cut_nest(*region_nest(region))


def cut_nest(region: Region, nest: Nest, loads: Loads) -> ScanPlan:
    """The plan for one loop nest of `region`.

    Raises:
        Unsupported: as for `plan_scan`.
    """
    if not nest.ordered:
        raise NotConcerned("no scan")
    if nest.dot is not None:
        raise NotConcerned("a matrix product is not in the scan family")
    ordered = _order(nest)
    for e in (*nest.scans(), *nest.reductions()):
        repeats = nest.axes.extent(nest.kept - nest.ordered - e.depends)
        if repeats > MOST_REPEATS:
            raise Unsupported(f"a scan or its sum would be computed {repeats} times over, as its result is broadcast")
    rows = groups_of(nest, by_stride(nest, nest.kept - nest.ordered))
    columns = groups_of(nest, ordered)
    plan = ScanPlan(region, nest, loads, tuple(rows), tuple(columns), nest.passes, *memory_of(nest, rows, columns))
    if not plan.forms:
        raise Unsupported(f"{plan.why_not('loop')}, and {plan.why_not('resident')}")
    return plan


def _order(nest: Nest) -> tuple[int, ...]:
    """The ordered axes, outermost first."""
    first = nest.scans()[0].reduced
    if any(e.reduced != first for e in nest.scans()):
        raise Unsupported("scans along different axes in one region")
    if any(frozenset(e.reduced) != nest.ordered for e in nest.reductions()):
        raise Unsupported("a scan and a reduction along different axes in one region")
    return tuple(first)


__all__ = ["LONGEST_TILE", "ScanPlan", "cut_nest", "plan_scan"]
