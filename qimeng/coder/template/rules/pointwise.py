"""Arithmetic, comparisons, logic and rounding as loop nests.

Deals in definitions, which follow the PyTorch documentation of each operator. Knows nothing about schedules or kernel
text.
"""

from __future__ import annotations

import math
from typing import Any

from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import RULES, Rule, common_dtype, in_dtype, operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.family import Unsupported

_OF_BOOLEANS = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}


def binary(op: str, b: Builder, x: Any, y: Any, d: str) -> Expr:
    """`op` of two operands towards dtype `d`; of booleans the logical operator that PyTorch takes it for."""
    x, y = operand(b, x, d), operand(b, y, d)
    if d == "bool":
        op = _OF_BOOLEANS[op]
    elif op in ("maximum", "minimum") and not is_float(d):
        op = f"i{op}"
    return b.pw(op, x, y, dtype=d)


def _binary(op: str) -> Rule:
    def apply(b: Builder, node: Any, x: Any, y: Any, alpha: Any = 1) -> Expr:
        d = out_dtype(node)
        if alpha != 1:
            y = b.pw("mul", operand(b, y, d), operand(b, alpha, d)) if isinstance(y, Expr) else y * alpha
        return binary(op, b, x, y, d)

    return apply


def _unary(op: str) -> Rule:
    def apply(b: Builder, node: Any, x: Expr) -> Expr:
        return b.pw(op, operand(b, x, out_dtype(node)), dtype=out_dtype(node))

    return apply


def _compare(op: str) -> Rule:
    def apply(b: Builder, node: Any, x: Any, y: Any) -> Expr:
        d = common_dtype(x, y)
        d = "int32" if d == "bool" else d
        x, y = (in_dtype(b, e, d) if isinstance(e, Expr) and not e.dims else e for e in (x, y))
        return b.pw(op, operand(b, x, d), operand(b, y, d), dtype="bool")

    return apply


def _bitwise(op: str) -> Rule:
    def apply(b: Builder, node: Any, x: Any, y: Any) -> Expr:
        return b.pw(op, operand(b, x, out_dtype(node)), operand(b, y, out_dtype(node)), dtype=out_dtype(node))

    return apply


