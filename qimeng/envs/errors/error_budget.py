"""How far a result may be from the reference, and whether it is farther.

Deals in tensors, errors and budgets (the design's "What counts as right"). Knows nothing about the source of the
tensors or the use of a verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from qimeng.envs.errors.accuracy import (
    Error,
    Scale,
    errors_in,
    is_float,
    least_of,
    measure,
    measured,
    parts_of,
    rows_of,
)
from qimeng.envs.errors.error_words import Extent, likely_mistake
from qimeng.envs.workers.tensor_bits import block, blocks
from qimeng.spec import Tolerances

FEW_ROWS = 64
"""Length of rows from which their root mean squares are kept."""

FEW_VALUES = 256
"""Elements below which `Tolerances.max_factor` holds for the root mean square too."""

HALF_SHARE = 0.25
"""Share of `Tolerances.floor_ulp` that half types are allowed."""

LONGEST_CHAIN = 1 << 16
"""The longest chain of additions in a reasonable program. Longer sums are split into parts."""

DIGITS_LOST = 64.0
"""Error in an element's own ulps at which eager itself has lost digits, as in gelu far below zero. Beyond it, the error
relative to the element alone means nothing; only row and column count."""


@dataclass(frozen=True)
class Expected:
    """What one output tensor should be.

    Attributes:
        value: the float64 result cast to the output's dtype; for integers and booleans the float64 run's result.
        error: eager's own error against `value`, the worst over the trials used.
        floor: the error that is always allowed, the largest over those trials.
        eager: eager's output, kept only where it is needed: some element of it or of `value` is not finite, or the
            output is no floating-point tensor and differs from `value`.
        tolerances: times eager's error that is allowed.
        signed: whether zeros must have the sign of `value`'s (`qimeng.graph.zeros`).
    """

    value: torch.Tensor
    error: Error = field(default_factory=Error)
    floor: Error = field(default_factory=Error)
    eager: torch.Tensor | None = None
    tolerances: Tolerances = Tolerances()
    signed: bool = False

    @cached_property
    def scale(self) -> Scale:
        """What errors of a floating `value` are divided by, the same for all candidates; rows where these are few."""
        found = Scale.of(self.value)
        few = found.rows is None or FEW_ROWS * found.rows.numel() <= self.value.numel()
        return found if few else Scale(found.least)

    @property
    def budget(self) -> Error:
        """What a candidate may have: 4 (rms: 2) times eager's error by default, or the floor if that is larger.

        In a small output the root mean square is as much a matter of luck as the largest error.
        """
        t, error = self.tolerances, self.error
        rms = t.rms_factor if self.value.numel() >= FEW_VALUES else t.max_factor
        far = is_float(self.value) and error.alone > DIGITS_LOST * torch.finfo(self.value.dtype).eps
        alone = math.inf if far else t.max_factor * error.alone
        return replace(error * t.max_factor, rms=rms * error.rms, alone=alone).worst(self.floor)

    def widened(self, other: Expected) -> Expected:
        """The same value with the budget that follows from the worse of both trials' figures."""
        return replace(self, error=self.error.worst(other.error), floor=self.floor.worst(other.floor))

    def allowing(self, moved: Error) -> Expected:
        """The same value that may be off by `moved` in any case, besides what may be already."""
        return replace(self, floor=self.floor + moved)

    def excused(self, error: Error) -> Expected:
        """The same value with a budget that `error` is within."""
        return replace(self, floor=self.floor.worst(error))


def floor(dtype: torch.dtype, roundings: float, moved: Error, ulps: float = Tolerances.floor_ulp) -> Error:
    """The error that is always allowed: some ulp, accumulated rounding, and what one ulp of the inputs changes.

    Args:
        dtype: dtype of the output.
        roundings: how many of them add up in one element (see `roundings`).
        moved: change of the float64 result when the inputs move by one ulp.
        ulps: units in the last place of `dtype`.

    Half types are accumulated in fp32, so their rounding unit is fp32's. Of their own ulps, which are a hundredth and a
    thousandth of a number, a quarter as many are allowed: 16 of bfloat16 are an eighth of it.
    """
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    allowed = ulps * eps * (1.0 if eps <= single else HALF_SHARE) + min(eps, single) / 2 * roundings
    return Error(allowed, allowed, allowed, allowed) + moved


def share_of_sums(dtype: torch.dtype, ulps: float = Tolerances.floor_ulp) -> float:
    """What any program may lose in each operator, as a share of what it adds: half types are added in fp32.

    Args:
        dtype: of the specification.
        ulps: units in the last place.
    """
    return ulps * min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def roundings(terms: int, independent: bool = True) -> float:
    """Roundings that add up when `terms` numbers are summed in any order, as a multiple of the rounding unit.

    Roundings of numbers with many digits are nearly random, so their sum grows like the square root of their count.
    Roundings of numbers with few digits may all have the same sign, so their sum grows like their count, up to
    `LONGEST_CHAIN` (N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci.
    Comput. 41(5), 2019).
    """
    terms = max(terms, 1)
    return math.sqrt(terms) if independent else float(min(terms, LONGEST_CHAIN))


def check(actual: torch.Tensor, expected: Expected) -> tuple[Error, str | None]:
    """The error of `actual` and None, or what is wrong in words; shapes and dtypes are equal already."""
    if not is_float(expected.value):
        return _check_exact(actual, expected)
    error, _ = measured(actual, expected.value, expected.eager, expected.scale)
    if error.within(expected.budget):
        return error, _other_zeros(actual, expected.value) if expected.signed else None
    return error, _describe(actual, expected, error)


