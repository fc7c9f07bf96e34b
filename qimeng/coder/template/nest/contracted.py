"""Where a compiler's multiply-adds show: differences between a product and a maximum of such products.

Compilers make one multiply-add of a product and a following sum or difference. That product is not rounded, while a
maximum was taken of rounded ones: the largest exponent of a softmax would not be 0 but up to half a unit in the last
place of the largest element, which is 2^15 at 10^12. A factor that is 1, but not to the compiler, keeps them apart: the
multiply-add is with it, and the product before is rounded. Deals in expressions. Knows nothing about kernel text.
"""

from __future__ import annotations

from typing import Any

from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr, constant

ROUNDED = ("dot", "load", "const", "index", "round", "cast", "relu", "reduce", "scan", "part", "add", "sub")
"""Operators whose results are no products: a compiler merges no multiplication of theirs with what follows. A cast may
change nothing, and a product, a sum or a difference may be of products only (`is_product`)."""

EXTREMES = ("max", "min", "best")
"""Kinds of reductions and scans, and parts of them, that are one of the elements."""


def is_product(e: Any) -> bool:
    """Whether a compiler may make one multiply-add of `e`, or of what it may choose as `e`, and what is added to it.

    A sum or difference of two products is one multiply-add and a product, of which it may make two.
    """
    if not isinstance(e, Expr) or not is_float(e.dtype):
        return False
    return any(_multiplies(x) or (x.op in ("add", "sub") and all(map(_may_multiply, x.args))) for x in _choices(e))


def beside_extreme(e: Expr) -> tuple[int, Expr] | None:
    """Which operand of the difference `e` is a product that a maximum or minimum is subtracted from, and that extreme.

    Either may come first; None where `e` is another expression.
    """
    if e.op != "sub" or not is_float(e.dtype):
        return None
    for number, top in ((0, e.args[1]), (1, e.args[0])):
        if isinstance(top, Expr) and is_product(e.args[number]) and any(map(_is_extreme, _choices(top))):
            return number, top
    return None


def _multiplies(x: Expr) -> bool:
    if x.op in ("reduce", "scan"):
        return "prod" in str(x.param if x.op == "reduce" else x.param.kind)
    return x.op not in ROUNDED


def _may_multiply(e: Any) -> bool:
    return isinstance(e, Expr) and any(map(_multiplies, _choices(e)))


def _is_extreme(x: Expr) -> bool:
    if x.op in ("maximum", "minimum"):
        return all(isinstance(a, Expr) and constant(a) is None for a in x.args)
    if x.op == "part":
        return x.param in EXTREMES or (x.args[0].op == "scan" and x.args[0].param.kind in EXTREMES)
    return (x.op == "reduce" and x.param in EXTREMES) or (x.op == "scan" and x.param.kind in EXTREMES)


def _choices(e: Expr) -> list[Expr]:
    """What `e` is one of, without views, casts that change nothing, and choices."""
    found: list[Expr] = []
    seen: set[int] = set()
    stack: list[Any] = [e]
    while stack:
        x = stack.pop()
        if not isinstance(x, Expr) or id(x) in seen:
            continue
        seen.add(id(x))
        same = x.op == "cast" and compute_dtype(x.dtype) == compute_dtype(x.args[0].dtype)
        if x.op == "identity" or same:
            stack.append(x.args[0])
        elif x.op == "where":
            stack += x.args[1:]
        else:
            found.append(x)
    return found


__all__ = ["beside_extreme", "is_product"]
