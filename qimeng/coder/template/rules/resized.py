"""Cubic resizing, and any with antialiasing, as loop nests: each new element is a weighted mean of those near it.

Deals in ``interpolate`` of PyTorch (UpSampleBicubic2d.cu, UpSampleKernel.cpp). Knows nothing about schedules or kernel
text.
"""

from __future__ import annotations

from typing import Any

from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.reindex import at, index, integer
from qimeng.coder.template.rules.shapes import size_of
from qimeng.family import Unsupported

MOST_TAPS = 32
"""Most elements along a dimension that make one: their weights are added up line by line."""

CUBIC, RESIZED = -0.5, -0.75
"""The parameter of the cubic filter, with antialiasing and without."""


@rule("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _antialiased(
    b: Builder, node: Any, x: Expr, size: Any, corners: bool, height: float | None = None, width: float | None = None
) -> Expr:
    dtype, shape = out_dtype(node), node.metas[0].shape
    if not is_float(dtype):
        raise Unsupported(f"antialiased resizing of {dtype}: PyTorch has whole-number arithmetic of its own for it")
    reach = 2 if "cubic" in node.packet else 1
    y, inside = operand(b, x, dtype), list[int]()
    for d, given in ((2, height), (3, width)):
        at_dim = d + len(inside)
        before, after = size_of(b, y, at_dim), shape[d]
        if before == after and given in (None, 1.0):
            continue
        taps = _Taps(b, before, after, reach, _scale(before, after, corners, given), y.dtype)
        place = integer(b, "add", taps.first, index(b, taps.inner))
        guard = integer(b, "lt", index(b, taps.inner), taps.count, dtype="bool")
        share = b.pw("div", taps.weight(index(b, taps.inner)), taps.total())
        share = b.redim(share, [taps.outer, taps.inner, *[()] * (3 - d)])
        moved = b.pw("mul", at(b, y, at_dim, [taps.outer, taps.inner], place, guard), share)
        y = b.pw("where", guard, moved, 0.0, dtype=moved.dtype)
        inside.append(at_dim + 1)
    return b.reduce("sum", y, inside, dtype=dtype) if inside else b.cast(y, dtype)


@rule("upsample_bicubic2d")
def _cubic(b: Builder, node: Any, x: Expr, size: Any, corners: bool, scales: Any = None, *more: Any) -> Expr:
    """Four elements of each dimension, those at the edge again where there are none (UpSample.cuh).

    The weights are the filter's polynomials as products: their sums would lose digits where they are near 0.
    """
    dtype, shape = out_dtype(node), node.metas[0].shape
    if not is_float(dtype):
        raise Unsupported(f"cubic resizing of {dtype}: PyTorch has whole-number arithmetic of its own for it")
    height, width = scales if isinstance(scales, list | tuple) else (scales, *more, None)[:2]
    x = operand(b, x, dtype)
    for d, given in ((3, width), (2, height)):
        before, axis = size_of(b, x, d), b.axes.new(shape[d])
        exact, scale = b.cast(index(b, axis), x.dtype), _scale(before, shape[d], corners, given)
        exact = b.pw("mul", exact if corners else b.pw("add", exact, 0.5), scale)
        exact = exact if corners else b.pw("sub", exact, 0.5)
        low, total = b.pw("floor", exact), None
        first, part = b.cast(low, "int32"), b.pw("sub", exact, low)
        for k, weight in enumerate(_cubic_weights(b, part), -1):
            place = integer(b, "iminimum", integer(b, "imaximum", integer(b, "add", first, k), 0), before - 1)
            share = b.redim(weight, [axis, *[()] * (3 - d)])
            term = b.pw("mul", share, at(b, x, d, [axis], place))
            total = term if total is None else b.pw("add", total, term)
        assert total is not None
        x = total
    return b.cast(x, dtype)


def _cubic_weights(b: Builder, t: Expr) -> list[Expr]:
    """The weights of the four elements around a position `t` behind the second of them."""
    u = b.pw("sub", 1.0, t)

    def near(t: Expr, u: Expr) -> Expr:
        bend = b.pw("mul", b.pw("mul", t, t), -(RESIZED + 2))
        return b.pw("mul", u, b.pw("add", b.pw("add", t, 1.0), bend))

    def far(t: Expr, u: Expr) -> Expr:
        return b.pw("mul", b.pw("mul", t, RESIZED), b.pw("mul", u, u))

    return [far(t, u), near(t, u), near(u, t), far(u, t)]


def _scale(before: int, after: int, corners: bool, given: float | None) -> float:
    """Elements from one new element to the next."""
    if corners:
        return (before - 1) / (after - 1) if after > 1 else 0.0
    return 1.0 / given if given else before / after


class _Taps:
    """The elements near each new one along one dimension.

    Attributes:
        outer: the new dimension.
        inner: positions among the elements near one.
        first: the first of them.
        count: how many there are.
    """

    def __init__(self, b: Builder, before: int, after: int, reach: int, scale: float, dtype: str):
        support = reach * max(scale, 1.0)
        self._most = min(2 * int(-(-support // 1)) + 1, before)
        if self._most > MOST_TAPS:
            raise Unsupported(f"{self._most} elements that make one, more than {MOST_TAPS}")
        self._b, self._reach, self._inverse, self._dtype = b, reach, 1.0 / scale if scale >= 1 else 1.0, dtype
        self.outer: Dim = b.axes.new(after)
        self.inner: Dim = b.axes.new(self._most)
        self._center = b.pw("mul", b.pw("add", b.cast(index(b, self.outer), dtype), 0.5), scale)
        low = b.cast(b.pw("add", b.pw("sub", self._center, support), 0.5), "int32")
        high = b.cast(b.pw("add", b.pw("add", self._center, support), 0.5), "int32")
        self.first = integer(b, "imaximum", low, 0)
        self.count = integer(b, "sub", integer(b, "iminimum", high, before), self.first)

    def weight(self, number: Expr) -> Expr:
        """The weight of the element `number` of those near, not divided by the sum of all."""
        b = self._b
        place = b.cast(integer(b, "add", number, self.first), self._dtype)
        far = b.pw("abs", b.pw("mul", b.pw("add", b.pw("sub", place, self._center), 0.5), self._inverse))
        if self._reach == 1:
            return b.pw("maximum", b.pw("sub", 1.0, far), 0.0)
        a = CUBIC
        square = b.pw("mul", far, far)
        near = b.pw("add", b.pw("mul", b.pw("sub", b.pw("mul", far, a + 2), a + 3), square), 1.0)
        inner = b.pw("add", b.pw("mul", b.pw("sub", far, 5.0), far), 8.0)
        beyond = b.pw("mul", b.pw("sub", b.pw("mul", inner, far), 4.0), a)
        beyond = b.pw("where", b.pw("lt", far, 2.0, dtype="bool"), beyond, 0.0, dtype=far.dtype)
        return b.pw("where", b.pw("lt", far, 1.0, dtype="bool"), near, beyond, dtype=far.dtype)

    def total(self) -> Expr:
        """The sum of the weights, over the new dimension."""
        b, found = self._b, None
        for k in range(self._most):
            number = b.const(k, "int32")
            here = integer(b, "lt", number, self.count, dtype="bool")
            term = b.pw("where", here, self.weight(number), 0.0, dtype=self._dtype)
            found = term if found is None else b.pw("add", found, term)
        assert found is not None
        return found
