"""Decides whether a trial on extreme inputs is meaningful: huge numbers, mixed units, infinities and NaN.

Deals in the results of eager and float64 on one trial. Knows nothing about candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.envs.errors import accuracy
from qimeng.envs.errors.error_budget import Expected
from qimeng.spec.dispatch import DispatchMode

LOST = 2.0**-6
"""Error from which eager's own result is useless."""

ATTEMPTS = 3
"""Draws of extreme inputs until the distribution is dropped."""


def says_nothing(distribution: str, outputs: Iterable[Expected], not_finite: float) -> bool:
    """Whether to skip a trial: eager is far off, or the order of a sum decides whether it overflows.

    Args:
        distribution: of the inputs.
        outputs: what is expected.
        not_finite: largest share of an output that is not finite. Non-finite inputs may make whole rows or everything
            non-finite, so any share is allowed then.
    """
    overflows = not_finite > 0 and distribution != "infinite"
    return overflows or any(_is_lost(e) for e in outputs)


def overflowing(distribution: str, run: Callable[[], Any]) -> tuple[Any, float]:
    """What eager returns, and 1 if huge inputs overflowed in an intermediate value, which a selection may hide; else 0.

    Args:
        distribution: of the inputs.
        run: runs eager.
    """
    if distribution != "huge":
        return run(), 0.0
    with _Overflows() as watch:
        return run(), float(watch.seen)


class _Overflows(DispatchMode):
    """Detects operators that turn finite numbers into non-finite ones."""

    seen = False

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        fresh = "empty" in func.overloadpacket.__name__  # memory that nothing was written to
        if not self.seen and not fresh and not _all_finite(found):
            given = _pytree.tree_leaves((args, kwargs))
            self.seen = _all_finite(given) and all(math.isfinite(x) for x in given if isinstance(x, float))
        return found


def _all_finite(tree: Any) -> bool:
    tensors = [x for x in _pytree.tree_leaves(tree) if isinstance(x, torch.Tensor) and accuracy.is_float(x)]
    tensors = [part for x in tensors for part in _dense(x)]
    return all(bool((x if x.dtype.itemsize > 1 else x.float()).isfinite().all()) for x in tensors)  # float8 has no test


def _dense(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The dense tensors that `x` consists of."""
    if x.is_nested:
        return x.unbind()
    return (x._values(),) if x.is_sparse else (x,)


def _is_lost(expected: Expected) -> bool:
    """Whether eager is too far off to judge others, such as integers computed from numbers without enough digits."""
    if accuracy.is_float(expected.value):
        return expected.error.max > LOST
    return expected.eager is not None and expected.value.dtype is not torch.bool


__all__ = ["ATTEMPTS", "LOST", "overflowing", "says_nothing"]
