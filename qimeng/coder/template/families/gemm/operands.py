"""Which way an operand takes to the main loop.

Deals in the choice. Knows nothing about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.inline import Inline
from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.families.gemm.plan import GemmPlan, Side
from qimeng.coder.template.families.gemm.planes import Planes
from qimeng.coder.template.families.gemm.reading import Pointers, Tensor, strides_of_tensor
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import is_inline, is_packed, through_registers
from qimeng.coder.template.families.gemm.shifted import Shifted


def operand(plan: GemmPlan, schedule: GemmSchedule, side: Side, prefix: str, names: dict[int, str]) -> Operand:
    """The operand in the way the schedule asks for, or by pointers where that cannot be.

    Beside an operand that goes through registers, one that goes straight to the tensor cores is not read through a
    descriptor: Triton 3.6 then refills its stages too early. Measured on H200: TF32, 8 warps, 3 or 4 stages, one
    operand packed: errors of 0.4 to 1.7 where TF32's own are 1e-3, gone without descriptors or with both packed.
    """
    through = {s.name for s in plan.sides if through_registers(plan, schedule, s)}
    if through and side.name not in through:
        schedule = schedule.but(descriptors=False)
    if side.name == "a" and plan.shift is not None:
        return Shifted(side, plan, schedule, prefix, names)
    if side.reader is not None:
        made: Operand = side.reader(side, plan, schedule, prefix, names)
        return made
    if is_packed(plan, schedule, side):
        return Planes(side, plan, schedule, prefix, names)
    if is_inline(plan, schedule, side):
        return Inline(side, plan, schedule, prefix, names)
    if schedule.descriptors and plan.half and strides_of_tensor(plan, side) is not None:
        return Tensor(side, plan, schedule, prefix, names)
    return Pointers(side, plan, schedule, prefix, names)


__all__ = ["operand"]
