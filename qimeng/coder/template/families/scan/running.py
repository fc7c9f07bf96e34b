"""Scans as Triton: the operator of each kind, a tile's scan, the value carried from tile to tile, totals of a row.

Inside a tile a scan is a tree (`tl.associative_scan`), so that its rounding grows with the logarithm of the tile's
length. Carried values stay in the dtype that is computed in. Deals in lines of Triton. Knows nothing about loads, loops
or launches.
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass

from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.scans import UNORDERED, neutral
from qimeng.coder.template.triton.emitter import literal
from qimeng.coder.template.triton.ops import TRITON_DTYPE

_BEST = """    take = {nan}((b >= a) & (j >= 0))
    return tl.where(take, b, a), tl.where(take, j, i)
"""
_SUMEXP = """    m = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    p = tl.where(a == m, s, s * tl.exp(a - m))
    q = tl.where(b == m, t, t * tl.exp(b - m))
    return m, p + q
"""
_PRODUCT = """    p = a * b
    over = tl.abs(p) >= 2.0
    more = tl.where(tl.abs(a) < float("inf"), j + over.to(tl.int32), 0)
    return tl.where(over, p * 0.5, p), i + more


@triton.jit
def {function}_apart(x):
    y = tl.where(tl.abs(x) < 1.1754943508222875e-38, x * 16777216.0, x)
    i = y.to(tl.int32, bitcast=True)
    e = (i >> 23) & 255
    plain = (y != 0) & (e < 255)
    e = e - tl.where(tl.abs(x) < 1.1754943508222875e-38, 151, 127)
    m = ((i & -2139095041) | 1065353216).to(tl.float32, bitcast=True)
    return tl.where(plain, m, y), tl.where(plain, e, 0)


@triton.jit
def {function}_whole(m, e):
    m = tl.where((tl.abs(m) == float("inf")) & (e < -150), float("nan"), m)
    e = tl.minimum(tl.maximum(e, -160), 130)
    k = tl.minimum(tl.maximum(e, -126), 127)
    y = m * ((k + 127) << 23).to(tl.float32, bitcast=True)
    return y * ((e - k + 127) << 23).to(tl.float32, bitcast=True)
