"""Quotients as products, where a divisor is shared by many elements.

A division takes about four instructions an element even where the divisor is a row's (the hardware inverts it once, but
scales every dividend), a product one. It rounds once more, which is an ulp, and differs where the divisor is below
2^-128, whose inverse is infinite. Deals in expressions of a nest. Knows nothing about kernel text.
"""

from __future__ import annotations

from qimeng.coder.template.ir import Expr, Nest
from qimeng.coder.template.ops import compute_dtype

STEPS = {"floor", "ceil", "idiv", "imod", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin"}
"""Operators and reductions whose result may jump when an operand changes by an ulp."""


def share_inverses(nest: Nest) -> None:
    """Make x / d a product with 1 / d where d is a number or changes along fewer axes than x; call it after `finish`.

    Nothing is changed where a quotient decides something (``floor(x / d)``): an ulp would show.
    """
    if _decides(nest):
        return
    inverses: dict[int, Expr] = {}
    exprs: list[Expr] = []
    for e in nest.exprs:
        if _shared(e):
            d = e.args[1]
            if not isinstance(d, Expr):
                e.op, e.args = "mul", (e.args[0], 1.0 / d)
            else:
                if id(d) not in inverses:
                    inverses[id(d)] = Expr("reciprocal", (d,), d.dims, d.dtype, depends=d.depends, level=d.level)
                    exprs.append(inverses[id(d)])
                e.op, e.args = "mul", (e.args[0], inverses[id(d)])
        exprs.append(e)
    nest.exprs = exprs


def _shared(e: Expr) -> bool:
    """True for an fp32 quotient whose divisor is a number (its inverse as well a normal one) or many elements'."""
    if e.op != "div" or compute_dtype(e.dtype) != "float32" or not isinstance(e.args[0], Expr):
        return False
    d = e.args[1]
    if not isinstance(d, Expr):
        return 1e-37 < abs(float(d)) < 1e37
    return compute_dtype(d.dtype) == "float32" and d.depends < e.args[0].depends


def _decides(nest: Nest) -> bool:
    """True where a quotient, or what is computed from one, decides between values."""
    derived: set[int] = set()
    for e in nest.exprs:
        from_quotient = any(id(a) in derived for a in e.operands())
        if from_quotient and _jumps(e):
            return True
        if from_quotient or _shared(e):
            derived.add(id(e))
    return False


def _jumps(e: Expr) -> bool:
    if e.op == "cast":
        return not e.dtype.startswith(("float", "bfloat"))
    step = e.param if e.op == "reduce" else e.op
    return step in STEPS and 0 not in [a for a in e.args if not isinstance(a, Expr)]  # a sign does not change


__all__ = ["share_inverses"]
