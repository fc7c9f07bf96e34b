"""Powers as loop nests: whole exponents multiplied out, others by logarithms.

Deals in definitions, which follow C99's F.9.4.4 as PyTorch does. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.family import Unsupported


@rule("pow")
def _pow(b: Builder, node: Any, x: Any, y: Any) -> Expr:
    d = out_dtype(node)
    if not isinstance(y, Expr):
        return power(b, operand(b, x, d), y, d)
    if isinstance(x, Expr) or not 0 < x < math.inf:
        return _general(b, operand(b, x, d), operand(b, y, d), d)
    if not is_float(d):
        raise Unsupported("a whole power by a tensor")
    if x == 1:
        return b.redim(b.const(1.0, d), [b.axes.new(s) for s in node.metas[0].shape])
    return b.pw("exp2", b.pw("mul", operand(b, y, d), math.log2(x)), dtype=d)


def _general(b: Builder, x: Any, y: Any, d: str) -> Expr:
    """`x ** y` for any numbers, one of which may be a plain one.

    Raises:
        Unsupported: integers or float64, for which the logarithm of fp32 is too short.
    """
    if not is_float(d) or d == "float64":
        raise Unsupported(f"a power of {d} to a tensor or to more than {MOST_FACTORS}")
    w = _Facts(b, d)
    size, falls = w.of("abs", x), w.truth("lt", y, 0.0)
    found: Any = b.pw("pow", size, y, dtype=d)
    found = w.where(w.truth("eq", size, 0.0), w.where(falls, math.inf, 0.0), found)
    found = w.where(w.truth("eq", size, math.inf), w.where(falls, 0.0, math.inf), found)
    grows = w.truth("ne", w.truth("gt", size, 1.0), falls)
    found = w.where(w.truth("eq", w.of("abs", y), math.inf), w.where(grows, math.inf, 0.0), found)
    found = w.where(w.truth("eq", size, 1.0), 1.0, found)
    whole = w.truth("eq", w.of("floor", y), y)
    half = w.of("mul", y, 0.5)
    turned = w.both(w.truth("signbit", x), w.both(whole, w.truth("ne", w.of("floor", half), half)))
    found = w.where(turned, w.of("neg", found), found)
    broken = w.truth("ne", w.of("floor", y), y)
    found = w.where(w.both(w.both(w.truth("lt", x, 0.0), w.truth("ne", x, -math.inf)), broken), math.nan, found)
    found = w.where(w.truth("ne", x, x), math.nan, w.where(w.truth("ne", y, y), math.nan, found))
    return w.where(w.truth("eq", x, 1.0), 1.0, w.where(w.truth("eq", y, 0.0), 1.0, found))  # type: ignore[no-any-return]


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "abs": abs, "floor": lambda x: float(math.floor(x)) if math.isfinite(x) else x, "mul": operator.mul,
    "lt": operator.lt, "gt": operator.gt, "eq": operator.eq, "ne": operator.ne,
    "signbit": lambda x: math.copysign(1.0, x) < 0,
}  # fmt: skip


class _Facts:
    """Pointwise operators of expressions; those of plain numbers are computed at once."""

    def __init__(self, b: Builder, dtype: str) -> None:
        self._b, self._dtype = b, dtype

    def of(self, op: str, *args: Any) -> Any:
        return self._op(op, args, self._dtype)

    def truth(self, op: str, *args: Any) -> Any:
        return self._op(op, args, "bool")

    def both(self, x: Any, y: Any) -> Any:
        if isinstance(x, Expr) and isinstance(y, Expr):
            return self._b.pw("and", x, y, dtype="bool")
        known, other = (y, x) if isinstance(x, Expr) else (x, y)
        return other if known else False

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        if not isinstance(condition, Expr):
            return yes if condition else no
        return self._b.pw("where", condition, yes, no, dtype=self._dtype)

    def _op(self, op: str, args: tuple[Any, ...], dtype: str) -> Any:
        if any(isinstance(a, Expr) for a in args):
            return self._b.pw(op, *args, dtype=dtype)
        return _OF_NUMBERS[op](*args)


MOST_FACTORS = 64
"""Largest exponent that is multiplied out."""


def power(b: Builder, x: Expr, y: float, d: str) -> Expr:
    """`x ** y` for a number `y`; whole exponents by repeated squaring, which negative `x` needs.

    Others are computed of |x|: of negative numbers the result is NaN, but of -inf as of inf (C99, F.9.4.4).
    """
    if math.isnan(y):
        return b.pw("where", b.pw("eq", x, 1, dtype="bool"), operand(b, 1, d), operand(b, y, d), dtype=d)
    if float(y).is_integer():
        if abs(y) > MOST_FACTORS:
            return _general(b, x, float(y), d)
        result, square, left = None, x, abs(int(y))
        while left:
            if left & 1:
                result = square if result is None else b.pw("mul", result, square, dtype=d)
            left >>= 1
            square = b.pw("mul", square, square, dtype=d) if left else square
        if result is None:
            return b.pw("where", b.pw("eq", x, x, dtype="bool"), operand(b, 1, d), operand(b, 1, d), dtype=d)
        return result if y > 0 else b.pw("reciprocal", result, dtype=d)
    if abs(y) == 0.5:
        return b.pw("sqrt" if y > 0 else "rsqrt", x, dtype=d)
    size = b.pw("abs", x, dtype=d)
    if math.isinf(y):
        grows = b.pw("gt" if y > 0 else "lt", size, 1.0, dtype="bool")
        result = b.pw("where", grows, operand(b, math.inf, d), b.pw("sub", x, x, dtype=d), dtype=d)
        result = b.pw("where", b.pw("isinf", x, dtype="bool"), math.inf if y > 0 else 0.0, result, dtype=d)
        return b.pw("where", b.pw("eq", size, 1.0, dtype="bool"), 1.0, result, dtype=d)
    if not float(2 * y).is_integer():
        result = b.pw("exp2", b.pw("mul", b.pw("log2", size, dtype=d), float(y)), dtype=d)
    elif y > 0:
        result = b.pw("mul", power(b, size, math.floor(y), d), b.pw("sqrt", size, dtype=d), dtype=d)
    else:  # powers of the root, which is neither too large nor too small
        result = power(b, b.pw("rsqrt", size, dtype=d), int(-2 * y), d)
    below = b.pw("lt", x, 0.0, dtype="bool")
    below = b.pw("and", below, b.pw("ne", x, -math.inf, dtype="bool"), dtype="bool")
    return b.pw("where", below, operand(b, math.nan, d), result, dtype=d)


__all__ = ["power"]
