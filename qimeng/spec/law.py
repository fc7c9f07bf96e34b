"""Random real numbers that resemble an example: distribution, scales of rows and columns, places of special values.

Deals in floating tensors. Knows nothing about what they mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

KNOTS = 1024
"""Quantiles that a distribution is kept as; between two of them values are equally likely."""
_SAMPLE = 1 << 18
_BLOCK = 1 << 24
"""Elements drawn at a time, so that what is needed beside the result stays small."""
_OUTLIERS = 4096
"""Most values that count as outliers."""


@dataclass(frozen=True, eq=False)
class Axis:
    """Location, scale and range of what lies at each index along one dimension, shaped to be broadcast."""

    mean: torch.Tensor
    std: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True, eq=False)
class Law:
    """How the elements of a real tensor are distributed.

    A row, column or other slice with its own scale or mean keeps it. Special values (infinities, NaN, padding, a mask's
    -1e9, zeros) keep their places. All other values are drawn from the example's quantiles. So no value lies beyond the
    example's range, or in a gap of its distribution.

    Attributes:
        left: lower ends of `KNOTS` pieces, each as likely as the others.
        width: their widths; 0 where there is a hole.
        axes: dimensions along which location or scale differ.
        values: the special values.
        places: for each element 0, or one more than the number of its special value; None where there are none.
        outliers: flat positions and values of single elements that are far larger than all others.
        whole: whether all values are integers.
    """

    left: torch.Tensor
    width: torch.Tensor
    axes: tuple[Axis, ...] = ()
    values: tuple[float, ...] = ()
    places: torch.Tensor | None = None
    outliers: tuple[torch.Tensor, torch.Tensor] | None = None
    whole: bool = False

    @classmethod
    def of(cls, seen: torch.Tensor) -> Law:
        """The law of the values of `seen`, which are on the CPU."""
        x = seen.contiguous()
        part = thin(x).double()
        finite = part[part.isfinite()]
        whole = bool(finite.numel()) and bool((finite == finite.round()).all())
        values = special_values(part, whole)
        low, high = (float(end) for end in x.aminmax())
        if low != low:
            values += (torch.nan,)
        values = tuple(dict.fromkeys([*values, *(end for end in (low, high) if end in (torch.inf, -torch.inf))]))
        places = torch.zeros(x.shape, dtype=torch.uint8) if values else None
        for number, value in enumerate(values, 1):
            assert places is not None
            places[x.isnan() if value != value else x == value] = number
        usual = torch.ones((), dtype=torch.bool).expand(x.shape) if places is None else places == 0
        outliers = _outliers(x, usual, part)
        if outliers is not None:
            usual = usual.clone()
            usual.view(-1)[outliers[0]] = False
        axes: list[tuple[int, Axis]] = []
        dims = set(range(x.dim()))
        while found := [(dim, *it) for dim in sorted(dims) if (it := _axis(x, usual, axes, dim))]:
            dim, axis, _ = max(found, key=lambda it: it[2])  # the one that explains most, then what is left of others
            axes.append((dim, axis))
            dims.remove(dim)
        rest, is_usual = _rest(x, usual, axes, None)
        left, width = _quantiles(rest[is_usual])
        return cls(left, width, tuple(axis for _, axis in axes), values, places, outliers, whole)

    def to(self, device: str) -> Law:
        """The same on `device`."""

        def move(t: torch.Tensor) -> torch.Tensor:
            return t.to(device)

        axes = tuple(Axis(move(a.mean), move(a.std), move(a.low), move(a.high)) for a in self.axes)
        places = None if self.places is None else move(self.places)
        outliers = None if self.outliers is None else (move(self.outliers[0]), move(self.outliers[1]))
        return replace(self, left=move(self.left), width=move(self.width), axes=axes, places=places, outliers=outliers)

    def fill(self, out: torch.Tensor, generator: torch.Generator) -> None:
        """Draw values into `out`, whose elements are each in memory once."""
        wide = torch.float64 if out.dtype is torch.float64 else torch.float32
        x = out if out.dtype is wide and out.is_contiguous() else torch.empty(out.shape, dtype=wide, device=out.device)
        pieces = torch.complex(self.left.to(wide), self.width.to(wide))  # pairs: one gather reads both
        for block in x.view(-1).split(_BLOCK):
            which = torch.randint(len(pieces), block.shape, device=x.device, generator=generator)
            part = torch.rand(block.shape, dtype=wide, device=x.device, generator=generator)
            drawn = pieces[which]
            torch.addcmul(drawn.real, drawn.imag, part, out=block)
        for axis in reversed(self.axes):
            x.mul_(axis.std.to(wide)).add_(axis.mean.to(wide))
        for axis in self.axes:
            x.clamp_(axis.low.to(wide), axis.high.to(wide))
        if self.whole:
            x.round_()
        for number, value in enumerate(self.values, 1):
            assert self.places is not None
            x.masked_fill_(self.places == number, value)
        if self.outliers is not None:
            x.view(-1)[self.outliers[0]] = self.outliers[1].to(wide)
        if x is not out:
            out.copy_(x)


def special_values(x: torch.Tensor, whole: bool = False) -> tuple[float, ...]:
    """Special values: non-finite ones, and ones that repeat although random real numbers would not.

    Whole numbers repeat anyway. Among them a value is special if it is far more frequent than the others, or if it is
    the only negative one among many.

    >>> special_values(torch.tensor([1.5, 0.0, 0.0, 2.5, float("-inf")]))
    (-inf, 0.0)
    """
    found = [v for v in (torch.inf, -torch.inf) if bool((x == v).any())] + [torch.nan] * bool(x.isnan().any())
    seen = x.reshape(-1)
    values, counts = seen[seen.isfinite()].unique(return_counts=True)
    if not len(values):
        return tuple(found)
    total = int(counts.sum())
    if whole:
        frequent = counts > max(total / 8, 4 * total / len(values))
        negative = values < 0
        if 0 < int(negative.sum()) <= 2 and int(counts[negative].sum()) < total / 2 and len(values) > 2:
            frequent = frequent | negative
    else:
        ends = (values == values[0]) | (values == values[-1]) | (values == 0)
        frequent = (counts > 1) & ((counts > total / 16) | ends & (counts > total / 4096))
    kept = values[frequent].tolist() if int(frequent.sum()) < min(len(values), 250) else []
    return tuple(sorted(found + kept, key=lambda v: (v == v, v)))


def thin(x: torch.Tensor) -> torch.Tensor:
    """About a quarter of a million elements of `x` at most, spread evenly."""
    return x[_steps(x.shape)]


def _steps(shape: tuple[int, ...], kept: int | None = None) -> tuple[slice, ...]:
    """A slice for each dimension, so that about `_SAMPLE` elements are left, the longest but `kept` thinned first."""
    sizes, steps = list(shape), [1] * len(shape)
    while math.prod(sizes) > _SAMPLE:
        others = [d for d in range(len(sizes)) if d != kept and sizes[d] > 1]
        if not others:
            break
        dim = max(others, key=lambda d: sizes[d])
        steps[dim] += 2 if steps[dim] > 1 else 1  # odd steps hit both halves of what comes in pairs
        sizes[dim] = -(-shape[dim] // steps[dim])
    return tuple(slice(None, None, step) for step in steps)


def _rest(
    x: torch.Tensor, usual: torch.Tensor, axes: list[tuple[int, Axis]], kept: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A part of `x` without the locations and scales of `axes`, and which elements of it count."""
    steps = _steps(x.shape, kept)
    rest, counts = x[steps].double(), usual[steps]
    rest = rest.where(counts, 0.0)
    for dim, axis in axes:
        cut = tuple(step if d == dim else slice(None) for d, step in enumerate(steps))
        mean, std = axis.mean[cut], axis.std[cut]
        counts = counts & (std > 0)
        rest = ((rest - mean) / std.where(std > 0, 1.0)).where(counts, 0.0)
    return rest, counts


