"""Pointwise operators as CUDA C++ expressions on numbers.

Deals in one line an operator. Floating arithmetic is done in fp32 (fp64 for double) by CUDA's own functions, those that
PyTorch's kernels call: at most 2 ulp off (CUDA C++ Programming Guide, "Mathematical Functions"), divisions and square
roots IEEE's. Knows nothing about loads or loops.
"""

from __future__ import annotations

import math

from qimeng.coder.template.nest.dtypes import compute_dtype, is_float

C_TYPE = {
    "float32": "float", "float64": "double", "float16": "__half", "bfloat16": "__nv_bfloat16", "int64": "long long",
    "int32": "int", "int16": "short", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
}  # fmt: skip
"""PyTorch dtype name to the type in memory."""

_CALLS = {
    "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin",
    "cos": "cos", "erf": "erf", "erfc": "erfc", "floor": "floor", "ceil": "ceil", "tanh": "tanh", "expm1": "expm1",
    "log1p": "log1p", "atan": "atan", "abs": "fabs", "copysign": "copysign", "pow": "pow", "fmod": "fmod",
}  # fmt: skip
"""Operators that are one function of CUDA's, called with an ``f`` at the end for fp32."""

_TEXTS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "div_rn": "{0} / {1}",
    "neg": "-{0}", "ineg": "-{0}", "reciprocal": "1 / {0}", "inverse": "1 / {0}", "square": "{0} * {0}",
    "maximum": "larger({0}, {1})", "minimum": "smaller({0}, {1})",
    "imaximum": "({0} > {1} ? {0} : {1})", "iminimum": "({0} < {1} ? {0} : {1})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "idiv": "{0} / {1}", "imod": "{0} % {1}", "where": "({0} ? {1} : {2})",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "shl": "{0} << {1}", "shr": "{0} >> {1}",
    "not": "{0} == 0", "isnan": "{0} != {0}", "sign": "({0} > 0) - ({0} < 0)", "identity": "{0}",
}  # fmt: skip
_ONE = {"sigmoid", "relu", "isinf", "signbit", "bits", "from_bits"}


def known(op: str) -> bool:
    """True where `written` can print `op`.

    >>> known("tanh"), known("mystery")
    (True, False)
    """
    return op in _TEXTS or op in _CALLS or op in _ONE


def needs_extremes(op: str) -> bool:
    """Whether `op` calls `larger` or `smaller` of the prelude."""
    return op in ("maximum", "minimum", "relu")


def written(op: str, args: list[str], operands: str) -> str:
    """The expression ``op(*args)``.

    Args:
        op: the operator.
        args: names or literals.
        operands: dtype that the operands are computed in.

    >>> written("tanh", ["v1"], "float32"), written("sigmoid", ["v1"], "float64")
    ('tanhf(v1)', '1 / (1 + exp(-v1))')
    """
    double = operands in ("float64", "int64")
    suffix = "" if double else "f"
    if op == "abs" and not is_float(operands):
        return f"({args[0]} < 0 ? -{args[0]} : {args[0]})"
    if op in _CALLS:
        return f"{_CALLS[op]}{suffix}({', '.join(args)})"
    if op == "sigmoid":
        return f"1 / (1 + exp{suffix}(-{args[0]}))"
    if op == "relu":
        return f"larger({args[0]}, {literal(0.0, operands)})"
    if op == "isinf":
        return f"fabs{suffix}({args[0]}) == {literal(math.inf, operands)}"
    if op in ("bits", "signbit"):
        bits = f"{'__double_as_longlong' if double else '__float_as_int'}({args[0]})"
        return bits if op == "bits" else f"{bits} < 0"
    if op == "from_bits":
        return f"{'__longlong_as_double' if double else '__int_as_float'}({args[0]})"
    return _TEXTS[op].format(*args)


def compute_type(dtype: str) -> str:
    """The C++ type of a variable that holds values of `dtype`."""
    return C_TYPE[compute_dtype(dtype)]


def literal(value: object, dtype: str) -> str:
    """A Python number as C++ text in the spirit of `dtype`.

    >>> literal(2, "float32"), literal(0.1, "float64"), literal(float("inf"), "float32"), literal(True, "bool")
    ('2.0f', '0.1', '__int_as_float(0x7f800000)', 'true')
    """
    if isinstance(value, bool) or dtype == "bool":
        return str(bool(value)).lower()
    double = dtype in ("float64", "int64")
    if is_float(dtype) or isinstance(value, float):
        number = float(value)  # type: ignore[arg-type]
        if math.isfinite(number):
            text = repr(number)
            text += "" if "." in text or "e" in text else ".0"
            return f"({text}{'' if double else 'f'})" if text.startswith("-") else f"{text}{'' if double else 'f'}"
        high = 0x7FF if number > 0 else 0xFFF if number < 0 else 0x7FF
        if double:
            return f"__longlong_as_double(0x{high:x}{'8' if number != number else '0'}000000000000LL)"
        short = {True: "0x7fc00000"}.get(number != number, "0x7f800000" if number > 0 else "0xff800000")
        return f"__int_as_float({short})"
    whole = int(value)  # type: ignore[call-overload]
    if dtype != "int64" and -(1 << 31) < whole < 1 << 31:
        return f"({whole})" if whole < 0 else str(whole)
    return "(-9223372036854775807LL - 1)" if whole == -(1 << 63) else f"({whole}LL)"


__all__ = ["C_TYPE", "compute_dtype", "compute_type", "is_float", "known", "literal", "needs_extremes", "written"]
