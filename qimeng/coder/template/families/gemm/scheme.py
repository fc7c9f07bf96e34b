"""How a matrix product is computed from what tensor cores take: the schemes behind `GemmSchedule.precision`.

fp32 operands are split into planes of 16 bits (hi + lo …) and each plane pair is one product. The small products are
summed first and apart from the main one. Planes of fp16 are scaled by a power of two a row, and the second one by 2^11
more, so that hi + lo keep 22 bits of all elements down to 2^-28 of the row's largest. The first plane has 10 bits
instead of fp16's 11: its products have 20, so that the tensor cores' accumulator truncates less (a sum of 4096 positive
numbers is off by 0.7e-6 of itself instead of 1.1e-6). The product of two second planes, which is left out, would show
in short sums, where the first plane has all 11 (`SHALLOW`). Which rows have smaller elements is found while they are
packed, and tiles where that may matter are computed by the scheme's exact form (see `guard`). bf16 planes have fp32's
exponents and need no scale. Sources: Markidis et al. 2018 and Ootomo & Yokota 2022 (splitting, scaled second planes,
the truncated accumulator of tensor cores). Deals in planes and bits. Knows nothing about kernels or shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qimeng.coder.template.families.gemm.plan import GemmPlan, Side
from qimeng.coder.template.families.gemm.schedule import GemmSchedule


@dataclass(frozen=True)
class Scheme:
    """One way to compute a product.

    Attributes:
        planes: planes an operand.
        dtype: dtype of a plane.
        scaled: planes are scaled by a power of two a row (an image, in a convolution's copy), undone after the main
            loop.
        bits: significant bits of each plane but the last; 0: as many as its dtype has.
        shift: binary digits by which each further plane is scaled up against the one before; undone between the small
            products and the main one.
        exact: the `GemmSchedule.precision` for tiles whose values the planes do not hold, by level from 1 on (see
            `guard`; the last one for all further levels); empty where they hold all.
        products: (plane of A, plane of B) in the order in which they are summed; the last one is the main product.
        dot: Triton's `input_precision`; empty for its default.
        splits: operands cannot be multiplied as they are: planes are packed or made in the main loop.
        rounds: fp32 operands are rounded to TF32 first (tensor cores truncate).
        error: largest error of 65,536 results of normal inputs, as a share of |result| + rms, where it is not fp32's
            own (measured on the CPU in float64, depths of 64 to 16,384: it does not change with the depth).
    """

    planes: int
    dtype: str
    scaled: bool = False
    bits: int = 0
    shift: int = 0
    exact: tuple[str, ...] = ()
    products: tuple[tuple[int, int], ...] = ((0, 0),)
    dot: str = ""
    splits: bool = False
    rounds: bool = False
    error: float = 0.0

    @property
    def main(self) -> tuple[int, int]:
        """The largest product."""
        return self.products[-1]

    @property
    def small(self) -> tuple[tuple[int, int], ...]:
        """All others."""
        return self.products[:-1]


_THREE = ((1, 0), (0, 1), (0, 0))
_SIX = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))

SCHEMES: dict[str, Scheme] = {
    "ieee": Scheme(1, "float32", dot="ieee"),
    "tf32": Scheme(1, "float32", dot="tf32", rounds=True),
    "tf32x3": Scheme(1, "float32", dot="tf32x3"),
    "bf16x3": Scheme(2, "bfloat16", products=_THREE, splits=True, error=1.9e-5),
    "bf16x6": Scheme(3, "bfloat16", products=_SIX, splits=True),
    "fp16x3": Scheme(
        2, "float16", scaled=True, bits=10, shift=11, exact=("bf16x6", "ieee"), products=_THREE, splits=True
    ),
    "fp16": Scheme(1, "float16", scaled=True, exact=("tf32",), splits=True),
}
"""`GemmSchedule.precision` to its scheme, for fp32 operands."""

SHORT = 711
"""Depth below which sums are short: they are promoted twice as often, and planes have all bits."""

SHALLOW: dict[str, Scheme] = {"fp16x3": replace(SCHEMES["fp16x3"], bits=0, shift=12)}
"""The same for short sums, where it differs."""


def scheme_of(plan: GemmPlan, schedule: GemmSchedule) -> Scheme:
    """The scheme; half operands go to the tensor cores as they are, whatever the precision."""
    if plan.half:
        return Scheme(1, plan.dtype)
    known = SCHEMES | SHALLOW if plan.shape[3] < SHORT else SCHEMES
    return known[schedule.precision]


def is_packed(plan: GemmPlan, schedule: GemmSchedule, side: Side) -> bool:
    """True where the operand is written as padded planes before the product."""
    if side.split:
        return False
    splits = scheme_of(plan, schedule).splits and side.name not in schedule.inline
    return splits or side.name in schedule.packed


def is_inline(plan: GemmPlan, schedule: GemmSchedule, side: Side) -> bool:
    """True where the main loop makes the operand's planes of what it reads, or rounds it."""
    scheme = scheme_of(plan, schedule)
    ready = side.split if scheme.splits else side.rounded or not scheme.rounds
    return not ready and not is_packed(plan, schedule, side)


def through_registers(plan: GemmPlan, schedule: GemmSchedule, side: Side) -> bool:
    """True where the main loop computes on the operand between memory and the tensor cores."""
    if is_packed(plan, schedule, side):
        return False
    return is_inline(plan, schedule, side) or side.plain is None


def is_turned(plan: GemmPlan, schedule: GemmSchedule) -> bool:
    """True where the transposed product is computed.

    In fp32 the tensor cores' right operand must lie K-major in shared memory, while the left one may come from
    registers: a right operand that is not K-major becomes the left one.
    """
    scheme = scheme_of(plan, schedule)
    turns = scheme.dtype == "float32" and scheme.dot != "ieee" and not is_packed(plan, schedule, plan.b)
    return turns and plan.a.k_major and not plan.b.k_major


def is_prepared(plan: GemmPlan, schedule: GemmSchedule, side: Side) -> bool:
    """True where that happens once, because the operand is made of parameters alone."""
    return side.held and side.name in schedule.packed and is_packed(plan, schedule, side)


__all__ = [
    "SCHEMES", "SHALLOW", "SHORT", "Scheme", "is_inline", "is_packed", "is_prepared", "is_turned", "scheme_of",
    "through_registers",
]  # fmt: skip
