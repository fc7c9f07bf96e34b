"""A left operand that is read along its rows: a run of rows at one depth, wherever single elements of a weight are.

Deals in how x^T lies in memory. Where it lies so already it is read there; else a kernel of the gemm family writes it
before the product. Knows nothing about the loop around it.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.families.gemm.plan import GemmPlan, Side
from qimeng.coder.template.families.gemm.planes import Planes
from qimeng.coder.template.families.gemm.reading import Pointers, strides_of_tensor
from qimeng.coder.template.families.gemm.schedule import GemmSchedule

INSIDE = "b_in"
"""The mask of the depths that are read."""

WIDE = 1 << 31
"""Elements from which on offsets take 64 bits."""


class Turned(Operand):
    """The transpose of the left operand, one run of rows at each of a vector of depths.

    Attributes:
        wide: elements between two depths in memory.
        overhangs: tiles overhang the rows, whose mask is `m_ok`.
        big: offsets take 64 bits.
    """

    wide: int
    overhangs: bool
    big: bool

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave the rows at the depths `k`, a vector, in `target`; zero outside the mask `INSIDE`."""
        at = f"{k}.to(tl.int64)" if self.big else k
        mask = f"{INSIDE} & m_ok" if self.overhangs else INSIDE
        return [f"{target} = tl.load({self.parameters[0]} + {at} * {self.wide} + rm, mask={mask}, other=0.0)"]


class TurnedCopy(Turned, Planes):
    """Written before the product, its rows filled up to whole tiles."""

    overhangs = False

    @property
    def k_major(self) -> bool:
        """Memory runs along the rows."""
        return False


class TurnedTensor(Turned):
    """Read where it lies: a tensor whose rows are neighbours in memory."""

    def _arrange(self) -> None:
        found = strides_of_tensor(self.plan, self.side)
        assert found is not None and self.side.plain is not None and self.side.plain.param is not None
        _, rows, _, depth = self.plan.shape
        self.wide, self.overhangs = found[2], rows % self.schedule.block_m > 0
        self.big = depth * self.wide >= WIDE
        number = self.side.plain.param
        self.parameters, self.arguments = [f"x{number}_ptr"], [self.names[number]]


def lies_turned(plan: GemmPlan) -> bool:
    """Whether the rows of the left operand are neighbours in memory; a single row lies so where it is contiguous."""
    found = strides_of_tensor(plan, plan.a)
    return found is not None and (found[1] if plan.m else found[2]) == 1


def left_operand(side: Side, plan: GemmPlan, schedule: GemmSchedule, prefix: str, names: dict[int, str]) -> Operand:
    """The left operand in the way that the schedule asks for."""
    if not getattr(schedule, "transposed", False):
        return Pointers(side, plan, schedule, prefix, names)
    kind = TurnedTensor if lies_turned(plan) else TurnedCopy
    return kind(side, plan, schedule, prefix, names)


__all__ = ["INSIDE", "WIDE", "Turned", "TurnedCopy", "TurnedTensor", "left_operand", "lies_turned"]
