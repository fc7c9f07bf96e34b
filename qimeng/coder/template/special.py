"""Special functions by the GPU's approximate units, in forms that stay accurate where those are not.

Deals in lines of Triton, as `qimeng.coder.template.ops`. Knows nothing about when they are worth it; whether the result
is within the error budget is for the evaluator to say.

What the units promise (PTX ISA 8.7, 9.7.3 "Floating Point Instructions", fp32): ``ex2.approx`` and ``rsqrt.approx`` a
relative error of 2^-22 and 2^-22.9, ``sqrt.approx`` of 2^-23, ``lg2.approx`` an absolute error of 2^-22 for operands in
(0.5, 2) and a relative one of 2^-22 outside, ``tanh.approx`` a relative error of 2^-11. Hence, in ulp of fp32 (2^-23;
the budget's floor is 16):

- ``log`` has no bound near 1, where the logarithm goes to 0: there a series in x - 1, which is exact; beyond |x - 1| of
  0.085, 2^-22 ln 2 is 17 ulp of the value and half of that by the judge's measure, |y - r| / (|r| + rms).
- ``tanh`` is 1 - 2 / (1 + e^2|x|), which cancels near 0: below 0.3 a series, above it the units leave 6 ulp.
- 1 / x for x > 0 is the square of rsqrt.approx: 2^-21.9, 2 ulp; of infinity 0.
- ``exp`` is 2^(x log2(e)), as in Triton's own: the product rounds by less than what an ulp of x
  changes.
- Subnormal results of ex2 are 0; subnormal operands of lg2 are handled.

The forms for half types use less: 2^-11 is half an ulp of fp16, and 1 + x loses nothing that it could show.
"""

from __future__ import annotations

from collections.abc import Callable

Writer = Callable[[str, str], list[str]]
"""(result name, operand name) to lines."""

LOG2E, LN2 = "1.4426950408889634", "0.6931471805599453"


def tanh_series(t: str, x: str) -> list[str]:
    """tanh(x) near 0 in ``{t}_s``, for the accurate and the fast form alike."""
    return [
        f"{t}_q = {x} * {x}",
        f"{t}_h = 0.1333333333 + {t}_q * (-0.0539682540 + {t}_q * 0.0218694885)",
        f"{t}_s = {x} * (1.0 + {t}_q * (-0.3333333333 + {t}_q * {t}_h))",
    ]


def expm1_lines(t: str, x: str, exponential: str) -> list[str]:
    """exp(x) - 1 in `t`: a series near 0, elsewhere from the text of e^x."""
    return [
        f"{t}_h = 0.0416666667 + {x} * (0.0083333333 + {x} * 0.0013888889)",
        f"{t}_s = {x} * (1.0 + {x} * (0.5 + {x} * (0.1666666667 + {x} * {t}_h)))",
        f"{t} = tl.where(tl.abs({x}) < 0.25, {t}_s, {exponential} - 1.0)",
    ]


def _unit(instruction: str, x: str) -> str:
    """A call of one of the units that Triton has no name for."""
    text = f'"{instruction} $0, $1;", "=f,f", [{x}], dtype=tl.float32, is_pure=True, pack=1'
    return f"tl.inline_asm_elementwise({text})"


def _lg2(x: str) -> str:
    return _unit("lg2.approx.f32", x)


def _series(t: str, x: str) -> list[str]:
    """log(1 + x) for |x| < 0.085 in `t`: minimax, a relative error of 1e-7."""
    return [f"{t} = {x} + {x} * {x} * (-0.5 + {x} * (0.33332941 + {x} * (-0.25105172 + {x} * 0.20158125)))"]


def _log(t: str, x: str, scale: str = LN2, unit: str = "") -> list[str]:
    return [
        f"{t}_d = {x} - 1.0",
        *_series(f"{t}_s", f"{t}_d"),
        f"{t} = tl.where(tl.abs({t}_d) < 0.085, {t}_s{unit}, {_lg2(x)}{f' * {scale}' if scale else ''})",
    ]


def _log1p(t: str, x: str) -> list[str]:
    return [
        f"{t}_u = 1.0 + {x}",
        *_series(f"{t}_s", x),
        f"{t} = tl.where(tl.abs({x}) < 0.085, {t}_s, {_lg2(f'{t}_u')} * {LN2})",
    ]


def _inverse(t: str, x: str) -> list[str]:
    return [f"{t}_r = tl.rsqrt({x})", f"{t} = {t}_r * {t}_r"]


def _sigmoid(t: str, x: str) -> list[str]:
    return [f"{t}_u = 1.0 + tl.exp2({x} * -{LOG2E})", *_inverse(t, f"{t}_u")]


def _tanh(t: str, x: str) -> list[str]:
    return [
        f"{t}_u = 1.0 + tl.exp2(tl.abs({x}) * {2 * float(LOG2E)!r})",
        *_inverse(f"{t}_i", f"{t}_u"),
        f"{t}_b = 1.0 - 2.0 * {t}_i",
        *tanh_series(t, x),
        f"{t} = tl.where(tl.abs({x}) < 0.3, {t}_s, tl.where({x} < 0, -{t}_b, {t}_b))",
    ]


def _expm1(t: str, x: str) -> list[str]:
    return expm1_lines(t, x, f"tl.exp2({x} * {LOG2E})")


FAST: dict[str, Writer] = {
    "exp": lambda t, x: [f"{t} = tl.exp2({x} * {LOG2E})"],
    "expm1": _expm1,
    "log": _log,
    "log2": lambda t, x: _log(t, x, "", f" * {LOG2E}"),
    "log1p": _log1p,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "inverse": _inverse,
    "sqrt": lambda t, x: [f"{t} = tl.sqrt({x})"],
    "rsqrt": lambda t, x: [f"{t} = tl.rsqrt({x})"],
}
"""Functions of fp32 operands."""

FAST_HALF: dict[str, Writer] = FAST | {
    "log": lambda t, x: [f"{t} = {_lg2(x)} * {LN2}"],
    "log2": lambda t, x: [f"{t} = {_lg2(x)}"],
    "log1p": lambda t, x: [f"{t} = tl.where(tl.abs({x}) < 0.0005, {x}, {_lg2(f'(1.0 + {x})')} * {LN2})"],
    "tanh": lambda t, x: [f"{t} = {_unit('tanh.approx.f32', x)}"],
}
"""Functions where every operand and result in memory is of a half type."""

SPECIAL = frozenset(FAST) - {"inverse"}
"""Functions that there is a faster form of."""

__all__ = ["FAST", "FAST_HALF", "SPECIAL", "Writer", "expm1_lines", "tanh_series"]
