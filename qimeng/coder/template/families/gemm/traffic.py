"""Which operands of a product are worth a copy in the form the main loop wants, and which it should split itself.

A copy is read, written and read again. That is nothing beside the arithmetic of most products, and it is worth it where
rows do not begin at multiples of 16 bytes. Where operands are read for few results, memory is what the product waits
for: then its main loop makes the planes of what it reads. Deals in bytes and peak rates. Knows nothing about blocks.
"""

from __future__ import annotations

import math

from qimeng.coder.template.families.gemm.plan import OVERLAPPING, GemmPlan, Side
from qimeng.coder.template.families.gemm.scheme import SCHEMES
from qimeng.coder.template.nest.expr import Expr
from qimeng.device import Device
from qimeng.graph.opgraph import itemsize

SMALL_SHARE = 1 / 8
"""Share of the traffic that a product cannot avoid which is little beside it."""

SLOWDOWN = 2.0
"""How much longer the arithmetic takes where the main loop splits operands (H200: 67 TFLOP/s where packed planes allow
131), or multiplies in TF32 rather than fp16."""

TF32_FROM = 0.5
"""TF32, which copies nothing, is tried from this share of the point at which it pays at peak rates. Measured on H200:
16384 x 2048 by 2048 x 768, where the share is 0.53, took 0.16 ms in TF32 and 0.25 ms with copies."""

NOTICED_S = 10e-6
"""Seconds that copies must take to be worth sparing: less than that is lost among launches."""


def operand_bytes(plan: GemmPlan, side: Side) -> int:
    """Bytes of the tensors below an operand; elements that several windows read count once."""
    return sum(_bytes(plan, e) for e in side.loads)


def _bytes(plan: GemmPlan, load: Expr) -> int:
    nest, source = plan.nest, plan.nest.sources[load.param]
    elements = nest.axes.extent(load.depends)
    if load.access:
        elements = min(elements, math.prod(source.shape))
    return elements * itemsize(source.dtype)


def moved_bytes(plan: GemmPlan) -> int:
    """Bytes of every tensor that is read or written."""
    windows = [e for e in plan.nest.exprs if e.op == "load" and e.access]
    repeated = sum(plan.nest.axes.extent(plan.nest.walked_strides(e)) * itemsize(e.dtype) for e in windows)
    return sum(size for _, size in plan.nest.accesses()) - repeated + sum(_bytes(plan, e) for e in windows)


def is_small(plan: GemmPlan, side: Side) -> bool:
    """True where a copy of the operand moves little beside what the product moves anyway."""
    return 3 * operand_bytes(plan, side) * side.repeats <= SMALL_SHARE * moved_bytes(plan)


def packed_sides(plan: GemmPlan, packed: str, precision: str) -> str:
    """Operands to pack under `precision`, where `packed` are so far.

    Parameters where planes are what the main loop reads, and operands that it could read only element by element. Half
    operands that are computed are computed once rather than in every tile that needs them. TF32 wants operands rounded
    and K-major, so that small ones are packed as well. Overlapping windows are never copied.
    """
    scheme = SCHEMES[precision]
    found = set(packed)
    for side in plan.sides:
        if side.name in never_copied(plan):
            continue
        if plan.half:
            wanted = not side.aligned or side.plain is None
        elif scheme.splits:
            wanted = side.held or not side.aligned
        else:
            wanted = scheme.rounds and (side.held or not side.aligned or is_small(plan, side))
        if wanted:
            found.add(side.name)
    return "".join(sorted(found))


def inline_sides(plan: GemmPlan, device: Device, precision: str) -> str:
    """Operands that the main loop had better split or round itself: packing them takes longer than the arithmetic.

    Args:
        plan: the plan.
        device: whose bandwidth and rate are compared.
        precision: a key of `SCHEMES`.

    Returns:
        Of ``""``, ``"a"``, ``"b"``, ``"ab"``; empty where arithmetic binds the product, or no operand need be copied.
        Overlapping windows (`never_copied`) are always among them.
    """
    if plan.half:
        return ""
    scheme, (batch, m, n, k) = SCHEMES[precision], plan.shape
    rows = {"a": m, "b": n}
    never = never_copied(plan)
    sides = [s for s in plan.sides if not s.held and not is_small(plan, s) and s.name not in never]
    copied = sum(batch * rows[s.name] * k * itemsize("float16") * scheme.planes * 2 for s in sides)
    arithmetic_s = _arithmetic_s(plan, device, len(scheme.products))
    copied_s = copied / (device.bandwidth_gbs * 1e9)
    share = TF32_FROM if scheme.rounds else 1.0
    pays = copied_s >= max(share * (SLOWDOWN - 1) * arithmetic_s, NOTICED_S)
    return "".join(s.name for s in plan.sides if s.name in never or (s in sides and pays))


def memory_binds(plan: GemmPlan, device: Device, precision: str) -> bool:
    """True where the product waits for memory longer than for its arithmetic under `precision`, at peak rates."""
    moved_s = moved_bytes(plan) / (device.bandwidth_gbs * 1e9)
    return moved_s >= _arithmetic_s(plan, device, len(SCHEMES[precision].products))


def never_copied(plan: GemmPlan) -> str:
    """Operands of overlapping windows, which the main loop reads where they lie, of ``""``, ``"a"``, ``"b"`` …."""
    return "".join(s.name for s in plan.sides if s.repeats >= OVERLAPPING and not s.held)


def _arithmetic_s(plan: GemmPlan, device: Device, products: int) -> float:
    """Seconds that the arithmetic takes at the peak rate of half operands."""
    batch, m, n, k = plan.shape
    return 2 * batch * m * n * k * products / (device.half_tflops * 1e12)


__all__ = [
    "SMALL_SHARE", "inline_sides", "is_small", "memory_binds", "moved_bytes", "never_copied", "operand_bytes",
    "packed_sides",
]  # fmt: skip
