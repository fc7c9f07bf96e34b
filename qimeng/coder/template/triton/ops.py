"""Pointwise operators as Triton text.

Deals in one-line expressions over named temporaries. `write(op, args, dtype)` gives lines of Triton that leave the
result in the last name. Floating arithmetic is done in fp32 (fp64 for double); numerically delicate functions are
written out, since libdevice cannot be interpreted and the approximations of the hardware lose small values.
"""

from __future__ import annotations

from collections.abc import Callable

from qimeng.coder.template.triton.exponentials import exp2_lines, exp_lines, pow_lines
from qimeng.coder.template.triton.remainders import fmod_lines
from qimeng.coder.template.triton.special import FAST, TABLES, expm1_lines, polynomial, tanh_series

SIMPLE: dict[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "div_rn": "tl.div_rn({0}, {1})", "neg": "{0} * -1.0", "ineg": "-{0}",
    "abs": "tl.abs({0})", "exp": "tl.exp({0})", "log": "tl.log({0})", "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt_rn({0})", "rsqrt": "1.0 / tl.sqrt_rn({0})", "cos": "tl.cos({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "relu": "tl.maximum(0.0, {0}, propagate_nan=tl.PropagateNan.ALL)",
    "reciprocal": "1.0 / {0}",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "imaximum": "tl.maximum({0}, {1})", "iminimum": "tl.minimum({0}, {1})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "idiv": "{0} // {1}", "imod": "{0} % {1}",
    "where": "tl.where({0}, {1}, {2})", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}",
    "shl": "{0} << {1}", "shr": "{0} >> {1}", "not": "{0} == 0",
    "isnan": "{0} != {0}", "isinf": "tl.abs({0}) == float('inf')",
    "sign": "({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)", "square": "{0} * {0}",
    "identity": "{0}", "inverse": "1.0 / {0}",
}  # fmt: skip
"""Operators that are one expression; ``inverse`` is a reciprocal whose operand is positive.

Triton writes ``-x`` as ``0 - x``, which has no -0; a product with -1 it makes a change of sign. Its ``/`` on fp32 is
off by up to 2 ulp (PTX ISA, ``div.full.f32``), ``div_rn`` by none. A maximum of zeros is +0 on a GPU whatever the
order of the operands, as in PyTorch's kernels there; on the CPU both give the second.
"""


def signed(size: str, x: str, double: bool = False) -> str:
    """`size`, which is not negative, with the sign of `x`, that of zero too."""
    bits, last = ("int64", 63) if double else ("int32", 31)
    sign = f"(({x}).to(tl.{bits}, bitcast=True) >> {last} << {last})"
    return f"(({size}).to(tl.{bits}, bitcast=True) | {sign}).to(tl.{'float64' if double else 'float32'}, bitcast=True)"


def _bitwise(op: str, args: list[str], dtype: str) -> str:
    """Operators on the bits of floating numbers, `dtype` that of their operands."""
    double = dtype in ("float64", "int64")
    bits, number = ("tl.int64", "tl.float64") if double else ("tl.int32", "tl.float32")
    if op == "copysign":
        return signed(f"tl.abs({args[0]})", args[1], double)
    if op == "bits":
        return f"({args[0]}).to({bits}, bitcast=True)"
    if op == "signbit":
        return f"({args[0]}).to({bits}, bitcast=True) < 0"
    return f"({args[0]}).to({bits}).to({number}, bitcast=True)"


ROUNDS_NUMBERS = ("maximum", "minimum", "where", "eq", "ne", "lt", "le", "gt", "ge")
"""Operators for which Triton takes a plain number for fp32, beside float64 too."""
BITWISE = ("copysign", "signbit", "bits", "from_bits")
"""Operators that `_bitwise` writes."""


def _tanh(t: str, x: str) -> list[str]:
    return [
        f"{t}_e = tl.exp(-2.0 * tl.abs({x}))",
        *tanh_series(t, x),
        f"{t}_b = (1.0 - {t}_e) / (1.0 + {t}_e)",
        f"{t} = tl.where(tl.abs({x}) < 0.2, {t}_s, tl.where({x} < 0, -{t}_b, {t}_b))",
    ]


def _expm1(t: str, x: str) -> list[str]:
    return [*exp_lines(f"{t}_e", x), *expm1_lines(t, x, f"{t}_e")]