"""
"""Digits are of size 1 to 2, or 0, infinite or no number as they are; a power of two is made of its bits. An
infinite product keeps the power of the numbers before: if fp32 takes these for 0, it is no number, as in PyTorch."""


@dataclass(frozen=True)
class Running:
    """One scan's variables.

    Attributes:
        scan: the expression.
        name: prefix of its variables.
        function: name of its operator's function.
        single: a program has one row, and what is carried are scalars.
        backwards: tiles hold the axis from its end.
    """

    scan: Expr
    name: str
    function: str
    single: bool
    backwards: bool = False

    @property
    def kind(self) -> str:
        """Its kind (`nest.scans.PARTS`)."""
        return str(self.scan.param.kind)

    @property
    def turned(self) -> str:
        """The argument by which a tile is scanned from its end."""
        return ", reverse=True" if self.scan.param.reverse and not self.backwards else ""

    @property
    def unordered(self) -> bool:
        """Whether operands may change places."""
        return self.kind in UNORDERED

    def dtypes(self) -> list[str]:
        """The dtype of each part."""
        return [compute_dtype(a.dtype) for a in self.scan.operands()]

    def variables(self, role: str) -> list[str]:
        """The variable of each part in a role: ``"x"`` (operand), ``"c"`` (carried), ``"s"`` (result)."""
        return [f"{self.name}_{part}_{role}" for part in self.scan.param.parts]

    def neutrals(self) -> list[str]:
        """What leaves any operand as it is, as text."""
        parts = zip(self.scan.param.parts, self.dtypes(), strict=True)
        return [literal(neutral(self.kind, part, dtype), dtype) for part, dtype in parts]

    def start(self) -> list[str]:
        """Lines that make the carried value neutral."""
        shape = "()" if self.single else "(PB, 1)"
        parts = zip(self.variables("c"), self.neutrals(), self.dtypes(), strict=True)
        return [f"{c} = tl.full({shape}, {n}, {TRITON_DTYPE[d]})" for c, n, d in parts]

    def take(self, values: list[str], mask: str) -> list[str]:
        """Lines that make the operands whole tiles, neutral where `mask` does not hold."""
        lines = []
        parts = zip(self.variables("x"), values, self.dtypes(), self.neutrals(), strict=True)
        for x, value, dtype, none in parts:
            variable = (value.isidentifier() and not keyword.iskeyword(value)) or "tl." in value
            tile = f"tl.broadcast_to({value}, [PB, RB])" if variable else f"tl.full([PB, RB], {value}, {dtype})"
            tile = tile.replace(f", {dtype})", f", {TRITON_DTYPE[dtype]})")
            lines += [f"{x} = {tile}", *([f"{x} = tl.where({mask}, {x}, {none})"] if mask else [])]
        if self.kind == "product":
            lines.append(f"{self._all('x')} = {self.function}_apart({self.variables('x')[0]})")
        return lines

    def value(self) -> tuple[str, list[str]]:
        """The variable of a tile's results, and the lines that make it of what is kept."""
        if self.kind != "product":
            return self.variables("s")[0], []
        return f"{self.name}_value", [f"{self.name}_value = {self.function}_whole({self._all('s')})"]

    def run(self) -> list[str]:
        """Lines that scan the operands' tiles."""
        inside = self.variables("x")
        taken = inside[0] if len(inside) == 1 else f"({', '.join(inside)})"
        return [f"{self._all('s')} = tl.associative_scan({taken}, 1, {self.function}{self.turned})"]

    def resume(self) -> list[str]:
        """Lines that put the carried value before a tile's results."""
        return [f"{self._all('s')} = {self.function}({self._all('c')}, {self._all('s')})"]

    def carry(self) -> list[str]:
        """Lines that carry a tile's last result along."""
        last = "1 - RB" if self.backwards else "0" if self.turned else "RB - 1"
        return [self._folded(c, f"tl.where(r_lane == {last}, {s}, 0)") for c, s in self._pairs("c", "s")]

    def lanes(self) -> list[str]:
        """Lines that make running totals, one a lane, neutral (`unordered` kinds)."""
        parts = zip(self.variables("l"), self.neutrals(), self.dtypes(), strict=True)
        return [f"{v} = tl.full((PB, RB), {n}, {TRITON_DTYPE[d]})" for v, n, d in parts]

    def gather(self) -> list[str]:
        """Lines that add the operands' tiles to the lanes' totals."""
        return [f"{self._all('l')} = {self.function}({self._all('l')}, {self._all('x')})"]

    def total(self, role: str, last: str = "") -> list[str]:
        """Lines that combine the tiles in `role` along their rows to the carried value; `last` is the last slot."""
        tiles = self.variables(role)
        taken = tiles[0] if len(tiles) == 1 else f"({', '.join(tiles)})"
        if self.unordered:
            lines = [f"{self._all('c')} = tl.reduce({taken}, {'None' if self.single else 1}, {self.function})"]
            return lines if self.single else [*lines, *(f"{c} = {c}[:, None]" for c in self.variables("c"))]
        lines = [f"{self._all(role)} = tl.associative_scan({taken}, 1, {self.function}{self.turned})"]
        return [*lines, *(self._folded(c, f"tl.where(slots == {last}, {x}, 0)") for c, x in self._pairs("c", role))]

    def source(self) -> str:
        """The operator's function."""
        floating = is_float(self.dtypes()[0])
        nan = "(b != b) | " if floating else ""
        best = _BEST.format(nan=nan)
        bodies = {
            "sum": ("a, b", "    return a + b\n"),
            "prod": ("a, b", "    return a * b\n"),
            "product": ("a, i, b, j", _PRODUCT.format(function=self.function)),
            "max": ("a, b", f"    return tl.where({nan}(b >= a), b, a)\n"),  # of two zeros the later one
            "min": ("a, b", f"    return tl.where({nan}(b <= a), b, a)\n"),
            "argmax": ("a, i, b, j", best),
            "argmin": ("a, i, b, j", best.replace("b >= a", "b <= a")),
            "sumexp": ("a, s, b, t", _SUMEXP),
            "linear": ("a, x, b, y", "    return a * b, b * x + y\n"),
        }
        operands, body = bodies[self.kind]
        return f"\n@triton.jit\ndef {self.function}({operands}):\n{body}"

    def _all(self, role: str) -> str:
        return ", ".join(self.variables(role))

    def _pairs(self, left: str, right: str) -> list[tuple[str, str]]:
        return list(zip(self.variables(left), self.variables(right), strict=True))

    def _folded(self, target: str, tile: str) -> str:
        """`target` as the sum of a tile's row, all but one element of which are 0."""
        return f"{target} = tl.sum({tile})" if self.single else f"{target} = tl.sum({tile}, axis=1)[:, None]"


__all__ = ["Running"]
