"""Tensor descriptors: how the entry function tells the copy engine (TMA) of a tensor.

Deals in strides and in text. Knows nothing about operands or loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.expr import constant
from qimeng.coder.template.nest.ir import VECTOR_BYTES, Nest, coalesce
from qimeng.graph.opgraph import itemsize

Strides = tuple[int, int, int]
"""Elements between two batch elements, rows and columns (or depths)."""

STORED = ("float16", "bfloat16", "float32")
"""Dtypes of outputs that leave through descriptors."""


@dataclass(frozen=True)
class Described:
    """A tensor that kernels reach through a descriptor.

    Attributes:
        parameter: the kernel's parameter.
        argument: what the entry function passes for it.
        host: lines of the entry function that make it.
    """

    parameter: str
    argument: str
    host: tuple[str, ...]


def described(name: str, tensor: str, layout: str) -> Described:
    """The descriptor `name`.

    Args:
        name: its variable in the kernel.
        tensor: the entry function's expression for the tensor.
        layout: shape, strides and block as text.
    """
    return Described(name, name, (f"{name} = TensorDescriptor({tensor}, {layout})",))


def strides_in(
    nest: Nest, strides: Mapping[int, int], groups: Sequence[tuple[int, ...]], itemsize: int
) -> Strides | None:
    """The strides of a tensor along batch, rows and depth where each is one walk and a descriptor can take them.

    Args:
        nest: the loop nest.
        strides: axis to stride.
        groups: the axes of the batch, the rows and the depth.
        itemsize: bytes of an element.
    """
    found = []
    for atoms in groups:
        if atoms and len(coalesce(nest, atoms, [dict(strides)])) > 1:
            return None
        found.append(strides.get(atoms[-1], 0) if atoms else VECTOR_BYTES)
    z, row, k = found
    steps = [s for s in (z, row, k) if s != 1]
    if 1 not in (row, k) or len(steps) > 2 or any(s <= 0 or s * itemsize % VECTOR_BYTES for s in steps):
        return None
    return z, row, k


def results_of(plan: GemmPlan, schedule: GemmSchedule, width: int) -> dict[int, Described]:
    """Number to descriptor of the outputs that leave their tiles through one, as far as `schedule` asks for it.

    Those are floating point, cover every row and column, and lie row by row.

    Args:
        plan: the plan.
        schedule: whether there are any.
        width: columns that leave at a time.
    """
    found: dict[int, Described] = {}
    for i in plan.tiles if schedule.stores else ():
        expr, _, _, dtype = plan.nest.outputs[i]
        held = {a for d in expr.dims for a in d}
        whole = set(plan.batch + plan.m + plan.n) <= held and not any(set(d) & held for d, _ in plan.nest.limits)
        strides = strides_in(plan.nest, plan.nest.output_strides(i), (plan.batch, plan.m, plan.n), itemsize(dtype))
        if not whole or dtype not in STORED or strides is None or strides[2] != 1 or constant(expr) is not None:
            continue
        batch, m, n, _ = plan.shape
        z, row, _ = strides
        layout = f"[{m}, {n}], [{row}, 1], [{schedule.block_m}, {width}]"
        if plan.batch:
            layout = f"[{batch}, {m}, {n}], [{z}, {row}, 1], [1, {schedule.block_m}, {width}]"
        found[i] = described(f"y{i}_tiles", f"y{i}", layout)
    return found


__all__ = ["Described", "Strides", "described", "results_of", "strides_in"]
