"""How far a result is from the reference.

Deals in tensors and errors. Works in blocks, so that outputs of many GiB need little extra memory. Knows nothing about
the source of the tensors, or about how large an error may be (`qimeng.envs.errors.error_budget`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from qimeng.envs.errors.column_errors import either, look
from qimeng.envs.workers.tensor_bits import BLOCK, block, blocks

FUSED_ELEMENTS = 1 << 24
"""Elements from which errors on a GPU are computed by a kernel of our own, in one pass instead of some fifteen."""

SAMPLE = 1 << 20
"""Sample size for estimating a share."""

OF_ALL = 2.0**-13
"""Share of an ulp of the whole output's root mean square. Numbers below it count as zero, because the reference's own
roundings are of that size: gelu of a large negative number is exactly 0 in float64, but not by a better formula."""

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


def is_float(tensor: torch.Tensor) -> bool:
    """True for floating-point and complex tensors."""
    return tensor.is_floating_point() or tensor.is_complex()


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
    return *_summary(errors_in(actual, expected, eager, scale.least), actual.device), False


def _is_fused(x: torch.Tensor) -> bool:
    """Whether errors are computed by a kernel of our own."""
    return x.is_cuda and x.dim() > 0 and x.numel() >= FUSED_ELEMENTS


def measure_most(actual: torch.Tensor, expected: torch.Tensor) -> Error:
    """Like `measure`, without the worst hundredth: four times the 99 % quantile of the errors of a sample."""
    if actual.numel() == 0:
        return Error()
    actual, expected = rows_of(actual), rows_of(expected)
    if actual.is_complex():
        actual, expected = parts_of(actual), parts_of(expected)
    least = least_of(expected)
    step = actual.numel() // SAMPLE + 1
    parts = torch.cat([part.reshape(-1)[::step] for part in errors_in(actual, expected, None, least)])
    most = 4 * float(parts.sort().values[int(0.99 * (parts.numel() - 1))])
    return Error(most, most, *look(actual, expected, None, least, most=True))


def _real(x: torch.Tensor) -> torch.Tensor:
    """`rows_of`, of a complex tensor with both parts side by side."""
    return parts_of(rows_of(x)) if x.is_complex() else rows_of(x)


def parts_of(x: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of a complex tensor, side by side in its last dimension."""
    return torch.view_as_real(x.resolve_conj()).flatten(max(x.dim() - 1, 0))


def rows_of(x: torch.Tensor) -> torch.Tensor:
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


def errors_in(
    actual: torch.Tensor, expected: torch.Tensor, eager: torch.Tensor | None, least: float
) -> Iterator[torch.Tensor]:
    """The elements' errors in float64, part by part; never NaN."""
    for where in blocks(actual.shape):
        y, r = block(actual, where), block(expected, where)
        e = block(eager, where) if eager is not None else None
        scale = row_rms(r)
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


def row_rms(r: torch.Tensor) -> torch.Tensor:
    """Root mean square of each row in float64, of its finite numbers."""
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


__all__ = [
    "OF_ALL",
    "Error",
    "Scale",
    "comparable",
    "errors_in",
    "is_float",
    "kernelbench_close",
    "least_of",
    "measure",
    "measure_most",
    "measured",
    "not_finite_share",
    "parts_of",
    "row_rms",
    "rows_of",
    "summary",
]
