"""The remainder of a division, which is exact however large the quotient is.

Quotients below 2^24 take one division and one multiply-add: their integer part is right or one too large. Where a
tile has a larger one, significands are divided as integers, 39 bits of the quotient at a time. Deals in lines of
Triton. Knows nothing about rules.
"""

from __future__ import annotations

WHOLE = "16777216.0"
"""2^24: below it every integer is a number of fp32."""


def fmod_lines(t: str, x: str, y: str) -> list[str]:
    """What is left of x in `t` after the division by y that rounds towards 0; a zero has the sign +."""
    return [
        f"{t}_w = ({x} == {x}) | ({y} == {y})",  # of the shape of both; one of them may be a number
        f"{t}_x = tl.abs(tl.where({t}_w, {x}, {x}))",
        f"{t}_y = tl.abs(tl.where({t}_w, {y}, {y}))",
        f"{t}_q = tl.floor(tl.div_rn({t}_x, {t}_y))",
        f"{t}_r = tl.fma(-{t}_q, {t}_y, {t}_x)",
        f"{t}_r = tl.where({t}_r < 0.0, {t}_r + {t}_y, {t}_r)",
        f"{t}_l = ({t}_q >= {WHOLE}) & ({t}_x < float('inf')) & ({t}_y > 0.0)",
        f"if tl.max({t}_l.to(tl.int32) + tl.zeros([1, 1], tl.int32)) > 0:",
        *(f"    {line}" for line in _long_division(t)),
        f"{t}_r = tl.where(({t}_y == float('inf')) & ({t}_x < float('inf')), {t}_x, {t}_r)",
        f"{t} = tl.where(tl.where({t}_w, {x}, {x}) < 0, -{t}_r, {t}_r)",
    ]


def _long_division(t: str) -> list[str]:
    """The remainder as {t}_r where {t}_l."""
    lines = []
    for letter in "xy":  # the number is _m 2^(_e - 150)
        lines += [
            f"{t}_{letter}b = {t}_{letter}.to(tl.int32, bitcast=True)",
            f"{t}_{letter}e = tl.maximum({t}_{letter}b >> 23, 1)",
            f"{t}_{letter}m = tl.where({t}_{letter} < 1.1754943508222875e-38, {t}_{letter}b, "
            f"({t}_{letter}b & 8388607) | 8388608).to(tl.int64)",
        ]
    return [
        *lines,
        f"{t}_ym = tl.maximum({t}_ym, 1)",
        f"{t}_m = {t}_xm % {t}_ym",
        f"{t}_d = tl.maximum({t}_xe - {t}_ye, 0)",
        "for _ in range(8):",
        f"    {t}_m = ({t}_m << tl.minimum({t}_d, 39).to(tl.int64)) % {t}_ym",
        f"    {t}_d = tl.maximum({t}_d - 39, 0)",
        f"{t}_h = {t}_ye >> 1",  # two factors, since 2^-149 is no normal number
        f"{t}_f = (({t}_h + 52) << 23).to(tl.float32, bitcast=True)",
        f"{t}_g = (({t}_ye - {t}_h + 52) << 23).to(tl.float32, bitcast=True)",
        f"{t}_r = tl.where({t}_l, {t}_m.to(tl.float32) * {t}_f * {t}_g, {t}_r)",
    ]


__all__ = ["fmod_lines"]
