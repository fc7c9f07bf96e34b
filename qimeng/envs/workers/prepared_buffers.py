"""Checks that a call does not change buffers that were prepared once.

A program packs or folds parameters once, and every later call reads the result. A call that writes there is right once
and wrong afterwards. Trials do not show this, because each has new parameters and so new buffers. Deals in checksums of
buffers. Knows nothing about their content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qimeng.envs.workers.tensor_bits import weighted_sum


class PreparedBuffers:
    """Checksums of a program's prepared buffers, taken when each was made.

    Args:
        prepared: the program's `_Prepared` objects (`qimeng.program.runtime`).
        seed: of the sums.
    """

    def __init__(self, prepared: Sequence[Any], seed: int):
        self._prepared, self._seed = tuple(prepared), seed
        self._sums = [self._sum(p.buffers) for p in self._prepared]
        self._functions = [p.function for p in self._prepared]
        for i, p in enumerate(self._prepared):
            p.function = self._noting(i, p.function)

    def changed(self) -> list[str]:
        """Buffers that are not as they were made, in words; calls are watched no longer."""
        found = []
        for i, p in enumerate(self._prepared):
            p.function = self._functions[i]
            pairs = zip(self._sums[i], self._sum(p.buffers), strict=False)
            found += [f"prepared buffer {i}.{j}" for j, (was, now) in enumerate(pairs) if was != now]
        return found

    def _noting(self, i: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(*tensors: torch.Tensor) -> Any:
            buffers = function(*tensors)
            self._sums[i] = self._sum(buffers)
            return buffers

        return prepare

    def _sum(self, buffers: Sequence[Any]) -> list[int]:
        return [weighted_sum(b, self._seed) if isinstance(b, torch.Tensor) else 0 for b in buffers]


__all__ = ["PreparedBuffers"]
