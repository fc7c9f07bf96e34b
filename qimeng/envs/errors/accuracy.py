"""How far a result is from the reference, and how far it may be.

Deals in tensors, errors and budgets (the design's "What counts as right"). Works in blocks, so that outputs of many GiB
need little extra memory. Knows nothing about the source of the tensors or the use of a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from qimeng.envs.errors.column_errors import either, look
from qimeng.envs.errors.error_words import Extent, likely_mistake
from qimeng.envs.workers.tensor_bits import BLOCK, block, blocks
from qimeng.spec import Tolerances

FUSED_ELEMENTS = 1 << 24
"""Elements from which errors on a GPU are computed by a kernel of our own, in one pass instead of some fifteen."""

FEW_ROWS = 64
"""Length of rows from which their root mean squares are kept."""

FEW_VALUES = 256
"""Elements below which `Tolerances.max_factor` holds for the root mean square too."""

HALF_SHARE = 0.25
"""Share of `Tolerances.floor_ulp` that half types are allowed."""

SAMPLE = 1 << 20
"""Sample size for estimating a share."""

LONGEST_CHAIN = 1 << 16
"""The longest chain of additions in a reasonable program. Longer sums are split into parts."""

OF_ALL = 2.0**-13
"""Share of an ulp of the whole output's root mean square. Numbers below it count as zero, because the reference's own
roundings are of that size: gelu of a large negative number is exactly 0 in float64, but not by a better formula."""

DIGITS_LOST = 64.0
"""Error in an element's own ulps at which eager itself has lost digits, as in gelu far below zero. Beyond it, the error
relative to the element alone means nothing; only row and column count."""

KERNELBENCH_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""KernelBench's atol = rtol (`src/kernelbench/eval.py: get_tolerance_for_precision`, commit 423217d)."""


@dataclass(frozen=True)
class Error:
    """How far an output is off, in four figures; dimensionless.

    The last dimension is the last one with more than one element, so a column [n, 1] is judged like a vector [n].
    Denominators are at least `OF_ALL` of an ulp of the whole output's root mean square.

    Attributes:
        max: largest |y - r| / (|r| + rms of r over its last dimension).
        rms: root mean square of the same.
        across: largest |y - r| / (|r| + rms of r over another dimension), where columns have units of their own.
        alone: |y - r| / |r| of three elements in four at most (`qimeng.envs.errors.column_errors`).
    """

    max: float = 0.0
    rms: float = 0.0
    across: float = 0.0
    alone: float = 0.0

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """All four."""
        return self.max, self.rms, self.across, self.alone

    def within(self, budget: Error) -> bool:
        """True where no figure is above `budget`'s; false for NaN."""
        return all(mine <= allowed for mine, allowed in zip(self.figures, budget.figures, strict=True))

    def share_of(self, budget: Error) -> float:
        """The largest of the figures as shares of `budget`'s; NaN and infinity where a figure is."""
        pairs = zip(self.figures, budget.figures, strict=True)
        return max((mine / allowed if allowed else math.inf * mine) if mine else 0.0 for mine, allowed in pairs)

    def worst(self, other: Error) -> Error:
        """The larger of each figure."""
        return Error(*map(max, self.figures, other.figures))

    def __add__(self, other: Error) -> Error:
        return Error(*(a + b for a, b in zip(self.figures, other.figures, strict=True)))

    def __mul__(self, factor: float) -> Error:
        return Error(*(a * factor for a in self.figures))


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

    def excused(self, error: Error) -> Expected:
        """The same value with a budget that `error` is within."""
        return replace(self, floor=self.floor.worst(error))


def is_float(tensor: torch.Tensor) -> bool:
    """True for floating-point and complex tensors."""
    return tensor.is_floating_point() or tensor.is_complex()


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


