"""Describes a wrong output in words that help to find the mistake.

Deals in the places of wrong elements and in simple relations between two tensors. Knows nothing about verdicts.
"""

from __future__ import annotations

import torch

SAMPLE = 1 << 20
"""Elements that relations are looked for in."""

ALIKE = 0.99
"""Share of the elements for which a relation holds."""


class Extent:
    """The smallest block of a tensor that holds all elements added.

    Args:
        shape: of the tensor.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self._low, self._high = list(shape), [-1] * len(shape)

    def add(self, flat: torch.Tensor) -> None:
        """Note elements by their row-major numbers."""
        if flat.numel():
            for axis in range(len(self.shape) - 1, -1, -1):
                place, flat = flat % self.shape[axis], flat // self.shape[axis]
                self._low[axis] = min(self._low[axis], int(place.min()))
                self._high[axis] = max(self._high[axis], int(place.max()))

    def text(self) -> str:
        """The block as slices (``"[0:64, 960:1000]"``); empty where it is everything, or nothing was added."""
        spans = [(low, high + 1) for low, high in zip(self._low, self._high, strict=True)]
        if not spans or spans[0][1] == 0 or all(s == (0, n) for s, n in zip(spans, self.shape, strict=True)):
            return ""
        return f"[{', '.join(f'{low}:{high}' for low, high in spans)}]"


def likely_mistake(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """The class of mistake that the values suggest; empty where they suggest none."""
    y, r = actual.reshape(-1)[:SAMPLE], expected.reshape(-1)[:SAMPLE]
    if bool(y.isnan().any()):
        return "NaN among the values (memory never written, or an invalid operation)"
    if not bool(y.any()):
        return "the values are all zero"
    if y.is_complex() or y.numel() < 2:
        return ""
    y, r = y.double(), r.double()
    scale = float(r.square().mean().sqrt())
    ratio = _common(y[r.abs() > 1e-2 * scale] / r[r.abs() > 1e-2 * scale])
    if ratio is not None and abs(ratio - 1) > 1e-2:
        return f"the values are {ratio:.4g} times the expected ones"
    apart = _common(y - r)
    if apart is not None and abs(apart) > 1e-2 * scale:
        return f"the values are the expected ones {'+' if apart > 0 else '-'} {abs(apart):.4g}"
    return ""


def _common(values: torch.Tensor) -> float | None:
    """The value that nearly all share; None where there is none."""
    if values.numel() < 2:
        return None
    middle = values.median()
    near = (values - middle).abs() <= 1e-3 * middle.abs()
    return float(middle) if bool(middle.isfinite()) and float(near.double().mean()) >= ALIKE else None


__all__ = ["Extent", "likely_mistake"]
