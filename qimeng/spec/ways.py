"""Ways to draw new values from an example that keep its properties.

Deals in one tensor at a time. A way is built from an example once and then makes any number of tensors.
`qimeng.spec.structure` chooses the ways for an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qimeng.spec.law import Law
from qimeng.spec.source import Source


class Way(ABC):
    """Makes tensors like an example."""

    needs_example: ClassVar[bool] = True
    """Whether others are made from the example itself, which has to be where they are made then."""

    @abstractmethod
    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Put other values into `out`, whose elements are each in memory once.

        Args:
            out: where they go.
            example: the example, in the same place and of the same shape; empty where it is not needed.
            source: of random numbers.
        """

    def to(self, device: str) -> Way:
        """The same on `device`."""
        return self


@dataclass(frozen=True, eq=False)
class Drawn(Way):
    """Real numbers drawn from the example's distribution, then changed to follow its rule.

    Attributes:
        law: of the example.
        rule: ``"probability"`` and ``"log_probability"`` for rows along `dim` whose sum, or sum of exponentials, is 1;
            ``"unit"`` for slices along `dim` of norm 1, ``"phase"`` for complex numbers of size 1, ``"orthogonal"`` for
            matrices with orthonormal rows or columns; empty for no rule.
        dim: of the rule.
    """

    law: Law
    rule: str = ""
    dim: int = -1
    needs_example: ClassVar[bool] = False

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Draw, then keep the rule."""
        if out.is_complex():
            parts = torch.empty((*out.shape, 2), dtype=out.real.dtype, device=out.device)
            self.law.fill(parts, source.generator())
            out.copy_(ruled(torch.view_as_complex(parts), self.rule, self.dim))
            return
        self.law.fill(out, source.generator())
        if self.rule:
            wide = out.double() if out.dtype is torch.float64 else out.float()
            out.copy_(ruled(wide, self.rule, self.dim))

    def to(self, device: str) -> Way:
        """The same on `device`."""
        return replace(self, law=self.law.to(device))


def ruled(x: torch.Tensor, rule: str, dim: int) -> torch.Tensor:
    """`x`, made to follow the rule of `Drawn`."""
    if rule == "probability":
        return x / x.sum(dim, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    if rule == "log_probability":
        return x - x.logsumexp(dim, keepdim=True)
    if rule == "phase":
        return x / x.abs().clamp(min=1e-30)
    if rule == "unit":
        norm: torch.Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
        return x / norm.clamp(min=1e-30)
    if rule == "orthogonal":
        wide = x.shape[-2] < x.shape[-1]
        q: torch.Tensor = torch.linalg.qr(x.mT if wide else x).Q
        return q.mT if wide else q
    return x


@dataclass(frozen=True, eq=False)
class Scaled(Way):
    """Square matrices whose rows and columns are scaled alike, so symmetric, definite and triangular matrices stay so.

    Attributes:
        only_signs: whether scales are -1 and 1 alone, so that the diagonal stays.
    """

    only_signs: bool = False

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Element (i, j) times f(i) f(j)."""
        generator, shape = source.generator(), example.shape[:-1]
        real = example.real.dtype if example.is_complex() else example.dtype
        wide = torch.float64 if real is torch.float64 else torch.float32
        f = torch.rand(shape, generator=generator, device=example.device, dtype=wide)
        sign = (torch.rand(shape, generator=generator, device=example.device) < 0.5).to(wide) * 2 - 1
        f = sign if self.only_signs else sign * (0.75 + f / 2)
        factors = f[..., :, None] * f[..., None, :]
        out.copy_(torch.where(example == 0, example, example * factors))


@dataclass(frozen=True, eq=False)
class Spread(Way):
    """Vectors of numbers of very different size: each is scaled by itself, within the range seen."""

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Each element times a factor of its own."""
        wide = torch.float64 if example.dtype is torch.float64 else torch.float32
        f = torch.rand(example.shape, generator=source.generator(), device=example.device, dtype=wide).mul_(0.9)
        finite = example.isfinite()
        low, high = example.where(finite, torch.inf).amin(), example.where(finite, -torch.inf).amax()
        new = (example.to(wide) * (f + 0.55)).clamp(low.to(wide), high.to(wide))
        out.copy_(torch.where(finite, new, example.to(wide)))


@dataclass(frozen=True, eq=False)
class Steps(Way):
    """Sorted numbers along `dim`. The steps between them are reordered, so both ends stay.

    If all steps are equal integers (offsets of segments of one length), neighbours exchange units. If all are equal
    real numbers, everything is stretched (a grid stays a grid).
    """

    dim: int = -1

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Put the steps in another order."""
        x = example.movedim(self.dim, -1)
        whole = not x.is_floating_point()
        wide = x.long() if whole else x.double()
        steps = wide.diff()
        size = steps.abs().amax()
        alike = bool(((steps - steps[..., :1]).abs() <= (0 if whole else 1e-3 * size)).all())
        if not alike:
            new = steps[..., source.order(steps.shape[-1])]
        elif whole:
            new = _exchanged(steps, source)
        else:
            draw = torch.rand((), generator=source.generator(), device=x.device, dtype=torch.float64)
            middle = (wide[..., :1] + wide[..., -1:]) / 2
            out.copy_((middle + (wide - middle) * (0.5 + draw / 2)).movedim(-1, self.dim))
            return
        made = torch.cat([wide[..., :1], wide[..., :1] + new.cumsum(-1)], -1)
        if not whole:
            made[..., -1] = wide[..., -1]
            lower, upper = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
            made = made.clamp(lower, upper)
        out.copy_(made.movedim(-1, self.dim))


