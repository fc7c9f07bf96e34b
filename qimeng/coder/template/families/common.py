"""What several families decide alike.

Deals in nests and devices. Knows nothing about any one family's schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.coder.template.nest.ir import Nest
from qimeng.coder.template.nest.rows import RowPlan
from qimeng.coder.template.triton.special import SPECIAL
from qimeng.device import Device
from qimeng.errors import IllegalAction


def fast_by_default(nest: Nest, device: Device) -> bool:
    """Whether special functions are computed in few instructions from the start.

    Half types are, where the GPU has the units: what those leave out is below the rounding of the result, and such
    kernels are bound by instructions rather than memory.
    """
    return device.has("approximate") and nest.finest != "float32" and any(e.op in SPECIAL for e in nest.exprs)


def special_functions(plan: RowPlan) -> tuple[str, ...]:
    """Special functions that every element takes in fp32; those of a row's sums take no time."""
    inside = {a for group, _ in plan.columns for a in group}
    found = {e.op for e in plan.nest.exprs if e.op in SPECIAL and e.dtype != "float64" and e.depends & inside}
    return tuple(sorted(found))


def check_special(special: Sequence[str], fast: bool, param: str, device: Device) -> None:
    """Check the action `special`.

    Args:
        special: special functions that every element takes (`special_functions`).
        fast: whether they are computed in few instructions now.
        param: ``"fast"`` or another form.
        device: where the kernel runs.

    Raises:
        IllegalAction: there is no such function, the GPU has no units for them, or they are computed so already.
    """
    if not special:
        raise IllegalAction("no element of the region takes a special function (exp, log, tanh, sqrt …) in fp32")
    if not device.has("approximate"):
        raise IllegalAction(f"the approximate units are called by NVIDIA's instructions, not {device.name}'s")
    if fast == (param == "fast"):
        raise IllegalAction(f"{', '.join(special)} {param} is what the region has")


__all__ = ["check_special", "fast_by_default", "special_functions"]