def _log1p(t: str, x: str) -> list[str]:
    return [
        f"{t}_u = 1.0 + {x}",
        f"{t}_d = {t}_u - 1.0",
        f"{t}_l = tl.log({t}_u)",
        f"{t}_r = {t}_l * ({x} / tl.where({t}_d == 0.0, 1.0, {t}_d))",
        f"{t} = tl.where({t}_d == 0.0, {x}, tl.where({t}_u > 1.0e7, {t}_l, {t}_r))",
    ]


LOG1P_UNIT = (
    -0.49999648332595825, 0.3332132399082184, -0.24857163429260254, 0.191536545753479, -0.13753803074359894,
    0.07920453697443008, -0.03006579354405403, 0.005364824552088976,
)  # fmt: skip
"""(log(1 + x) - x) / x^2 up to 1, the lowest power first; minimax, a relative error of the sum of 3.3e-8."""


def _log1p_unit(t: str, x: str) -> list[str]:
    return [f"{t} = {x} + {x} * {x} * {polynomial(LOG1P_UNIT, x)}"]


def _floor(t: str, x: str) -> list[str]:
    """Triton's own takes a number below 2^-126 for 0 (``cvt.rmi.ftz``), so that of a negative one would be 0."""
    return [f"{t}_f = tl.floor({x})", f"{t} = tl.where({x} < 0, tl.minimum({t}_f, -1.0), {t}_f)"]


def _ceil(t: str, x: str) -> list[str]:
    """As `_floor`, of a positive number."""
    return [f"{t}_c = tl.ceil({x})", f"{t} = tl.where({x} > 0, tl.maximum({t}_c, 1.0), {t}_c)"]


ATAN = (1.0, -0.333327978849411, 0.19974437355995178, -0.13851723074913025, 0.07985523343086243)
"""atan(t) / t in t^2 up to tan(pi / 8), the lowest power first; minimax, a relative error of 1.8e-8."""

ERFC = (
    0.28207531571388245, 0.28260183334350586, 0.24119694530963898, 0.21134938299655914, -0.049909867346286774,
    0.3160950243473053, -0.5241609215736389, 0.30417388677597046, -0.06341914087533951,
)  # fmt: skip
"""erfc(t) e^(t^2) / u in u = 1 / (1 + t / 2) from t = 0.4 on, the lowest power first; minimax, to 1.0e-8."""


def _atan(t: str, x: str) -> list[str]:
    """The tangent turned by 0, 45 or 90 degrees, so that its angle is at most 22.5, where the polynomial holds."""
    return [
        f"{t}_a = tl.abs({x})",
        f"{t}_n = tl.where({t}_a > 2.414213562, -1.0, tl.where({t}_a > 0.414213562, {t}_a - 1.0, {t}_a))",
        f"{t}_d = tl.where({t}_a > 2.414213562, {t}_a, tl.where({t}_a > 0.414213562, {t}_a + 1.0, 1.0))",
        f"{t}_k = tl.where({t}_a > 2.414213562, 1.570796327, tl.where({t}_a > 0.414213562, 0.7853981634, 0.0))",
        f"{t}_r = {t}_n / {t}_d",
        f"{t}_q = {t}_r * {t}_r",
        f"{t}_b = {t}_k + {t}_r * {polynomial(ATAN, f'{t}_q')}",
        f"{t} = {signed(f'{t}_b', x)}",
    ]


def _erfc(t: str, x: str) -> list[str]:
    """The square that e is raised to in two parts: what its rounding drops, w, makes a factor of 1 - w."""
    return [
        f"{t}_a = tl.minimum(tl.abs({x}), 16.0, propagate_nan=tl.PropagateNan.ALL)",
        f"{t}_u = 1.0 / (1.0 + 0.5 * {t}_a)",
        f"{t}_s = tl.fma(-{t}_a, {t}_a, 0.0)",
        f"{t}_w = tl.fma({t}_a, {t}_a, {t}_s)",
        *exp_lines(f"{t}_e", f"{t}_s"),
        f"{t}_b = {t}_u * ({t}_e - {t}_e * {t}_w) * {polynomial(ERFC, f'{t}_u')}",
        f"{t} = tl.where({t}_a < 0.5, 1.0 - tl.erf({x}), tl.where({x} < 0, 2.0 - {t}_b, {t}_b))",
    ]


def _from_slope(function: str, slope: float) -> Callable[[str, str], list[str]]:
    """An odd function that is a line near 0, where libdevice's takes numbers below 2^-126 for 0."""

    def lines(t: str, x: str) -> list[str]:
        line = x if slope == 1 else f"{x} * {slope}"
        return [f"{t} = tl.where(tl.abs({x}) < 0.0002, {line}, {function}({x}))"]

    return lines