def _outliers(x: torch.Tensor, usual: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    seen = part.abs().reshape(-1)
    seen = seen[seen.isfinite() & (seen > 0)]
    if len(seen) < 64:
        return None
    limit = 1e3 * float(seen.sort().values[int(len(seen) * 0.998)])
    low, high = x.where(usual, 0).aminmax()
    if max(-float(low), float(high)) <= limit:
        return None
    at = ((x.abs() > limit) & usual).view(-1).nonzero().view(-1)
    return (at, x.view(-1)[at]) if 0 < len(at) <= _OUTLIERS else None


def _axis(x: torch.Tensor, usual: torch.Tensor, axes: list[tuple[int, Axis]], dim: int) -> tuple[Axis, float] | None:
    """What differs along `dim`, and how much of the spread that explains (in powers of e).

    None if no difference is significant for this many numbers.
    """
    others = [d for d in range(x.dim()) if d != dim]
    if not others or x.shape[dim] < 2:
        return None
    rest, counts = _rest(x, usual, axes, dim)
    count = counts.sum(others, keepdim=True)
    mean = rest.sum(others, keepdim=True) / count.clamp(min=1)
    square = (rest - mean).where(counts, 0.0).square().sum(others, keepdim=True)
    std = (square / count.clamp(min=1)).sqrt()
    known = count >= 2
    if int(known.sum()) < 2:
        return None
    n, m, s = count[known].double(), mean[known], std[known]
    is_moved = bool((torch.minimum((m - m.median()).abs(), m.abs()) > (1 + 6 / n.sqrt()) * s).any())
    if not is_moved:  # geometric means, of which those of rows and columns do not disturb each other
        mean, is_some = torch.zeros_like(mean), counts & (rest != 0)
        logs = rest.abs().where(is_some, 1.0).log().sum(others, keepdim=True)
        std = (logs / is_some.sum(others, keepdim=True).clamp(min=1)).exp().where(std > 0, 0.0)
        s = std[known]
        size = s.clamp(min=1e-300).log()
        if not bool(((size - size.median()).abs() > torch.clamp(6 / n.sqrt(), min=1.0)).any()):
            return None
    steps = _steps(x.shape, dim)
    seen, is_usual = x[steps].double(), usual[steps]
    low = seen.where(is_usual, torch.inf).amin(others, keepdim=True)
    high = seen.where(is_usual, -torch.inf).amax(others, keepdim=True)
    axis = Axis(mean, std, low.where(low <= high, 0.0), high.where(low <= high, 0.0))
    whole = rest[counts].std().clamp(min=1e-300).log()
    return axis, float(whole - s.clamp(min=1e-300).log().mean())


def _quantiles(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not values.numel():
        return torch.zeros(1), torch.zeros(1)
    ordered = values.sort().values
    if len(ordered) == 1:
        return ordered, torch.zeros_like(ordered)
    at = torch.linspace(0, len(ordered) - 1, min(KNOTS, len(ordered) - 1) + 1).round().long()
    knots = ordered[at]
    width = knots.diff()
    hole = (width > 0.05 * (knots[-1] - knots[0])) & (width > 32 * width.median())
    if len(ordered) > 4 * KNOTS:
        hole[:2] = hole[-2:] = False  # the tails, which few values are in
    return knots[:-1], width.where(~hole, 0.0)


__all__ = ["KNOTS", "Axis", "Law", "special_values", "thin"]
