"""Scans and reductions with an operator of their own, in Triton's interpreter: whole tiles at a time, as trees.

The interpreter calls the operator once an element, which takes seconds for a tile, and sums from one end to the other,
which rounds more than a GPU does. Here the operator takes tiles, and the number of calls is the logarithm of the tile's
length (Hillis and Steele, 1986). Knows nothing about what is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def mend_folds() -> None:
    """Replace the interpreter's element-wise loops."""
    from triton.runtime.interpreter import ReduceOps, ScanOps

    ScanOps.generic_scan = _scan
    ScanOps.cumsum = ScanOps.cumprod = lambda self, x: _scan(self, (x,))
    ReduceOps.generic_reduce = _reduce


def _scan(ops: Any, tiles: Any) -> list[Any]:
    """Every prefix along `ops.axis`: after step k each element holds the 2^k elements that end with it."""
    held = [np.moveaxis(t.handle.data, ops.axis, -1) for t in tiles]
    length = held[0].shape[-1]
    step = 1
    while step < length:
        found = _combine(ops, tiles, [np.roll(x, step, -1) for x in held], held)
        held = [np.concatenate((x[..., :step], y[..., step:]), -1) for x, y in zip(held, found, strict=True)]
        step *= 2
    return [ops.to_tensor(np.moveaxis(x, -1, ops.axis), t.dtype) for x, t in zip(held, tiles, strict=True)]


def _reduce(ops: Any, tiles: Any) -> list[Any]:
    """All elements along `ops.axis` (of the whole tile where it is None), halves onto halves."""
    rank = tiles[0].handle.data.ndim
    held = [t.handle.data.reshape(-1) if ops.axis is None else np.moveaxis(t.handle.data, ops.axis, -1) for t in tiles]
    while (length := held[0].shape[-1]) > 1:
        half = length // 2  # tiles have powers of two
        held = list(_combine(ops, tiles, [x[..., :half] for x in held], [x[..., half:] for x in held]))
    held = [x[..., 0] for x in held]
    if ops.keep_dims:
        held = [x.reshape((1,) * rank) if ops.axis is None else np.expand_dims(x, ops.axis) for x in held]
    return [ops.to_tensor(x if x.shape else x.item(), t.dtype) for x, t in zip(held, tiles, strict=True)]


def _combine(ops: Any, tiles: Any, left: list[Any], right: list[Any]) -> list[Any]:
    """The operator on two tiles of each operand, as arrays."""
    given = [ops.to_tensor(x, t.dtype) for side in (left, right) for x, t in zip(side, tiles, strict=True)]
    found = ops.combine_fn.fn(*given)
    parts = found if isinstance(found, tuple) else (found,)
    return [np.broadcast_to(part.handle.data, left[0].shape) for part in parts]


__all__ = ["mend_folds"]