def _logical(op: str) -> Rule:
    def apply(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
        return b.pw(op, truth(b, x), truth(b, y), dtype="bool")

    return apply


def truth(b: Builder, x: Expr) -> Expr:
    """`x` as a boolean."""
    return x if x.dtype == "bool" else b.pw("ne", x, 0, dtype="bool")


for _name in ("add", "sub", "mul", "maximum", "minimum"):
    RULES[f"aten.{_name}"] = _binary(_name)
for _name in "exp exp2 log log2 sqrt rsqrt sin cos erf expm1 log1p tanh sigmoid reciprocal abs".split():
    RULES[f"aten.{_name}"] = _unary(_name)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    RULES[f"aten.{_name}"] = _compare(_name)
for _name in ("and", "or", "xor"):
    RULES[f"aten.bitwise_{_name}"], RULES[f"aten.logical_{_name}"] = _bitwise(_name), _logical(_name)


@rule("fmax", "fmin")
def _extreme_number(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    """The larger or smaller of two, where one is NaN the other one."""
    d = out_dtype(node)
    op = "maximum" if node.packet == "aten.fmax" else "minimum"
    found, x, y = binary(op, b, x, y, d), operand(b, x, d), operand(b, y, d)
    if not is_float(d):
        return found
    found = b.pw("where", b.pw("isnan", y, dtype="bool"), x, found, dtype=d)
    return b.pw("where", b.pw("isnan", x, dtype="bool"), y, found, dtype=d)


@rule("neg")
def _neg(b: Builder, node: Any, x: Expr) -> Expr:
    d = out_dtype(node)
    return b.pw("neg" if is_float(d) else "ineg", operand(b, x, d), dtype=d)


@rule("sign")
def _sign(b: Builder, node: Any, x: Expr) -> Expr:
    return b.redim(x, x.dims) if x.dtype == "bool" else b.pw("sign", operand(b, x, x.dtype), dtype=x.dtype)


@rule("copysign")
def _copysign(b: Builder, node: Any, x: Expr, y: Any) -> Expr:
    d = out_dtype(node)
    x = operand(b, x, d)
    if isinstance(y, Expr):
        return b.pw("copysign", x, operand(b, y, d), dtype=d)
    size = b.pw("abs", x, dtype=d)
    return b.pw("neg", size, dtype=d) if math.copysign(1.0, y) < 0 else size


@rule("signbit")
def _signbit(b: Builder, node: Any, x: Expr) -> Expr:
    if not is_float(x.dtype):
        return b.pw("lt", operand(b, x, "int64"), 0, dtype="bool")
    return b.pw("signbit", x, dtype="bool")


@rule("rsub")
def _rsub(b: Builder, node: Any, x: Expr, y: Any, alpha: Any = 1) -> Expr:
    d = out_dtype(node)
    return binary("sub", b, y, x if alpha == 1 else b.pw("mul", operand(b, x, d), operand(b, alpha, d)), d)


@rule("logical_not", "bitwise_not")
def _not(b: Builder, node: Any, x: Expr) -> Expr:
    if node.packet == "aten.bitwise_not" and x.dtype != "bool":
        return b.pw("xor", x, operand(b, -1, x.dtype), dtype=x.dtype)
    return b.pw("not", x, dtype="bool")


@rule("isnan", "isinf")
def _classify(b: Builder, node: Any, x: Expr) -> Expr:
    if not is_float(x.dtype):
        return b.pw("and", b.pw("ne", x, x, dtype="bool"), False, dtype="bool")
    return b.pw(node.packet.removeprefix("aten."), x, dtype="bool")


@rule("where")
def _where(b: Builder, node: Any, c: Expr, x: Any, y: Any) -> Expr:
    d = out_dtype(node)
    return b.pw("where", truth(b, c), operand(b, x, d), operand(b, y, d), dtype=d)


@rule("masked_fill")
def _masked_fill(b: Builder, node: Any, x: Expr, mask: Expr, value: Any) -> Expr:
    d = out_dtype(node)
    return b.pw("where", mask, operand(b, value, d), operand(b, x, d), dtype=d)


# -- division and rounding


@rule("div")
def _div(b: Builder, node: Any, x: Any, y: Any, rounding_mode: Any = None) -> Expr:
    d = out_dtype(node)
    x, y = operand(b, x, d), operand(b, y, d)
    if not is_float(d):
        quotient = b.pw("idiv", x, y, dtype=d)
        return b.pw("sub", quotient, _crosses(b, x, y, d), dtype=d) if rounding_mode == "floor" else quotient
    if rounding_mode == "floor":
        return _floor_quotient(b, x, y, d)
    quotient = b.pw("div", x, y, dtype=d)
    return _trunc(b, quotient, d) if rounding_mode == "trunc" else quotient


@rule("remainder", "fmod")
def _remainder(b: Builder, node: Any, x: Any, y: Any) -> Expr:
    d = out_dtype(node)
    x, y = operand(b, x, d), operand(b, y, d)
    if is_float(d):
        rest = _rest(b, x, y, d)
        return rest if node.packet == "aten.fmod" else _downwards(b, rest, y, b.pw("add", rest, y, dtype=d), rest, d)
    rest = b.pw("imod", x, y, dtype=d)
    if node.packet == "aten.fmod":
        return rest
    return b.pw("add", rest, b.pw("mul", _crosses(b, x, y, d), y, dtype=d), dtype=d)


def _rest(b: Builder, x: Any, y: Any, d: str) -> Expr:
    """The rest of a floating division that rounds towards 0, with the sign of `x`.

    Raises:
        Unsupported: of float64, for which the steps of the long division are too few.
    """
    if d == "float64":
        raise Unsupported("a remainder of float64")
    rest = b.pw("fmod", x, y, dtype=d)
    return b.pw("copysign", rest, x, dtype=d) if isinstance(x, Expr) else rest


def _downwards(b: Builder, rest: Expr, y: Any, below: Expr, above: Expr, d: str) -> Expr:
    """`below` where rounding down differs from rounding towards 0: a rest that has not the sign of `y`."""
    apart = b.pw("ne", b.pw("lt", rest, 0.0, dtype="bool"), _negative(b, y), dtype="bool")
    moves = b.pw("and", b.pw("ne", rest, 0.0, dtype="bool"), apart, dtype="bool")
    return b.pw("where", moves, below, above, dtype=d)


def _floor_quotient(b: Builder, x: Any, y: Any, d: str) -> Expr:
    """PyTorch's floor division (c10, div_floor_floating), as Python's: by the rest, so that it fits the remainder."""
    plain = b.pw("div", x, y, dtype=d)
    rest = _rest(b, x, y, d)
    quotient = b.pw("div", b.pw("sub", x, rest, dtype=d), y, dtype=d)
    quotient = _downwards(b, rest, y, b.pw("sub", quotient, 1.0, dtype=d), quotient, d)
    low = b.pw("floor", quotient, dtype=d)
    up = b.pw("gt", b.pw("sub", quotient, low, dtype=d), 0.5, dtype="bool")
    whole = b.pw("where", up, b.pw("add", low, 1.0, dtype=d), low, dtype=d)
    none = b.pw("where", b.pw("signbit", plain, dtype="bool"), -0.0, 0.0, dtype=d)
    whole = b.pw("where", b.pw("eq", quotient, 0.0, dtype="bool"), none, whole, dtype=d)
    if not isinstance(y, Expr):
        return whole if y else plain
    return b.pw("where", b.pw("eq", y, 0.0, dtype="bool"), plain, whole, dtype=d)


def _crosses(b: Builder, x: Any, y: Any, d: str) -> Expr:
    """1 where the quotient of two integers is negative and not whole, so that rounding down is one below."""
    rest = b.pw("imod", x, y, dtype=d)
    apart = b.pw("ne", b.pw("lt", rest, 0, dtype="bool"), _negative(b, y), dtype="bool")
    return b.cast(b.pw("and", b.pw("ne", rest, 0, dtype="bool"), apart, dtype="bool"), d)


def _negative(b: Builder, y: Any) -> Any:
    return b.pw("lt", y, 0, dtype="bool") if isinstance(y, Expr) else y < 0


def _rounding(b: Builder, x: Expr, op: str, d: str) -> Expr:
    return b.pw(op, x, dtype=d) if is_float(x.dtype) else b.redim(x, x.dims)


def _trunc(b: Builder, x: Expr, d: str) -> Expr:
    up, down = b.pw("ceil", x, dtype=d), b.pw("floor", x, dtype=d)
    return b.pw("where", b.pw("lt", x, 0.0, dtype="bool"), up, down, dtype=d)


@rule("floor", "ceil", "trunc", "round", "frac")
def _round(b: Builder, node: Any, x: Expr, decimals: int = 0) -> Expr:
    d, name = out_dtype(node), node.packet.removeprefix("aten.")
    if not is_float(x.dtype):
        return b.redim(x, x.dims)
    if decimals:
        return _to_decimals(b, x, decimals, d)
    if name in ("floor", "ceil"):
        return b.pw(name, x, dtype=d)
    if name in ("trunc", "frac"):
        whole = _trunc(b, x, d)
        return whole if name == "trunc" else b.pw("sub", x, whole, dtype=d)
    return rounded(b, x, d)


def _to_decimals(b: Builder, x: Expr, decimals: int, d: str) -> Expr:
    """PyTorch's: to an integer between a product with a power of ten and a quotient by it, or the other way round."""
    if d in ("float16", "bfloat16"):
        raise Unsupported("decimals of half types, which PyTorch rounds in between")
    divide = "div" if d == "float64" else "div_rn"
    there, back = ("mul", divide) if decimals > 0 else (divide, "mul")
    ten = 10.0 ** abs(decimals)
    return b.pw(back, rounded(b, b.pw(there, x, ten, dtype=d), d), ten, dtype=d)


def rounded(b: Builder, x: Expr, d: str) -> Expr:
    """The integer next to `x`, of two the even one, as a number of dtype `d`."""
    low = b.pw("floor", x, dtype=d)
    rest = b.pw("sub", x, low, dtype=d)
    odd = b.pw("ne", b.pw("sub", low, b.pw("mul", b.pw("floor", b.pw("mul", low, 0.5)), 2.0)), 0.0, dtype="bool")
    tie = b.pw("and", b.pw("eq", rest, 0.5, dtype="bool"), odd, dtype="bool")
    up = b.pw("or", b.pw("gt", rest, 0.5, dtype="bool"), tie, dtype="bool")
    return b.pw("copysign", b.pw("where", up, b.pw("add", low, 1.0, dtype=d), low, dtype=d), x, dtype=d)


# -- functions made of others


@rule("square")
def _square(b: Builder, node: Any, x: Expr) -> Expr:
    return b.pw("mul", x, x, dtype=out_dtype(node))


@rule("log10")
def _log10(b: Builder, node: Any, x: Expr) -> Expr:
    return b.pw("mul", b.pw("log", operand(b, x, out_dtype(node))), 1 / math.log(10), dtype=out_dtype(node))


@rule("tan")
def _tan(b: Builder, node: Any, x: Expr) -> Expr:
    x = operand(b, x, out_dtype(node))
    return b.pw("div", b.pw("sin", x), b.pw("cos", x), dtype=out_dtype(node))


@rule("sinh", "cosh")
def _hyperbolic(b: Builder, node: Any, x: Expr) -> Expr:
    d = out_dtype(node)
    x = operand(b, x, d)
    size = b.pw("abs", x)
    grown = b.pw("expm1", size)
    finite = b.pw("minimum", grown, 1e30)
    falling = b.pw("div", finite, b.pw("add", finite, 1.0))
    root = b.pw("exp", b.pw("mul", size, 0.5))  # half of e^|x| is finite where e^|x| is not
    large = b.pw("mul", b.pw("mul", root, 0.5), root)
    is_large = b.pw("gt", size, 80.0, dtype="bool")
    if node.packet == "aten.cosh":
        near = b.pw("add", b.pw("mul", b.pw("sub", grown, falling), 0.5), 1.0)
        return b.pw("where", is_large, large, near, dtype=d)
    near = b.pw("mul", b.pw("add", grown, falling), 0.5)
    return b.pw("copysign", b.pw("where", is_large, large, near), x, dtype=d)


@rule("addcmul", "addcdiv")
def _addc(b: Builder, node: Any, x: Expr, y: Expr, z: Expr, value: Any = 1) -> Expr:
    d = out_dtype(node)
    y, z = operand(b, y, d), operand(b, z, d)
    inner = b.pw("mul" if node.packet == "aten.addcmul" else "div", y, z, dtype=d)
    return binary("add", b, x, inner if value == 1 else b.pw("mul", inner, operand(b, value, d)), d)


__all__ = ["binary", "rounded", "truth"]
