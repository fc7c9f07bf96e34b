"""Whether rounding explains the elements of a result that are out of bounds.

That is so where the exact function moves as far there when its operands are moved by roundings that programs may make
(`qimeng.envs.errors.discrete`). Where a computation jumps at thresholds, any number of elements may be asked about.

A steep function, such as the sigmoid of a large multiple of a sum whose terms cancel, nearly jumps too. The largest
error in millions of elements is that of the steepest one: a matter of luck, in eager as in a candidate. So a few
elements of a large output are asked about where nothing jumps. Fewer runs have to do, as each may take seconds.

Deals in outputs of one specification. Knows nothing about how they are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from qimeng.envs.errors import accuracy, error_budget
from qimeng.envs.errors.discrete import Dividing
from qimeng.envs.errors.error_budget import Expected

RUNS, LOOK_EVERY, FEW = 96, 8, 16
"""Maximum number of newly rounded runs; runs between two checks; elements, or rows, that may use all runs. An element
four deviations of an honest error away from its threshold crosses it in a quarter of the runs, so eight runs explain
nine elements in ten. If then more than half of the elements is unexplained, and more than a few, in more than a few
rows, they are refused. A row jumps as a whole where a threshold decides which experts compute it."""
LARGE = 1 << 20
"""Elements of an output of which one in as many may be steep."""
STEEP_RUNS, STEEP_ELEMENTS = (8, 32), 1 << 30
"""Minimum and maximum number of runs for steep elements; elements of all runs together, beyond the minimum."""
ALONE = 0.25
"""Share of the budget's root mean square that an element may have by itself, where this is too large otherwise."""


def as_right(mode: str, eager: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Outputs whose values are as right as any: eager's, and that of `Dividing`.

    Args:
        mode: precision mode.
        eager: runs eager in a mode, on the same inputs each time.
    """
    yield eager(mode)
    with Dividing():
        divided = eager(mode)
    yield divided


def explained(
    actual: torch.Tensor,
    expected: Expected,
    eager: Iterable[torch.Tensor],
    run: Callable[[], torch.Tensor] | None,
    jumps: bool = True,
) -> bool:
    """Whether rounding explains all elements out of bounds, and the rest is within the budget.

    Nothing runs where the rest is not, or where nothing jumps and more than a few elements are out of bounds.

    Args:
        actual: what a candidate returned; real.
        expected: what it should be.
        eager: outputs on the same inputs whose values are as right as any (`as_right`), made one by one.
        run: gives that output in float64, or as integers, rounded anew; None where float64 does not run.
        jumps: whether the computation jumps, so that any number of elements may.
    """
    left = _out_of_bounds(actual, expected, jumps)
    if left is None:
        return False
    for made in eager:
        left.see(made)
        if not left.count:
            return True
    if run is None:
        return not left.count
    least, most = STEEP_RUNS
    runs = RUNS if jumps else max(least, min(most, STEEP_ELEMENTS // actual.numel()))
    before = actual.numel()
    for number in range(1, runs + 1):
        left.see(run())
        if not left.count:
            return True
        if number % LOOK_EVERY == 0:
            if left.count > max(FEW, before // 2) and left.rows > FEW:
                return False
            before = left.count
    return False


@dataclass
class _Unexplained:
    """Elements out of bounds that nothing explains yet.

    Attributes:
        shape: of the output.
        places: of these elements in the flattened output.
        actual: what a candidate has there.
        low: least of the right values.
        high: largest of them.
        slack: how far beyond these it may be.
    """

    shape: torch.Size
    places: torch.Tensor
    actual: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    slack: torch.Tensor

    @classmethod
    def of(
        cls, actual: torch.Tensor, value: torch.Tensor, places: torch.Tensor, slack: torch.Tensor | None = None
    ) -> _Unexplained:
        """Those at `places`, where nothing but `value` is known to be right."""
        y, r = _ordered(actual.take(places)), _ordered(value.take(places))
        return cls(actual.shape, places, y, r, r, torch.zeros_like(r) if slack is None else slack)

    @property
    def count(self) -> int:
        """How many."""
        return self.places.numel()

    @property
    def rows(self) -> int:
        """Rows with any of them; the elements themselves where there are no rows."""
        return len((self.places // self.shape[-1]).unique()) if len(self.shape) > 1 else self.count

    def see(self, made: torch.Tensor) -> None:
        """Leave out what a value between the right ones explains, of which another output tells more."""
        other = _ordered(made.take(self.places.to(made.device))).to(self.low)
        low, high = torch.minimum(self.low, other), torch.maximum(self.high, other)
        out = ~((self.actual >= low - self.slack) & (self.actual <= high + self.slack))
        self.places, self.actual, self.slack = self.places[out], self.actual[out], self.slack[out]
        self.low, self.high = low[out], high[out]


def _out_of_bounds(actual: torch.Tensor, expected: Expected, jumps: bool) -> _Unexplained | None:
    """The elements that rounding has to explain; None where it cannot, as more than these are wrong.

    A steep element may be within the budget's maximum and yet make the root mean square of all too large.
    """
    value, budget, size = expected.value, expected.budget, actual.numel()
    if actual.is_complex() or not (jumps or (accuracy.is_float(actual) and size >= LARGE)):
        return None
    if not accuracy.is_float(actual):
        return _Unexplained.of(actual, value, (actual != value).reshape(-1).nonzero()[:, 0])
    alone = ALONE * budget.rms * math.sqrt(size)
    for limit in [budget.max] if jumps else sorted({budget.max, min(budget.max, alone)}, reverse=True):
        found = error_budget.outliers(actual, expected, limit, size if jumps else size // LARGE)
        if found is None or not found[1].isfinite().all():
            return None
        kept = actual.clone().put_(found[0], value.take(found[0]))
        rest, _ = accuracy.measured(kept, value, expected.eager, expected.scale)
        if (replace(rest, across=0.0) if jumps else rest).within(budget):  # a jump within its row's slack is kept
            return _Unexplained.of(actual, value, *found)
    return None


def _ordered(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int16) if x.dtype in (torch.bool, torch.uint8) else x


__all__ = ["as_right", "explained"]
