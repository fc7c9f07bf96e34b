"""Expressions that are computed by another function, since theirs would lose digits.

Deals in expressions of a nest. Knows nothing about kernel text.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qimeng.coder.template.nest.expr import Expr, constant

SAME = 1e-8
"""Relative difference from 1 / sqrt(2) of a factor that is meant as that: more than the rounding of its decimals."""


def combined(e: Expr, fast: str) -> Expr:
    """`e`, or what it is computed as instead.

    In fp32 the fast forms take 1 + erf(x / sqrt(2)) for ``gelu_gate`` of x; the others an exponential of what may be a
    large number for ``exp_wide`` of it. All but bf16's take log(1 + e^-|x|) for ``log1p_unit`` of the power, since that
    is in [0, 1].

    Args:
        e: any expression.
        fast: as in `ops.write`; half types show none of the digits that are lost.
    """
    if not fast and e.op == "exp" and e.dtype == "float32" and not _is_relative(e.args[0]):
        return replace(e, op="exp_wide")
    if fast != "bfloat16" and e.op == "log1p" and e.dtype == "float32" and _is_at_most_1(e.args[0]):
        return replace(e, op="log1p_unit")
    if fast != "float32" or e.op != "add" or e.dtype != "float32":
        return e
    erf = _beside(e, 1.0, 0.0)
    scaled = _beside(erf.args[0], math.sqrt(0.5), SAME) if erf is not None and erf.op == "erf" else None
    return e if scaled is None else replace(e, op="gelu_gate", args=(scaled,))


def _is_at_most_1(x: object) -> bool:
    """Whether `x` is a power e^-|y|."""
    for op in ("exp", "neg", "abs"):
        if not isinstance(x, Expr) or (x := _without_views(x)).op != op:
            return False
        x = x.args[0]
    return True


def _is_relative(x: object) -> bool:
    """Whether a power's exponent is relative to a maximum, as in a softmax, or to a bound: large results are near 1."""
    if not isinstance(x, Expr):
        return False
    x = _without_views(x)
    if x.op == "minimum":
        return _number(x.args[1]) is not None
    return x.op == "sub" and isinstance(x.args[1], Expr) and _is_maximum(x.args[1])


def _is_maximum(e: Expr) -> bool:
    e = _without_views(e)
    if e.op == "where":  # of infinite ones, 0
        return any(_is_maximum(a) for a in e.operands())
    return e.op in ("reduce", "part", "scan", "maximum") and (e.op == "maximum" or e.param == "max")


def _beside(e: Expr, number: float, tolerance: float) -> Expr | None:
    """The operand of a sum or product in fp32 whose other operand is `number`; None for anything else."""
    e = _without_views(e)
    if e.op not in ("add", "mul") or e.dtype != "float32" or len(e.args) != 2:
        return None
    for x, other in (e.args, e.args[::-1]):
        known = _number(other)
        if isinstance(x, Expr) and known is not None and math.isclose(known, number, rel_tol=tolerance):
            return _without_views(x) if x.dtype == "float32" else None
    return None


def _without_views(e: Expr) -> Expr:
    while e.op == "identity" and isinstance(e.args[0], Expr):
        e = e.args[0]
    return e


def _number(item: object) -> float | None:
    held = constant(item) if isinstance(item, Expr) else None
    if held is not None:
        item = held.param
    return float(item) if isinstance(item, (int, float)) else None


__all__ = ["combined"]