def roundings(terms: int, independent: bool = True) -> float:
    """Roundings that add up when `terms` numbers are summed in any order, as a multiple of the rounding unit.

    Roundings of numbers with many digits are nearly random, so their sum grows like the square root of their count.
    Roundings of numbers with few digits may all have the same sign, so their sum grows like their count, up to
    `LONGEST_CHAIN` (N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci.
    Comput. 41(5), 2019).
    """
    terms = max(terms, 1)
    return math.sqrt(terms) if independent else float(min(terms, LONGEST_CHAIN))


@dataclass(frozen=True)
class Scale:
    """What the errors of an output are divided by, as far as it takes a pass over the output to find out.

    Attributes:
        least: the least number.
        rows: root mean square of each row, where a kernel of our own needs it.
    """

    least: float
    rows: torch.Tensor | None = None

    @classmethod
    def of(cls, expected: torch.Tensor) -> Scale:
        """That of an output, in one pass over a large one on a GPU."""
        expected = _real(expected)
        if not _is_fused(expected):
            return cls(least_of(expected))
        from qimeng.envs.errors.fused_error import row_scales  # loads Triton

        rows, kind = row_scales(expected), torch.finfo(expected.dtype)
        total = float(rows.norm()) / math.sqrt(rows.numel())
        least = max(kind.tiny, OF_ALL * kind.eps * total) if math.isfinite(total) else least_of(expected)
        return cls(least, rows)


def measure(actual: torch.Tensor, expected: torch.Tensor, eager: torch.Tensor | None = None) -> Error:
    """The error of `actual` against `expected` (same shape, any floating dtypes, same device).

    Where `expected` or `eager` is not finite, either's value is right: the element's error is the smaller one, and 0
    where the values are the same. NaN elsewhere counts as an infinite error.
    """
    return measured(actual, expected, eager)[0]


def measured(
    actual: torch.Tensor, expected: torch.Tensor, eager: torch.Tensor | None = None, scale: Scale | None = None
) -> tuple[Error, bool]:
    """`measure`, and whether all values of `actual` and `expected` are known to be finite.

    Args:
        actual: what was computed.
        expected: what it should be.
        eager: eager's.
        scale: of `expected`, where it is known.
    """
    if actual.numel() == 0:
        return Error(), True
    scale = scale or Scale.of(expected)
    actual, expected = _real(actual), _real(expected)
    eager = None if eager is None else _real(eager)
    top, total, finite = summary(actual, expected, eager, scale)
    figures = look(actual, expected, None if finite else eager, scale.least, finite=finite)
    return Error(top, math.sqrt(total / actual.numel()), *figures), finite


def summary(
    actual: torch.Tensor, expected: torch.Tensor, eager: torch.Tensor | None, scale: Scale
) -> tuple[float, float, bool]:
    """Largest error, sum of the squared errors, and whether every value is finite, so that eager has no say.

    Args:
        actual: real, without dimensions of one element at its end.
        expected: what it should be.
        eager: eager's.
        scale: what errors are divided by.
    """
    if _is_fused(actual):
        top, total = _fused(actual, expected, scale)
    else:
        top, total = _summary(_quick_errors(actual, expected, scale.least), actual.device)
    if math.isfinite(top):
        return top, total, True
    return *_summary(_errors(actual, expected, eager, scale.least), actual.device), False


def _is_fused(x: torch.Tensor) -> bool:
    """Whether errors are computed by a kernel of our own."""
    return x.is_cuda and x.dim() > 0 and x.numel() >= FUSED_ELEMENTS


def measure_most(actual: torch.Tensor, expected: torch.Tensor) -> Error:
    """Like `measure`, without the worst hundredth: four times the 99 % quantile of the errors of a sample."""
    if actual.numel() == 0:
        return Error()
    actual, expected = _rows(actual), _rows(expected)
    if actual.is_complex():
        actual, expected = _parts_of(actual), _parts_of(expected)
    least = least_of(expected)
    step = actual.numel() // SAMPLE + 1
    parts = torch.cat([part.reshape(-1)[::step] for part in _errors(actual, expected, None, least)])
    most = 4 * float(parts.sort().values[int(0.99 * (parts.numel() - 1))])
    return Error(most, most, *look(actual, expected, None, least, most=True))


