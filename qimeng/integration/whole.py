"""A whole model after its parts were replaced: is it still right, and how much faster is it?

Deals in calls of two models in turns. The parts were verified one by one, against float64; here their errors together
are held against a limit. Knows nothing about parts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from qimeng.program.verify import TOLERANCE

ROUNDS = 7
"""Rounds in which both models are timed in turns."""
ROUND_MS = 60.0
"""Time of one model's calls in a round, about."""
HALF = 0.1
"""Limit on the relative rms error in half types, where rounding adds up from layer to layer."""


@dataclass(frozen=True)
class Compared:
    """A call of the optimized model beside the original.

    Attributes:
        error: the largest rms difference of a floating output, relative to its rms.
        limit: which it was held against; that of the output's dtype.
        same: whether outputs have the same structure, shapes and dtypes, and all errors are within their limits.
        original_ms: time of a call of the original among others, back to back; None where there is no GPU.
        optimized_ms: of the optimized one.
    """

    error: float
    limit: float
    same: bool
    original_ms: float | None = None
    optimized_ms: float | None = None

    @property
    def speedup(self) -> float | None:
        """Original over optimized time; None where not timed."""
        return self.original_ms / self.optimized_ms if self.original_ms and self.optimized_ms else None


def compare(original: nn.Module, optimized: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compared:
    """Call both models on the same inputs, and on a GPU time them in turns."""
    with torch.no_grad():
        wanted, found = original(*args, **kwargs), optimized(*args, **kwargs)
        compared = differences(wanted, found)
        del wanted, found
        device = next((t.device for t in (*original.parameters(), *original.buffers())), torch.device("cpu"))
        if device.type != "cuda" or not compared.same:
            return compared
        times = timed([lambda: original(*args, **kwargs), lambda: optimized(*args, **kwargs)], device)
    return Compared(compared.error, compared.limit, True, *times)


def differences(wanted: Any, found: Any) -> Compared:
    """How far what one model returned is from what the other did."""
    a, tree = _pytree.tree_flatten(wanted)
    b, other = _pytree.tree_flatten(found)
    if tree != other:
        return Compared(float("inf"), 0.0, False)
    worst: Compared | None = None
    for x, y in zip(a, b, strict=True):
        if not isinstance(x, torch.Tensor):
            if type(x) is not type(y) or (x != y and x == x):
                return Compared(float("inf"), 0.0, False)
            continue
        if x.shape != y.shape or x.dtype is not y.dtype:
            return Compared(float("inf"), 0.0, False)
        one = _difference(x, y)
        if not one.same:
            return one
        worst = max(worst or one, one, key=lambda c: c.error / c.limit if c.limit else 0.0)
    return worst or Compared(0.0, 0.0, True)


def _difference(x: torch.Tensor, y: torch.Tensor) -> Compared:
    if not (x.is_floating_point() or x.is_complex()) or x.numel() == 0:
        return Compared(0.0, 0.0, torch.equal(x, y))
    limit = HALF if x.dtype.itemsize == 2 else 10 * TOLERANCE.get(x.dtype.to_real(), 0.01)
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        return Compared(float("inf"), limit, False)
    wide = torch.complex128 if x.is_complex() else torch.float64
    r, d = (t[finite].to(wide).abs().square().mean().sqrt().item() if t[finite].numel() else 0.0 for t in (x, x - y))
    error = d / r if r else d
    return Compared(error, limit, error <= limit)


def timed(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Milliseconds of a call of each on a GPU: medians over rounds in which they take turns, back to back."""

    def one(call: Callable[[], Any], repeats: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / repeats

    with torch.cuda.device(device):
        repeats = [max(1, int(ROUND_MS / max(one(call, 2), 1e-3))) for call in calls]
        rounds = [[one(call, n) for call, n in zip(calls, repeats, strict=True)] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


__all__ = ["Compared", "compare", "differences", "timed"]
