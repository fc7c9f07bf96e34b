"""Powers that are as exact as CUDA's own wherever they are finite, subnormal results too.

`tl.exp` is ``ex2.approx(x log2(e))``. That product rounds by half an ulp of itself, which is a relative error of up to
22 ulp (2.6e-6) of the result, and `tl.exp2` drops results below 2^-126. Here the power of 2 next to the result is
split off (Cody and Waite), so that ``ex2.approx`` sees at most 1/2: 3 ulp in all. Deals in lines of Triton. Knows
nothing about when they are worth it (`combined`).
"""

from __future__ import annotations

LOG2E = "1.4426950408889634"
LN2_HIGH, LN2_LOW = "0.693145751953125", "1.4286068203094173e-06"
"""ln 2 in two parts; the first has 15 bits, so that its product with a whole exponent is exact."""
ROUND = "12582912.0"
"""1.5 * 2^23: added to x, it leaves x rounded to an integer in the low bits."""


def one_beside(top: str) -> str:
    """A factor of what `top`, a maximum or minimum, is subtracted from, so that it is rounded (`nest.contracted`).

    It is 1 wherever that matters: an infinity has the same differences from half a number, and NaN has none. A test for
    NaN would not do: a compiler sees where a maximum cannot be NaN.
    """
    return f'tl.where({top} < float("inf"), 1.0, 0.5)'


def exp_lines(t: str, x: str) -> list[str]:
    """e^x in `t`."""
    return [
        *_split(t, f"{x} * {LOG2E}"),
        f"{t}_r = {x} - {t}_j * {LN2_HIGH} - {t}_j * {LN2_LOW}",
        f"{t} = tl.exp2({t}_r * {LOG2E}) * {t}_p",
    ]


def exp2_lines(t: str, x: str) -> list[str]:
    """2^x in `t`."""
    return [*_split(t, x), f"{t} = tl.exp2({x} - {t}_j) * {t}_p"]


def pow_lines(t: str, x: str, y: str) -> list[str]:
    """x^y in `t` for x > 0, both finite: 2^(y e) 2^(y log2 m) for x = m 2^e with m between sqrt(1/2) and sqrt(2).

    The product y e, which may be large, is taken in two parts; y log2 m rounds by less than what an ulp of x changes.
    """
    tiny = f"{t}_x < 1.1754943508222875e-38"
    return [
        f"{t}_w = ({x} == {x}) | ({y} == {y})",  # of the shape of both; one of them may be a number
        f"{t}_x = tl.where({t}_w, {x}, {x})",
        f"{t}_y = tl.where({t}_w, {y}, {y})",
        f"{t}_i = tl.where({tiny}, {t}_x * 16777216.0, {t}_x).to(tl.int32, bitcast=True)",
        f"{t}_e = ({t}_i - 1060439283) >> 23",
        f"{t}_f = {t}_y * tl.log2(({t}_i - ({t}_e << 23)).to(tl.float32, bitcast=True))",
        f"{t}_n = {t}_e.to(tl.float32) - tl.where({tiny}, 24.0, 0.0)",
        f"{t}_h = {t}_y * {t}_n",
        f"{t}_l = tl.where(tl.abs({t}_h) < 1.0e30, tl.fma({t}_y, {t}_n, -{t}_h), 0.0)",
        *_split(t, f"({t}_h + {t}_f)"),
        f"{t} = tl.exp2({t}_h - {t}_j + {t}_f + {t}_l) * {t}_p",
    ]


def _split(t: str, power: str) -> list[str]:
    """The integer next to `power` as {t}_j, and 2 to it as {t}_p; the nearest of -126 … 127, also of NaN."""
    return [
        f"{t}_k = tl.minimum(tl.maximum({power}, -126.0), 127.0) + {ROUND}",
        f"{t}_j = {t}_k - {ROUND}",
        f"{t}_p = (({t}_k.to(tl.int32, bitcast=True) << 23) + 1065353216).to(tl.float32, bitcast=True)",
    ]


__all__ = ["LOG2E", "ROUND", "exp2_lines", "exp_lines", "one_beside", "pow_lines"]