def _expm1_double(t: str, x: str) -> list[str]:
    return [
        f"{t}_u = tl.exp({x})",
        f"{t}_l = tl.log(tl.where({t}_u == 0.0, 1.0, {t}_u))",
        f"{t}_k = ({t}_u - 1.0) * {x} / tl.where({t}_l == 0.0, 1.0, {t}_l)",
        f"{t} = tl.where({t}_u == 1.0, {x}, tl.where(tl.abs({x}) < 1.0, {t}_k, {t}_u - 1.0))",
    ]


def _tanh_double(t: str, x: str) -> list[str]:
    return [
        f"{t}_a = -2.0 * tl.abs({x})",
        *_expm1_double(f"{t}_m", f"{t}_a"),
        f"{t}_b = {t}_m / ({t}_m + 2.0)",
        f"{t} = {signed(f'tl.abs({t}_b)', x, True)}",
    ]


LONG: dict[str, Callable[[str, str], list[str]]] = {
    "tanh": _tanh, "expm1": _expm1, "log1p": _log1p, "log1p_unit": _log1p_unit, "atan": _atan, "erfc": _erfc,
    "exp_wide": exp_lines, "exp2": exp2_lines, "floor": _floor, "ceil": _ceil,
    "sin": _from_slope("tl.sin", 1), "erf": _from_slope("tl.erf", 1.1283791670955126),
}  # fmt: skip
"""Operators that take several lines: (result name, operand name) to lines."""

OF_TWO: dict[str, Callable[[str, str, str], list[str]]] = {"pow": pow_lines, "fmod": fmod_lines}
"""Operators of two operands that take several lines: (result name, operand names) to lines."""

DOUBLE: dict[str, Callable[[str, str], list[str]]] = {
    "sqrt": lambda t, x: [f"{t} = tl.sqrt({x})"],
    "rsqrt": lambda t, x: [f"{t} = 1.0 / tl.sqrt({x})"],
    "expm1": _expm1_double,
    "tanh": _tanh_double,
    "exp2": lambda t, x: [f"{t} = tl.exp2({x})"],
    "floor": lambda t, x: [f"{t} = tl.floor({x})"],
    "ceil": lambda t, x: [f"{t} = tl.ceil({x})"],
    "sin": lambda t, x: [f"{t} = tl.sin({x})"],
    "erf": lambda t, x: [f"{t} = tl.erf({x})"],
}
"""What is written otherwise in fp64, which has no `sqrt_rn` and cuts nothing off; series of fp32 are too short (Kahan's
expm1)."""


def write(
    op: str, target: str, args: list[str], dtype: str = "float32", fast: str = "", operands: str = ""
) -> list[str]:
    """Lines that leave `op(*args)`, of `dtype`, in `target`.

    Args:
        op: the operator.
        target: name of the result.
        args: names or literals.
        dtype: of the result.
        fast: special functions in fewer instructions (see `special`), accurate enough for numbers of this dtype;
            empty for Triton's own.
        operands: dtype of the operands where it is another one.
    """
    if op in BITWISE:
        return [f"{target} = {_bitwise(op, args, operands or dtype)}"]
    if dtype == "float64" and op in DOUBLE:
        return DOUBLE[op](target, args[0])
    if fast and dtype != "float64" and op in FAST:
        return TABLES[fast][op](target, args[0])
    if op in OF_TWO:
        return OF_TWO[op](target, *args)
    if op in LONG:
        return LONG[op](target, args[0])
    return [f"{target} = {SIMPLE[op].format(*args)}"]


def known(op: str) -> bool:
    """True where `write` can print `op`."""
    return op in SIMPLE or op in LONG or op in OF_TWO or op in BITWISE


TRITON_DTYPE = {
    "float32": "tl.float32", "float64": "tl.float64", "float16": "tl.float16", "bfloat16": "tl.bfloat16",
    "int64": "tl.int64", "int32": "tl.int32", "int16": "tl.int16", "int8": "tl.int8", "uint8": "tl.uint8",
    "bool": "tl.int1", "float8_e4m3fn": "tl.float8e4nv",
}  # fmt: skip
"""PyTorch dtype name to Triton's."""


__all__ = ["TRITON_DTYPE", "known", "signed", "write"]