def _exchanged(steps: torch.Tensor, source: Source) -> torch.Tensor:
    pairs = steps.shape[-1] // 2
    most = int(steps.abs().amin()) - 1
    new = steps.clone()
    if pairs and most > 0:
        units = torch.randint(0, most + 1, (pairs,), generator=source.generator(), device=steps.device)
        new[..., 0 : 2 * pairs : 2] += units
        new[..., 1 : 2 * pairs : 2] -= units
    return new


@dataclass(frozen=True, eq=False)
class Ordered(Way):
    """Real numbers in order along `dim`, drawn afresh and put in order again.

    Attributes:
        law: of the example.
        dim: along which they are in order.
        falls: whether they fall.
    """

    law: Law
    dim: int = -1
    falls: bool = False
    needs_example: ClassVar[bool] = False

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Draw and sort."""
        self.law.fill(out, source.generator())
        out.copy_(out.sort(self.dim, descending=self.falls).values)

    def to(self, device: str) -> Way:
        """The same on `device`."""
        return replace(self, law=self.law.to(device))


@dataclass(frozen=True, eq=False)
class Shuffled(Way):
    """The example in another order along some of its dimensions; inputs of one set share the order of each size.

    Attributes:
        dims: those that are put in another order.
    """

    dims: tuple[int, ...]

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Put slices in another order."""
        for dim in self.dims:
            example = example.index_select(dim, source.order(example.shape[dim]))
        out.copy_(example)


@dataclass(frozen=True, eq=False)
class Signs(Way):
    """Two values, each element by itself, as often as seen."""

    low: float
    high: float
    share: float
    needs_example: ClassVar[bool] = False

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Toss a coin for each element."""
        draw = torch.rand(out.shape, generator=source.generator(), device=out.device)
        out.copy_(torch.where(draw < self.share, self.high, self.low))


@dataclass(frozen=True, eq=False)
class Prefix(Way):
    """Two values with a single change along the last dimension, at the same place in every row. The place moves."""

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Move the change, at least one element of each value kept."""
        size = example.shape[-1]
        at = torch.randint(1, size, (), generator=source.generator(), device=example.device)
        first, last = example[..., :1], example[..., -1:]
        out.copy_(torch.where(torch.arange(size, device=example.device) < at, first, last))


@dataclass(frozen=True, eq=False)
class Within(Way):
    """Whole numbers in the range seen; special values (an index to ignore, padding) keep their places.

    Attributes:
        low: smallest.
        high: largest.
        special: those that keep their places.
    """

    low: int
    high: int
    special: tuple[int, ...] = ()

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Draw each element."""
        beyond = min(self.high + 1, torch.iinfo(torch.int64).max)
        whole = torch.empty(out.shape, dtype=torch.int64, device=out.device)
        whole.random_(self.low, max(beyond, self.low + 1), generator=source.generator())
        out.copy_(whole)
        for value in self.special:
            out.masked_fill_(example == value, value)


@dataclass(frozen=True, eq=False)
class Distinct(Way):
    """Whole numbers of a range, none twice in a row.

    Attributes:
        low: smallest.
        high: largest.
    """

    low: int
    high: int
    needs_example: ClassVar[bool] = False

    def make(self, out: torch.Tensor, example: torch.Tensor, source: Source) -> None:
        """Put the range in another order for each row, and take the first."""
        shape = (*out.shape[:-1], self.high - self.low + 1)
        draw = torch.rand(shape, generator=source.generator(), device=out.device)
        out.copy_(draw.argsort(-1)[..., : out.shape[-1]] + self.low)


__all__ = [
    "Distinct",
    "Drawn",
    "Ordered",
    "Prefix",
    "Scaled",
    "Shuffled",
    "Signs",
    "Spread",
    "Steps",
    "Way",
    "Within",
    "ruled",
]