def _other_zeros(actual: torch.Tensor, value: torch.Tensor) -> str | None:
    """In words, that zeros have the other sign; None where none has."""
    count = 0
    for where in () if actual.is_complex() else blocks(actual.shape):
        a, r = block(actual, where), block(value, where)
        count += int(((a == 0) & (r == 0) & (torch.signbit(a) != torch.signbit(r))).sum())
    return (
        f"{count} of {actual.numel()} elements are zeros of the wrong sign (-0.0 for 0.0 or the reverse)"
        if count
        else None
    )


def same_but_for_few(actual: torch.Tensor, expected: Expected, any_kind: bool = False) -> bool:
    """Whether at most a hundredth of the non-finite values differ, and the finite ones are within the budget.

    An infinity times a number near zero takes its sign from a rounding.

    Args:
        actual: what a candidate returned.
        expected: what it should be.
        any_kind: whether any non-finite value is right where one is expected. For example, a running mean of an
            infinity is infinite, or NaN by Welford's formula.
    """
    value, eager = expected.value, expected.eager
    if eager is None or actual.is_complex():
        return False
    odd = ~(actual.isfinite() & value.isfinite() & eager.isfinite())
    right = [(actual == x) | (actual.isnan() & x.isnan()) for x in (value, eager)]
    wrong = odd & ~right[0] & ~right[1] & ~(actual.isfinite() & value.isfinite())  # two numbers are compared below
    none = ~(actual.isfinite() | value.isfinite() | eager.isfinite()) if any_kind else torch.zeros_like(wrong)
    if int((wrong & ~none).sum()) > 0.01 * int(odd.sum()):
        return False
    return measure(torch.where(wrong, value, actual), value, eager).within(expected.budget)


def outliers(
    actual: torch.Tensor, expected: Expected, limit: float, most: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Places in the flattened output of elements that are off by more than `limit`, and how much each of them may be.

    Args:
        actual: what a candidate returned; real.
        expected: what it should be.
        limit: relative, like `Error.max`. What it allows is absolute, and NaN where a value is not finite.
        most: None is returned where there are more.
    """
    eager = None if expected.eager is None else rows_of(expected.eager)
    value = rows_of(expected.value)
    places, errors, start, count = [], [], 0, 0
    for part in errors_in(rows_of(actual), value, eager, least_of(value)):
        flat = part.reshape(-1)
        bad = (flat > limit).nonzero()[:, 0]
        count += bad.numel()
        if count > most:
            return None
        places.append(bad + start)
        errors.append(flat[bad])
        start += flat.numel()
    at = torch.cat(places)
    off = (actual.take(at).double() - expected.value.take(at).double()).abs()
    return at, limit * off / torch.cat(errors)


def _check_exact(actual: torch.Tensor, expected: Expected) -> tuple[Error, str | None]:
    right = actual == expected.value
    if expected.eager is not None:
        right |= actual == expected.eager
    wrong = int((~right).sum())
    if not wrong:
        return Error(), None
    at = _position(int((~right).reshape(-1).int().argmax()), actual.shape)
    got, want = actual[at].item(), expected.value[at].item()
    infinite = Error(*4 * (math.inf,))
    return infinite, f"{wrong} of {actual.numel()} elements differ, first at {at}: got {got}, expected {want}"


def _describe(actual: torch.Tensor, expected: Expected, error: Error) -> str:
    """Why `actual` is refused, with the worst element and the likely class of mistake."""
    budget = expected.budget
    worst, wrong, start, best_at = -1.0, 0, 0, 0
    where = Extent(tuple(actual.shape) if not actual.is_complex() else ())
    eager = None if expected.eager is None else rows_of(expected.eager)
    y, r = rows_of(actual), rows_of(expected.value)
    if actual.is_complex():
        y, r, eager = parts_of(y), parts_of(r), None if eager is None else parts_of(eager)
    for part in errors_in(y, r, eager, least_of(r)):
        flat = part.reshape(-1)
        top = flat.max(0)
        if float(top.values) > worst:
            worst, best_at = float(top.values), start + int(top.indices)
        bad = (flat > budget.max).nonzero()[:, 0]
        wrong += bad.numel()
        where.add(bad + start)
        start += flat.numel()
    at = _position(best_at // 2 if actual.is_complex() else best_at, actual.shape)  # parts are side by side
    got, want = actual[at].item(), expected.value[at].item()
    text = (
        f"error {error.max:.3g} (maximum, allowed {budget.max:.3g}), {error.rms:.3g} (rms, allowed {budget.rms:.3g}); "
        f"worst at {at}: got {got:.6g}, expected {want:.6g}; {wrong} of {actual.numel()} elements are out of bounds"
    )
    if where.text():
        text += f", all in {where.text()}"
    if error.across > budget.across:
        text += f"; {error.across:.3g} relative to what its column has (allowed {budget.across:.3g})"
    if error.alone > budget.alone:
        text += f"; a quarter of the elements are {error.alone:.3g} of themselves off (allowed {budget.alone:.3g})"
    mistake = likely_mistake(actual, expected.value)
    return f"{text}; {mistake}" if mistake else text


def _position(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        at.append(flat % size)
        flat //= size
    return tuple(reversed(at))


__all__ = ["Expected", "check", "floor", "outliers", "roundings", "same_but_for_few", "share_of_sums"]
