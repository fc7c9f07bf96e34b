"""The logarithm of the gamma function and its derivative as loop nests.

Deals in definitions by other operators: recurrence to where a polynomial or an asymptotic series holds, and reflection
(DLMF 5.5.1, 5.5.3, 5.11.1, 5.11.2). Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.pointwise import rounded
from qimeng.family import Unsupported

NEAR_TWO = (
    0.42278432846069336, -0.10031729191541672, 0.03296498581767082, -0.01238488219678402, 0.004999168682843447,
    -0.002098335651680827, 0.0009095242712646723, -0.0004565336275845766, 0.00020861896337009966,
)  # fmt: skip
"""log gamma(x) / ((x - 1) (x - 2)) in x - 2 from 1.5 to 2.5, the lowest power first; minimax, to 1.7e-9."""

LOG_SERIES = (1 / 12, -1 / 360, 1 / 1260)
"""Of 1 / x, in 1 / x^2: what Stirling's formula leaves of log gamma (DLMF 5.11.1); from 7 on the next is 1e-9."""

SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132)
"""Of 1 / x^2, in 1 / x^2: what log x - 1 / 2x leaves of the derivative (DLMF 5.11.2); from 6 on the next is 1e-11."""


def _single(b: Builder, node: Any, x: Any) -> Expr:
    if out_dtype(node) == "float64":
        raise Unsupported(f"{node.packet.removeprefix('aten.')} of float64")
    found: Expr = operand(b, x, out_dtype(node))
    return found


def _polynomial(b: Builder, x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's rule, the lowest power first."""
    *rest, last = coefficients
    found = b.pw("add", b.pw("mul", x, last), rest[-1])
    for c in reversed(rest[:-1]):
        found = b.pw("add", b.pw("mul", x, found), c)
    return found


def _turned_back(b: Builder, x: Expr) -> Expr:
    """Pi times the distance of `x` to the next integer."""
    return b.pw("mul", b.pw("sub", x, rounded(b, x, x.dtype)), math.pi)


@rule("lgamma")
def _lgamma(b: Builder, node: Any, x: Any) -> Expr:
    x = _single(b, node, x)
    size = b.pw("abs", x)
    found = b.pw("where", b.pw("lt", size, 7.0, dtype="bool"), _small_lgamma(b, size), _large_lgamma(b, size))
    turn = _turned_back(b, x)
    wave = b.pw("log", b.pw("abs", b.pw("sin", turn)))
    other = b.pw("sub", b.pw("sub", math.log(math.pi), b.pw("add", b.pw("log", size), wave)), found)
    other = b.pw("where", b.pw("eq", turn, 0.0, dtype="bool"), math.inf, other)
    found = b.pw("where", b.pw("lt", x, 0.0, dtype="bool"), other, found)
    return b.pw("where", b.pw("isinf", x, dtype="bool"), math.inf, found, dtype=out_dtype(node))


def _small_lgamma(b: Builder, x: Expr) -> Expr:
    """From 0 to 7.5: (z - 1) (z - 2) P(z - 2), where z is `x` moved by integers to between 1.5 and 2.5."""
    first, second = b.pw("lt", x, 1.5, dtype="bool"), b.pw("lt", x, 0.5, dtype="bool")
    past = b.pw("where", second, x, b.pw("where", first, b.pw("sub", x, 1.0), b.pw("sub", x, 2.0)))  # z - 2, exactly
    below = b.pw("where", second, b.pw("mul", x, b.pw("add", x, 1.0)), x)
    above: Expr | float = 1.0
    for _ in range(5):
        far = b.pw("gt", past, 0.5, dtype="bool")
        past = b.pw("where", far, b.pw("sub", past, 1.0), past)
        above = b.pw("where", far, b.pw("mul", b.pw("add", past, 2.0), above), above)
    moved = b.pw("log", b.pw("where", first, below, above))
    moved = b.pw("where", first, b.pw("neg", moved), moved)
    inner = b.pw("mul", b.pw("mul", b.pw("add", past, 1.0), past), _polynomial(b, past, NEAR_TWO))
    return b.pw("add", inner, moved)


def _large_lgamma(b: Builder, x: Expr) -> Expr:
    """Stirling's formula."""
    inverse = b.pw("reciprocal", x)
    rest = b.pw("mul", _polynomial(b, b.pw("mul", inverse, inverse), LOG_SERIES), inverse)
    main = b.pw("mul", x, b.pw("sub", b.pw("log", x), 1.0))
    half = b.pw("mul", b.pw("log", x), -0.5)
    return b.pw("add", main, b.pw("add", b.pw("add", half, 0.5 * math.log(2 * math.pi)), rest))


@rule("digamma")
def _digamma(b: Builder, node: Any, x: Any) -> Expr:
    x = _single(b, node, x)
    below = b.pw("lt", x, 0.0, dtype="bool")
    far = b.pw("where", below, b.pw("sub", 1.0, x), x)
    passed: Expr | None = None
    for _ in range(6):
        near = b.pw("lt", far, 6.0, dtype="bool")
        step = b.pw("where", near, b.pw("reciprocal", far), 0.0)
        passed = step if passed is None else b.pw("add", passed, step)
        far = b.pw("where", near, b.pw("add", far, 1.0), far)
    inverse = b.pw("reciprocal", far)
    square = b.pw("mul", inverse, inverse)
    rest = b.pw("add", b.pw("mul", inverse, 0.5), b.pw("mul", square, _polynomial(b, square, SERIES)))
    assert passed is not None
    found = b.pw("sub", b.pw("sub", b.pw("log", far), rest), passed)
    turn = _turned_back(b, x)
    other = b.pw("sub", found, b.pw("div", b.pw("mul", b.pw("cos", turn), math.pi), b.pw("sin", turn)))
    other = b.pw("where", b.pw("eq", turn, 0.0, dtype="bool"), math.nan, other)
    found = b.pw("where", below, other, found)
    pole = b.pw("copysign", math.inf, b.pw("neg", x))
    return b.pw("where", b.pw("eq", x, 0.0, dtype="bool"), pole, found, dtype=out_dtype(node))
