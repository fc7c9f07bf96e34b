"""Inverse trigonometric and hyperbolic functions, lengths and shifts as loop nests.

Deals in definitions by other operators, in forms where nothing cancels. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import RULES, Rule, common_dtype, operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.family import Unsupported

LARGE = 1e9
"""Above this x^2 + 1 is x^2 even in float64, and log(2 x) is asinh(x)."""


def _single(b: Builder, node: Any, x: Any) -> Any:
    """`x` in the dtype of the result.

    Raises:
        Unsupported: that is float64, for which polynomials of fp32 are too short.
    """
    if out_dtype(node) == "float64":
        raise Unsupported(f"{node.packet.removeprefix('aten.')} of float64")
    return operand(b, x, out_dtype(node))


def _unary(op: str) -> Rule:
    def apply(b: Builder, node: Any, x: Expr) -> Expr:
        return b.pw(op, _single(b, node, x), dtype=out_dtype(node))

    return apply


for _name in ("atan", "erfc"):
    RULES[f"aten.{_name}"] = _unary(_name)


@rule("asin", "acos")
def _arc(b: Builder, node: Any, x: Expr) -> Expr:
    """Angles of right triangles: 1 - x is exact where it matters, near 1."""
    x, d = _single(b, node, x), out_dtype(node)
    less, more = b.pw("sub", 1.0, x), b.pw("add", x, 1.0)
    if node.packet == "aten.asin":
        return b.pw("atan", b.pw("div", x, b.pw("sqrt", b.pw("mul", less, more))), dtype=d)
    return b.pw("mul", b.pw("atan", b.pw("sqrt", b.pw("div", less, more))), 2.0, dtype=d)


@rule("atan2")
def _atan2(b: Builder, node: Any, y: Expr, x: Expr) -> Expr:
    y, x, d = _single(b, node, y), _single(b, node, x), out_dtype(node)
    size, beside = b.pw("abs", y), b.pw("abs", x)
    same = b.pw("where", b.pw("eq", size, 0.0, dtype="bool"), 0.0, 1.0, dtype=size.dtype)  # of zeros 0, as C99 says
    ratio = b.pw("where", b.pw("eq", size, beside, dtype="bool"), same, b.pw("div", size, beside))
    angle = b.pw("atan", ratio)
    angle = b.pw("where", b.pw("signbit", x, dtype="bool"), b.pw("sub", math.pi, angle), angle)
    return b.pw("copysign", angle, y, dtype=d)


@rule("hypot")
def _hypot(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    """The longer side times sqrt(1 + q^2), q the shorter side's share of it: no square overflows.

    An infinite side makes it infinite, whatever the other one is (C99, F.9.4.3).
    """
    d = out_dtype(node)
    x, y = b.pw("abs", operand(b, x, d)), b.pw("abs", operand(b, y, d))
    long, short = b.pw("maximum", x, y), b.pw("minimum", x, y)
    share = b.pw("where", b.pw("eq", short, 0.0, dtype="bool"), 0.0, b.pw("div", short, long))
    found = b.pw("mul", long, b.pw("sqrt", b.pw("add", b.pw("mul", share, share), 1.0)), dtype=d)
    endless = b.pw("or", b.pw("isinf", x, dtype="bool"), b.pw("isinf", y, dtype="bool"), dtype="bool")
    return b.pw("where", endless, math.inf, found, dtype=d)


@rule("ldexp")
def _ldexp(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    d = out_dtype(node)
    return b.pw("mul", operand(b, x, d), b.pw("exp2", operand(b, y, d)), dtype=d)


@rule("bucketize", "searchsorted")
def _bucketize(b: Builder, node: Any, first: Expr, second: Expr, *, out_int32: bool = False, right: bool = False,
               side: Any = None, sorter: Any = None) -> Expr:  # fmt: skip
    """How many of the sorted boundaries are less than an element, or, `right`, at most it; NaN is above all of them."""
    x, bounds = (first, second) if node.packet == "aten.bucketize" else (second, first)
    if not isinstance(x, Expr):
        raise Unsupported("a search for a number")
    if sorter is not None or side not in (None, "left", "right") or len(bounds.dims) != 1:
        raise Unsupported("a search in rows of boundaries, or in unsorted ones")
    d = common_dtype(x, bounds)
    below = "le" if right or side == "right" else "lt"
    x = operand(b, b.redim(x, [*x.dims, ()]), d)
    bounds = operand(b, b.redim(bounds, [*[()] * (len(x.dims) - 1), bounds.dims[0]]), d)
    passed = b.pw(below, bounds, x, dtype="bool")
    if is_float(d):
        passed = b.pw("or", passed, b.pw("isnan", x, dtype="bool"), dtype="bool")
    return b.cast(b.reduce("sum", b.cast(passed, "int32"), [-1]), out_dtype(node))


def _odd(b: Builder, x: Expr, size: Expr, d: str) -> Expr:
    """`size`, a function of |x|, with the sign of `x`."""
    return b.pw("copysign", size, x, dtype=d)


@rule("asinh")
def _asinh(b: Builder, node: Any, x: Expr) -> Expr:
    """The logarithm of |x| + sqrt(x^2 + 1), as log1p of what that is above 1."""
    d = out_dtype(node)
    x = operand(b, x, d)
    size = b.pw("abs", x)
    kept = b.pw("minimum", size, LARGE)
    square = b.pw("mul", kept, kept)
    root = b.pw("add", b.pw("sqrt", b.pw("add", square, 1.0)), 1.0)
    near = b.pw("log1p", b.pw("add", kept, b.pw("div", square, root)))
    far = b.pw("add", b.pw("log", size), math.log(2))
    return _odd(b, x, b.pw("where", b.pw("gt", size, LARGE, dtype="bool"), far, near), d)


@rule("acosh")
def _acosh(b: Builder, node: Any, x: Expr) -> Expr:
    """The logarithm of x + sqrt(x^2 - 1), as log1p of what that is above 1."""
    d = out_dtype(node)
    x = operand(b, x, d)
    above = b.pw("sub", b.pw("minimum", x, LARGE), 1.0)
    near = b.pw("log1p", b.pw("add", above, b.pw("sqrt", b.pw("mul", above, b.pw("add", above, 2.0)))))
    far = b.pw("add", b.pw("log", x), math.log(2))
    found = b.pw("where", b.pw("gt", x, LARGE, dtype="bool"), far, near)
    return b.pw("where", b.pw("lt", x, 1.0, dtype="bool"), math.nan, found, dtype=d)


@rule("atanh")
def _atanh(b: Builder, node: Any, x: Expr) -> Expr:
    d = out_dtype(node)
    x = operand(b, x, d)
    size = b.pw("abs", x)
    ratio = b.pw("div", b.pw("mul", size, 2.0), b.pw("sub", 1.0, size))
    return _odd(b, x, b.pw("mul", b.pw("log1p", ratio), 0.5), d)


@rule("__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift")
def _shift(b: Builder, node: Any, x: Expr, by: Any) -> Expr:
    d = out_dtype(node)
    if is_float(d) or isinstance(by, Expr) or not 0 <= by < getattr(torch, d).itemsize * 8 or by != int(by):
        raise Unsupported("a shift of floating numbers, by a tensor, or by more bits than there are")
    left = node.packet in ("aten.__lshift__", "aten.bitwise_left_shift")
    return b.pw("shl" if left else "shr", operand(b, x, d), int(by), dtype=d)
