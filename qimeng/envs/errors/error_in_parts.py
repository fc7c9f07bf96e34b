"""The error of an output that comes in parts along its leading axis, so that it need not be held as a whole.

Deals in two tensors at a time. Knows nothing about what makes them.
"""

from __future__ import annotations

import math

import torch

from qimeng.envs.errors.accuracy import Error, Scale, is_float, measure, summary
from qimeng.envs.errors.column_errors import look_at, sampled
from qimeng.envs.workers.tensor_bits import BLOCK


class ErrorInParts:
    """What `accuracy.measure(actual, expected, actual)` says, where both come in parts.

    Small outputs are held as a whole, and so are those whose last dimension is the leading one: its root mean square is
    not known before the end.

    Args:
        shape: of the whole output.
        least: what errors are divided by at least.
    """

    def __init__(self, shape: torch.Size, least: float):
        kept = len(shape)
        while kept and shape[kept - 1] == 1:
            kept -= 1
        self._shape, self._least = tuple(shape[:kept]), least
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._whole = kept < 2 or math.prod(shape) <= BLOCK
        self._start, self._top, self._total, self._finite = 0, 0.0, 0.0, True

    def add(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Take the next part."""
        if not is_float(expected) or not expected.numel():
            return
        if self._whole or expected.is_complex():
            self._whole = True
            self._parts.append((actual, expected))
            return
        y, r = (x.reshape(x.shape[: len(self._shape)]) for x in (actual, expected))
        top, total, finite = summary(y, r, y, Scale(self._least))
        self._top, self._total, self._finite = max(self._top, top), self._total + total, self._finite and finite
        self._parts.append((sampled(y, self._shape, self._start), sampled(r, self._shape, self._start)))
        self._start += r.shape[0]

    def error(self) -> Error:
        """The error of all parts together."""
        if not self._parts:
            return Error()
        y, r = (torch.cat(tensors) for tensors in zip(*self._parts, strict=True))
        if self._whole:
            return measure(y, r, y)
        rms = math.sqrt(self._total / math.prod(self._shape))
        return Error(self._top, rms, *look_at(y, r, None if self._finite else y, self._least, finite=self._finite))


__all__ = ["ErrorInParts"]
