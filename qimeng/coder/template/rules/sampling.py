"""Samples of images and volumes at positions that a tensor gives, as loop nests.

Deals in `grid_sample` of PyTorch (GridSampler.cuh): linear and nearest, every padding. Knows nothing about schedules
or kernel text.
"""

from __future__ import annotations

import itertools
from typing import Any

from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.pointwise import rounded
from qimeng.coder.template.rules.reindex import at, integer, within
from qimeng.coder.template.rules.shapes import size_of
from qimeng.family import Unsupported

LINEAR, NEAREST = 0, 1
ZEROS, BORDER, REFLECTION = 0, 1, 2
OUTSIDE = -100.0
"""Where PyTorch puts positions that no int32 holds: outside of every tensor."""


@rule("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(b: Builder, node: Any, x: Expr, grid: Expr, mode: int, padding: int, corners: bool) -> Expr:
    """`x` of [N, C, (D,) H, W] at the places of `grid` of [N, …, 2 or 3]: (x, y) or (x, y, z), each in [-1, 1]."""
    if mode not in (LINEAR, NEAREST):
        raise Unsupported("bicubic samples")
    d = out_dtype(node)
    x, grid, rank = operand(b, x, d), operand(b, grid, d), len(x.dims) - 2
    if x.dims[0] and grid.dims[0]:
        b.axes.unify(x.dims[0], grid.dims[0])
    sizes = [size_of(b, x, 2 + i) for i in range(rank)]
    axes = [at(b, grid, rank + 1, [], b.const(rank - 1 - i, "int32")) for i in range(rank)]
    places = [_place(b, e, size, padding, corners) for e, size in zip(axes, sizes, strict=True)]
    if mode == NEAREST:
        return b.cast(_at_whole(b, x, sizes, [rounded(b, e, e.dtype) for e in places], grid), d)
    below = [b.pw("floor", e) for e in places]
    parts = [b.pw("sub", e, low) for e, low in zip(places, below, strict=True)]
    total = None
    for corner in itertools.product((0, 1), repeat=rank):
        weight = None
        for part, low, place, step in zip(parts, below, places, corner, strict=True):
            share = part if step else b.pw("sub", b.pw("add", low, 1.0), place)
            weight = share if weight is None else b.pw("mul", share, weight)
        assert weight is not None
        moved = [b.pw("add", low, 1.0) if step else low for low, step in zip(below, corner, strict=True)]
        term = b.pw("mul", _at_whole(b, x, sizes, moved, grid), _beside_channels(b, weight))
        total = term if total is None else b.pw("add", total, term)
    assert total is not None
    return b.cast(total, d)


def _place(b: Builder, e: Expr, size: int, padding: int, corners: bool) -> Expr:
    """The position among `size` elements for a coordinate in [-1, 1]; what no int32 holds is outside."""
    if corners:
        e = b.pw("mul", b.pw("mul", b.pw("add", e, 1.0), 0.5), float(size - 1))
    else:
        e = b.pw("mul", b.pw("sub", b.pw("mul", b.pw("add", e, 1.0), float(size)), 1.0), 0.5)
    if padding == REFLECTION:
        e = _reflected(b, e, *((0.0, size - 1.0) if corners else (-0.5, size - 0.5)))
    if padding in (BORDER, REFLECTION):
        e = b.pw("where", b.pw("gt", e, 0.0, dtype="bool"), b.pw("minimum", e, size - 1.0), 0.0, dtype=e.dtype)
    held = b.pw("lt", b.pw("abs", e), 2.0**31 - 256, dtype="bool")
    return b.pw("where", held, e, OUTSIDE, dtype=e.dtype)


def _reflected(b: Builder, e: Expr, low: float, high: float) -> Expr:
    """`e` between `low` and `high`, turned back at each end."""
    if low == high:
        return b.pw("mul", e, 0.0)
    span = high - low
    far = b.pw("abs", b.pw("sub", e, low))
    turns = b.pw("floor", b.pw("div", far, span))
    rest = b.pw("sub", far, b.pw("mul", turns, span))
    half = b.pw("mul", turns, 0.5)
    even = b.pw("eq", b.pw("floor", half), half, dtype="bool")
    return b.pw("add", b.pw("where", even, rest, b.pw("sub", span, rest), dtype=e.dtype), low)


def _at_whole(b: Builder, x: Expr, sizes: list[int], places: list[Expr], grid: Expr) -> Expr:
    """`x` at whole positions along its last dimensions, 0 outside."""
    rank = len(sizes)
    held = [b.cast(e, "int32") for e in places]
    guard: Any = None
    for e, size in zip(held, sizes, strict=True):
        inside = within(b, e, 0, size)
        guard = inside if guard is None else integer(b, "and", guard, inside, dtype="bool")
    for i in reversed(range(rank)):
        x = at(b, x, 2 + i, grid.dims[1:-1] if i == 0 else [], held[i], guard)
    return b.pw("where", guard, x, 0.0, dtype=x.dtype)


def _beside_channels(b: Builder, weight: Expr) -> Expr:
    """A weight for each place, of every channel."""
    return b.redim(weight, [weight.dims[0], (), *weight.dims[1:]])
