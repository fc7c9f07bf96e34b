"""Errors of an element relative to its row, its column and itself.

An error in an element that is small in its row does not show relative to the row. It may show relative to the column.
If every row and column has large elements, it shows relative to the element itself. The last two use a sample of rows
and columns.

Deals in tensors of one output. Knows nothing about budgets.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from functools import cache

import numpy as np
import torch

SAMPLE = 1 << 18
"""Sample size for errors relative to elements and columns; rows and columns of larger outputs are drawn."""

FEWEST = 16
"""Minimum length of an axis for using its root mean square as the scale, and minimum size of an output for using its
quantiles."""

SHARE = 0.75
"""Share of the elements whose own relative error counts. Sums that cancel, and functions near a zero, have few correct
digits with any order or formula. No output consists mostly of these."""

OF_MEDIAN = 2.0**-13
"""Share of an ulp of the median magnitude below which a number counts as zero (`accuracy.OF_ALL`)."""

UNDERFLOW = 2.0**-19
"""What losing a number below the smallest normal one may be, relative to the smallest that errors are divided by:
fp32 arithmetic may take these for zero."""

_KEY = random.SystemRandom().getrandbits(31)


def relative(y: torch.Tensor, r: torch.Tensor, scale: torch.Tensor | float, least: float) -> torch.Tensor:
    """|y - r| / (|r| + scale), 0 where both are the same (also NaN), infinite where only one is finite."""
    error = (y - r).abs() / (r.abs().nan_to_num(0.0, 0.0, 0.0) + scale).clamp(min=least)
    error = error.nan_to_num(math.inf, math.inf)
    return torch.where((y == r) | (y.isnan() & r.isnan()), 0.0, error)


def either(
    y: torch.Tensor, r: torch.Tensor, e: torch.Tensor | None, scale: torch.Tensor | float, least: float
) -> torch.Tensor:
    """`relative`; where `r` or eager's `e` is not finite, the smaller of both errors."""
    error = relative(y, r, scale, least)
    if e is None:
        return error
    odd = ~(r.isfinite() & e.isfinite())
    return torch.where(odd, torch.minimum(error, relative(y, e, scale, least)), error)


def _relative_of_finite(y: torch.Tensor, r: torch.Tensor, scale: torch.Tensor | float, least: float) -> torch.Tensor:
    """`relative` where all values are finite, in a third of the time."""
    return (y - r).abs_().div_(r.abs().add_(scale).clamp_(min=least))


def look(
    actual: torch.Tensor,
    expected: torch.Tensor,
    eager: torch.Tensor | None,
    least: float,
    most: bool = False,
    finite: bool = False,
) -> tuple[float, float]:
    """The error beside columns, and the error of an element by itself.

    The former is the largest over all axes but the last one of more than one element, and over all elements; the latter
    is what `SHARE` of the elements have at most.

    Args:
        actual: a real output.
        expected: what it should be.
        eager: eager's, where some value is not finite.
        least: what errors beside columns are divided by at least.
        most: whether the worst hundredth is left out beside columns, and four times the rest's error taken.
        finite: whether every value is known to be finite.
    """
    return look_at(sampled(actual), sampled(expected), None if eager is None else sampled(eager), least, most, finite)


def look_at(
    y: torch.Tensor, r: torch.Tensor, e: torch.Tensor | None, least: float, most: bool = False, finite: bool = False
) -> tuple[float, float]:
    """`look` at what was `sampled` already."""

    def errors(scale: torch.Tensor | float, least: float) -> torch.Tensor:
        return _relative_of_finite(y, r, scale, least) if finite else either(y, r, e, scale, least)

    dtype = r.dtype
    y, r, e = y.double(), r.double(), None if e is None else e.double()
    if not r.numel():
        return 0.0, 0.0
    across = [torch.zeros((), dtype=torch.float64, device=r.device)]
    axes = [d for d, n in enumerate(r.shape) if n > 1][:-1]
    for axis in axes:
        if r.shape[axis] >= FEWEST:
            error = errors(_rms(r, axis, finite), least)
            across.append(4 * _quantile(error, 0.99) if most else error.amax())
    alone = torch.zeros_like(across[0])
    if r.numel() >= FEWEST:
        alone = _quantile(errors(0.0, _least_alone(r, dtype, finite)), SHARE)
    found = torch.stack([torch.stack(across).amax(), alone]).tolist()
    return found[0], found[1]


def _least_alone(r: torch.Tensor, dtype: torch.dtype, all_finite: bool) -> float:
    """What an element's own error is divided by at least."""
    sizes = r.abs().reshape(-1)
    counted = int((sizes > 0 if all_finite else (sizes > 0) & sizes.isfinite()).sum())
    usual = float(_nth(sizes, int((sizes == 0).sum()) + (counted - 1) // 2)) if counted else 0.0  # their median
    least, of_median = alone_floor(dtype)
    return max(least, of_median * usual)


def alone_floor(dtype: torch.dtype) -> tuple[float, float]:
    """What an element's own error is divided by at least: a number, and a share of the median magnitude."""
    kind, single = torch.finfo(dtype), torch.finfo(torch.float32)
    lost = 0.0 if kind.tiny < single.tiny else single.tiny / UNDERFLOW
    return max(kind.tiny, lost), OF_MEDIAN * kind.eps


def _rms(r: torch.Tensor, axis: int, all_finite: bool) -> torch.Tensor:
    if all_finite:
        return (r.square().sum(axis, keepdim=True) / r.shape[axis]).sqrt()
    finite = r.isfinite()
    total = torch.where(finite, r, 0.0).square().sum(axis, keepdim=True)
    return (total / finite.sum(axis, keepdim=True).clamp(min=1)).sqrt()


def _quantile(error: torch.Tensor, share: float) -> torch.Tensor:
    return _nth(error.reshape(-1), int(share * (error.numel() - 1)))


def _nth(flat: torch.Tensor, place: int) -> torch.Tensor:
    """What would be at `place` if `flat` were sorted, NaN at its end."""
    if flat.is_cuda:
        return flat.sort().values[place]
    return torch.from_numpy(np.partition(flat.numpy(), place))[place]  # in a fifth of the time of torch.kthvalue


def sampled(x: torch.Tensor, whole: tuple[int, ...] = (), start: int = 0) -> torch.Tensor:
    """Some rows and columns of `x`, the same for every tensor of this shape in this process.

    Args:
        x: a tensor, or a part of it along its leading axis.
        whole: shape of the tensor that `x` is a part of.
        start: index in it where the part begins.
    """
    for axis, kept in enumerate(_kept(whole or tuple(x.shape))):
        if kept is not None:
            if whole and axis == 0:
                kept = kept[bisect_left(kept, start) : bisect_left(kept, start + x.shape[0])]
                kept = tuple(i - start for i in kept)
            x = x.index_select(axis, torch.tensor(kept, dtype=torch.int64, device=x.device))
    return x


@cache
def _kept(shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, ...]:
    sizes = list(shape)
    while math.prod(sizes) > SAMPLE:
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[longest] = max(1, sizes[longest] // 2)
    draw = random.Random(_KEY)
    return tuple(
        None if size == whole else tuple(sorted(draw.sample(range(whole), size)))
        for size, whole in zip(sizes, shape, strict=True)
    )


__all__ = ["FEWEST", "SHARE", "alone_floor", "either", "look", "look_at", "relative", "sampled"]