def _real(x: torch.Tensor) -> torch.Tensor:
    """`_rows`, of a complex tensor with both parts side by side."""
    return _parts_of(_rows(x)) if x.is_complex() else _rows(x)


def _parts_of(x: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of a complex tensor, side by side in its last dimension."""
    return torch.view_as_real(x.resolve_conj()).flatten(max(x.dim() - 1, 0))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` without the dimensions of one element at its end."""
    kept = x.dim()
    while kept and x.shape[kept - 1] == 1:
        kept -= 1
    return x.reshape(x.shape[:kept])


def _fused(actual: torch.Tensor, expected: torch.Tensor, scale: Scale) -> tuple[float, float]:
    from qimeng.envs.errors.fused_error import fused_summary  # loads Triton

    return fused_summary(actual, expected, scale.least, scale.rows)


def comparable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or the same numbers in fp32 where they are fp8, on which PyTorch has no arithmetic."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


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


def allowance(expected: Expected) -> torch.Tensor:
    """By how much each element of a real output, all finite, may be off: the maximum of the budget, absolute."""
    value = _rows(expected.value)
    scale = (value.abs() + _row_rms(value)).clamp(min=least_of(value))
    return (expected.budget.max * scale).reshape(expected.value.shape)


def kernelbench_close(actual: torch.Tensor, eager: torch.Tensor, tolerance: float | None = None) -> bool:
    """KernelBench's own rule: allclose against eager; by default at its tolerance for the dtype."""
    if actual.shape != eager.shape or actual.dtype != eager.dtype:
        return False
    tolerance = tolerance or KERNELBENCH_TOLERANCE.get(eager.dtype, 1e-4)
    return all(
        torch.allclose(block(actual, where), block(eager, where), atol=tolerance, rtol=tolerance)
        for where in blocks(actual.shape)
    )


def not_finite_share(value: torch.Tensor, eager: torch.Tensor) -> float:
    """Share of the elements where the reference or eager is NaN or infinite, 0 to 1."""
    if not is_float(value) or value.numel() == 0 or (_all_finite(value) and _all_finite(eager)):
        return 0.0
    count = torch.zeros((), dtype=torch.int64, device=value.device)
    for where in blocks(value.shape):
        count += (~(block(value, where).isfinite() & block(eager, where).isfinite())).sum()
    return float(count) / value.numel()


def _all_finite(tensor: torch.Tensor) -> bool:
    """One pass: the extremes of a tensor are NaN where any element is."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    extremes = [x for w in blocks(tensor.shape) for x in torch.aminmax(block(tensor, w))]
    return bool(torch.stack(extremes).isfinite().all())


def _errors(
    actual: torch.Tensor, expected: torch.Tensor, eager: torch.Tensor | None, least: float
) -> Iterator[torch.Tensor]:
    """The elements' errors in float64, part by part; never NaN."""
    for where in blocks(actual.shape):
        y, r = block(actual, where), block(expected, where)
        e = block(eager, where) if eager is not None else None
        scale = _row_rms(r)
        if y.dim() and y.shape[-1] > BLOCK:  # a row longer than a block: its parts share the row's scale
            for start in range(0, y.shape[-1], BLOCK):
                cut = (..., slice(start, start + BLOCK))
                yield _part(y[cut], r[cut], e[cut] if e is not None else None, scale, least)
        else:
            yield _part(y, r, e, scale, least)


def _summary(parts: Iterator[torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Largest element and sum of the squares of all parts, which are used up."""
    worst = torch.zeros((), dtype=torch.float64, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        worst = torch.maximum(worst, part.amax())
        squares += part.square_().sum(dtype=torch.float64)
    top, total = torch.stack([worst, squares]).tolist()
    return top, total


def _quick_errors(actual: torch.Tensor, expected: torch.Tensor, least: float) -> Iterator[torch.Tensor]:
    """The elements' errors part by part; infinite or NaN where a value is not finite.

    Differences are computed in the wider of the two dtypes, at least fp32. There the difference of two nearly equal
    numbers is exact, so float64 would give the same.
    """
    dtype = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
    for where in blocks(actual.shape):
        y, r = block(actual, where), block(expected, where)
        if r.dim() == 0:
            scale = r.abs().to(dtype)
        else:
            norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True, dtype=torch.float64)
            scale = (norm / math.sqrt(r.shape[-1])).to(dtype)
        width = y.shape[-1] if y.dim() else 1
        for start in range(0, width, BLOCK):
            cut = (..., slice(start, start + BLOCK)) if width > BLOCK else ...
            error = (y[cut].to(dtype) - r[cut].to(dtype)).abs_()
            yield error.div_(r[cut].abs().to(dtype).add_(scale).clamp_(min=least))


def least_of(r: torch.Tensor, dtype: torch.dtype | None = None) -> float:
    """What errors are divided by at least: the smallest normal number of the dtype, or what `OF_ALL` says."""
    r = torch.view_as_real(r.resolve_conj()) if r.is_complex() else r
    kind = torch.finfo(dtype or r.dtype)
    parts = [part for where in blocks(r.shape) for part in torch.atleast_1d(block(r, where)).split(BLOCK, -1)]
    if not parts:
        return kind.tiny
    total = _norm(parts)
    if not math.isfinite(total):
        total = _norm(part.nan_to_num(0.0, 0.0, 0.0) for part in parts)
    return max(kind.tiny, OF_ALL * kind.eps * total / math.sqrt(max(r.numel(), 1)))


def _norm(parts: Iterable[torch.Tensor]) -> float:
    """The Euclidean norm of all parts together; the device is waited for once."""
    return float(torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).norm())


def _row_rms(r: torch.Tensor) -> torch.Tensor:
    if r.dim() == 0:
        return r.double().abs().nan_to_num(0.0, 0.0, 0.0)
    total = torch.zeros(r.shape[:-1], dtype=torch.float64, device=r.device)
    count = torch.zeros(r.shape[:-1], dtype=torch.float64, device=r.device)
    for start in range(0, r.shape[-1], BLOCK):
        part = r[..., start : start + BLOCK].double()
        finite = part.isfinite()
        total += torch.where(finite, part, 0.0).square().sum(-1)
        count += finite.sum(-1)
    return (total / count.clamp(min=1)).sqrt().unsqueeze(-1)


def _part(y: torch.Tensor, r: torch.Tensor, e: torch.Tensor | None, scale: torch.Tensor, least: float) -> torch.Tensor:
    return either(y.double(), r.double(), None if e is None else e.double(), scale, least)


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
    eager = None if expected.eager is None else _rows(expected.eager)
    y, r = _rows(actual), _rows(expected.value)
    if actual.is_complex():
        y, r, eager = _parts_of(y), _parts_of(r), None if eager is None else _parts_of(eager)
    for part in _errors(y, r, eager, least_of(r)):
        flat = part.reshape(-1)
        top = flat.max(0)
        if float(top.values) > worst:
            worst, best_at = float(top.values), start + int(top.indices)
        bad = (flat > budget.max).nonzero()[:, 0]
        wrong += bad.numel()
        where.add(bad + start)
        start += flat.numel()
    at = _position(best_at, actual.shape if not actual.is_complex() else (*actual.shape[:-1], 2 * actual.shape[-1]))
    at = at if not actual.is_complex() else (*at[:-1], at[-1] // 2)
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


__all__ = [
    "Error",
    "Expected",
    "Scale",
    "allowance",
    "check",
    "comparable",
    "floor",
    "is_float",
    "kernelbench_close",
    "least_of",
    "measure",
    "measured",
    "measure_most",
    "not_finite_share",
    "roundings",
    "same_but_for_few",
    "summary",
]
