"""How exactly quotients are computed: rounded as PyTorch rounds them where they decide, else as cheaply as is right.

Where a quotient, or what is computed from one, decides between values (``floor(x / w)``, ``x / w >= 1``, an argmax), an
ulp shows as a wrong integer. There divisions are IEEE's, and operators that yield a half type round to it as PyTorch's
do, since what is stored in between decides there. Elsewhere a divisor that many elements share is inverted once: a
division takes about four instructions an element even where the divisor is a row's (the hardware inverts it once, but
scales every dividend), a product one. It rounds once more, which is an ulp. Deals in expressions of a nest. Knows
nothing about kernel text.
"""

from __future__ import annotations

from dataclasses import replace

from qimeng.coder.template.nest.dtypes import CONVERTED, compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.ir import Nest

STEPS = {"floor", "ceil", "idiv", "imod", "fmod", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin"}
"""Operators and reductions whose result may jump when an operand changes by an ulp."""

HALVES = ("float16", "bfloat16")

TINY, LIFT = 2.0**-100, 2.0**64
"""Divisors below the first are multiplied by the second, and dividends with them: the inverse of what is below 2^-128
would be infinite."""


def settle_quotients(nest: Nest) -> None:
    """Choose how each quotient of `nest` is computed; call it after `finish`."""
    deciding = _deciding(nest)
    _round_halves(nest, deciding)
    inverses: dict[int, tuple[Expr, Expr | None]] = {}
    exprs: list[Expr] = []
    for e in nest.exprs:
        if id(e) in deciding:
            _make_exact(e)
        elif _shared(e):
            exprs += _as_product(e, inverses)
        exprs.append(e)
    nest.exprs = exprs


def _deciding(nest: Nest) -> set[int]:
    """What decides between values, here or later on, or is computed with on the way there; sums round on their own."""
    found = {id(nest.outputs[i][0]) for i in nest.deciding}
    for e in reversed(nest.exprs):
        rounds = e.op in ("load", "dot") or (e.op == "reduce" and e.param not in ("max", "min"))
        rounds = rounds or (e.op == "scan" and e.param.kind not in ("max", "min", "argmax", "argmin"))
        if _jumps(e) or (id(e) in found and not rounds):
            found |= {id(a) for a in e.operands()}
    return found


def _jumps(e: Expr) -> bool:
    if e.op == "load":
        return bool(e.args)  # computed positions
    if e.op == "cast":
        return not is_float(e.dtype) or e.dtype in CONVERTED
    step = e.param if e.op == "reduce" else e.param.kind if e.op == "scan" else e.op
    return step in STEPS and 0 not in [a for a in e.args if not isinstance(a, Expr)]  # a sign does not change


def _make_exact(e: Expr) -> None:
    """IEEE's division in place of the hardware's; in float64 they are one."""
    if compute_dtype(e.dtype) == "float32":
        if e.op == "div":
            e.op = "div_rn"
        elif e.op == "reciprocal":
            e.op, e.args = "div_rn", (1.0, e.args[0])


def _round_halves(nest: Nest, deciding: set[int]) -> None:
    """Round what decides, and what shows in finer results, to the half type that PyTorch stores it in."""
    rounded: dict[int, Expr] = {}
    exprs: list[Expr] = []
    for e in nest.exprs:
        e.args = tuple(rounded.get(id(a), a) if isinstance(a, Expr) else a for a in e.args)
        exprs.append(e)
        if e.stored and (e.shown or id(e) in deciding) and e.dtype in HALVES and e.op != "round":
            rounded[id(e)] = replace(e, op="round", args=(e,), param=None, reduced=(), stored=False)
            if id(e) in deciding:
                deciding.add(id(rounded[id(e)]))
            exprs.append(rounded[id(e)])
    nest.exprs = exprs
    nest.outputs = [(rounded.get(id(e), e), shape, stride, dtype) for e, shape, stride, dtype in nest.outputs]


def _shared(e: Expr) -> bool:
    """True for an fp32 quotient whose divisor is a number (its inverse as well a normal one) or many elements'."""
    if e.op != "div" or compute_dtype(e.dtype) != "float32" or not isinstance(e.args[0], Expr):
        return False
    d = e.args[1]
    if not isinstance(d, Expr):
        return 1e-37 < abs(float(d)) < 1e37
    return compute_dtype(d.dtype) == "float32" and d.depends < e.args[0].depends


def _as_product(e: Expr, inverses: dict[int, tuple[Expr, Expr | None]]) -> list[Expr]:
    """Make `e` a product with an inverse, which every quotient by the same divisor uses; returns what that needs.

    Args:
        e: the quotient.
        inverses: the divisors so far, to their inverse and the factor of the dividends where one is needed.
    """
    x, d = e.args
    if not isinstance(d, Expr):
        e.op, e.args = "mul", (x, 1.0 / d)
        return []
    made: list[Expr] = []
    if id(d) not in inverses:

        def add(op: str, *args: object, dtype: str = "float32") -> Expr:
            made.append(Expr(op, args, d.dims, dtype, depends=d.depends, level=d.level))
            return made[-1]

        if _is_large(d):
            inverses[id(d)] = add("reciprocal", d), None
        else:
            below = add("lt", add("abs", d), TINY, dtype="bool")
            factor = add("where", below, LIFT, 1.0)
            inverses[id(d)] = add("reciprocal", add("mul", d, factor)), factor
    inverse, lift = inverses[id(d)]
    if lift is not None:
        made.append(Expr("mul", (x, lift), x.dims, "float32", depends=x.depends, level=max(x.level, d.level)))
        x = made[-1]
    e.op, e.args = "mul", (x, inverse)
    return made


def _is_large(d: Expr) -> bool:
    """Whether a divisor is never so small that its inverse is infinite, but for 0."""
    numbers = [a for a in d.args if not isinstance(a, Expr)]
    if d.op in ("identity", "round", "sqrt"):
        return _is_large(d.args[0])
    if d.op == "add":  # x + eps
        return bool(numbers) and numbers[0] >= TINY and all(_is_positive(a) for a in d.operands())
    if d.op == "maximum":
        return bool(numbers) and bool(numbers[0] >= TINY)
    # a sum of exponentials relative to their maximum is at least 1
    return d.op == "mul" and any(a.op == "part" and a.param == "sum" for a in d.operands())


def _is_positive(e: Expr) -> bool:
    """Whether `e` is no negative number for sure."""
    if e.op in ("abs", "exp", "relu", "sqrt") or (e.op == "part" and e.param == "m2"):
        return True
    if e.op in ("identity", "round", "cast") or (e.op == "reduce" and e.param in ("sum", "max", "min")):
        return _is_positive(e.args[0])
    if e.op == "mul" and e.args[0] is e.args[1]:
        return True
    return e.op in ("mul", "div") and all(_is_positive(a) if isinstance(a, Expr) else a > 0 for a in e.args)


__all__ = ["settle_quotients"]
