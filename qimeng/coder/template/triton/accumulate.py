"""Reductions as running values: how each kind starts, takes a tile, collapses its lanes and merges partial results.

Every lane of the tile keeps its own running value, so that the loop needs no communication; lanes are combined once at
the end, and programs that share a row combine their partial results the same way. Variances use sums shifted by each
lane's first element and Chan's formula (Chan, Golub, LeVeque 1983); sum-of-exponentials keeps a running maximum
(Milakov and Gimelshein 2018; relative to the largest finite number where it is infinite, so that the sum is NaN only
where an element is), whose terms are powers of two: what `tl.exp2` drops, below 2^-126, is nothing beside the
largest term, which is 1. Deals in lines of Triton. Knows nothing about loads, loops or launches.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, replace

from qimeng.coder.template.triton.exponentials import LOG2E, one_beside

HIGHEST = {"tl.float64": "1.7976931348623157e308"}
"""Largest finite number by dtype; of fp32, in which half types are computed, where there is no entry."""


_OVER_LANES = re.compile(r"tl\.(?:sum|max|min)\((.*?), axis=1\)\[:, None\]|tl\.reduce\((.*?), 1, _product\)\[:, None\]")
"""A reduction over the lanes of a tile, as text."""


def _exp(x: str) -> str:
    """e^x as text, for the text of x."""
    return f"tl.exp2(({x}) * {LOG2E})"


@dataclass(frozen=True)
class Accumulator:
    """The running values of one reduction.

    Attributes:
        kind: sum, prod, max, min, argmax, argmin, sumexp or welford.
        name: prefix of its variables.
        dtype: Triton dtype of the running value (``"tl.float32"``).
        floating: whether it is a float (NaN then propagates through max and min).
        single: a program has one row, and results are scalars: Triton would give [1, 1] tensors a layout of their own
            and convert whole tiles to it where they are broadcast.
        lone: each row has one lane, whose running value is the result.
        product: a compiler may make one multiply-add of an element and what is subtracted (`nest.contracted`).
    """

    kind: str
    name: str
    dtype: str = "tl.float32"
    floating: bool = True
    single: bool = False
    lone: bool = False
    product: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the [PB, 1] results (scalars for a single row), in the order in which a workspace holds them."""
        n = self.name
        return {
            "sumexp": (f"{n}_max", f"{n}_sum"),
            "welford": (f"{n}_mean", f"{n}_m2", f"{n}_count", f"{n}_low"),
            "argmax": (f"{n}_best", f"{n}_at"),
            "argmin": (f"{n}_best", f"{n}_at"),
        }.get(self.kind, (n,))

    @property
    def result(self) -> str:
        """Name of the result of a reduction with a single one."""
        return self.parts[-1] if self.kind in ("argmax", "argmin") else self.parts[0]

    @property
    def neutral(self) -> str:
        """What a position outside the tensor counts as."""
        low, high = (
            ('float("-inf")', 'float("inf")') if self.floating else ("-9223372036854775808", "9223372036854775807")
        )
        if not self.floating and self.dtype == "tl.int32":
            low, high = "-2147483648", "2147483647"
        return {
            "sum": "0",
            "prod": "1",
            "max": low,
            "argmax": low,
            "min": high,
            "argmin": high,
            "sumexp": low,
            "welford": "0",
        }[self.kind]

    @property
    def highest(self) -> str:
        """The largest finite number; as a tensor, since Triton takes a plain number for fp32."""
        number = HIGHEST.get(self.dtype, "3.4028234663852886e38")
        return f"tl.full([1, 1], {number}, {self.dtype})" if self.dtype == "tl.float64" else number

    @property
    def lowest(self) -> str:
        """The smallest finite number."""
        return self.highest.replace("1.79", "-1.79").replace("3.40", "-3.40")

    def start(self) -> list[str]:
        """Lines before the loop."""
        n, zeros = self.name, f"tl.zeros([PB, RB], {self.dtype})"
        if self.kind == "welford":
            return [
                f"{n}_c = {zeros}",
                f"{n}_s = {zeros}",
                f"{n}_q = {zeros}",
                f"{n}_n = {zeros}",
            ]
        if self.kind == "sumexp":
            return [f"{n}_m = tl.zeros([PB, RB], {self.dtype}) + {self.lowest}", f"{n}_s = {zeros}"]
        full = f"tl.full([PB, RB], {self.neutral}, {self.dtype})"
        if self.kind in ("argmax", "argmin"):
            return [f"{n}_v = {full}", f"{n}_i = tl.zeros([PB, RB], tl.int64)"]
        return [f"{n}_a = {full}"]

    def take(self, x: str, masked: str, index: str) -> list[str]:
        """Lines in the loop: take the tile `x`; `masked` is the mask of the r side or empty; `index` positions."""
        n = self.name
        lines = [f"{n}_x = {self._tile(x)}"]
        if self.kind == "welford":
            valid = f"tl.broadcast_to({masked}, [PB, RB])" if masked else ""
            first = f"({n}_n == 0.0)" + (f" & {valid}" if valid else "")
            lines.append(f"{n}_c = tl.where({first}, {n}_x, {n}_c)")
            lines.append(f"{n}_d = {n}_x - {n}_c" if not valid else f"{n}_d = tl.where({valid}, {n}_x - {n}_c, 0.0)")
            lines += [f"{n}_s += {n}_d", f"{n}_q += {n}_d * {n}_d"]
            lines.append(f"{n}_n += 1.0" if not valid else f"{n}_n += {valid}.to({self.dtype})")
            return lines
        if masked:
            lines.append(f"{n}_x = tl.where({masked}, {n}_x, {self.neutral})")
        if self.kind == "sumexp" and self.product:  # the smaller one is no product
            return [
                *lines,
                f"{n}_t = tl.maximum({n}_m, {n}_x)",
                f"{n}_l = tl.minimum({n}_m, {n}_x, propagate_nan=tl.PropagateNan.ALL)",
                f"{n}_e = {_exp(f'-tl.abs({n}_l - tl.minimum({n}_t, {self.highest}))')}",
                f"{n}_s = tl.where({n}_x > {n}_m, {n}_s * {n}_e + 1.0, {n}_s + {n}_e)",
                f"{n}_m = {n}_t",
            ]
        if self.kind == "sumexp":
            return [
                *lines,
                f"{n}_e = {_exp(f'-tl.abs({n}_x - tl.minimum({n}_m, {self.highest}))')}",
                f"{n}_s = tl.where({n}_x > {n}_m, {n}_s * {n}_e + 1.0, {n}_s + {n}_e)",
                f"{n}_m = tl.maximum({n}_m, {n}_x)",
            ]
        if self.kind in ("argmax", "argmin"):
            sign = ">" if self.kind == "argmax" else "<"
            nan = f" | (({n}_x != {n}_x) & ({n}_v == {n}_v))" if self.floating else ""
            return [
                *lines,
                f"{n}_w = ({n}_x {sign} {n}_v){nan}",
                f"{n}_v = tl.where({n}_w, {n}_x, {n}_v)",
                f"{n}_i = tl.where({n}_w, tl.broadcast_to({index}, [PB, RB]).to(tl.int64), {n}_i)",
            ]
        nan = ", propagate_nan=tl.PropagateNan.ALL" if self.floating else ""
        step = {
            "sum": f"{n}_a + {n}_x",
            "prod": f"{n}_a * {n}_x",
            "max": f"tl.maximum({n}_a, {n}_x{nan})",
            "min": f"tl.minimum({n}_a, {n}_x{nan})",
        }
        return [*lines, f"{n}_a = {step[self.kind]}"]

    def collapse(self) -> list[str]:
        """Lines after the loop: the lanes become [PB, 1] results named `parts`."""
        if not self.lone:
            return self._shaped(self._collapse())
        return [_OVER_LANES.sub(lambda m: f"({m[1] or m[2]})", line) for line in self._collapse()]

    def merge(self, parts: list[str], mask: str) -> list[str]:
        """Lines that combine partial results, [PB, SP] tensors named `parts`, into the names of `self.parts`."""
        return self._shaped(replace(self, lone=False)._merge(parts, mask))

    def whole(self, x: str, masked: str, count: str, index: str) -> list[str]:
        """Lines that reduce a tile at once into `parts`; `count` is how many of its positions are inside, as text."""
        return self._shaped(self._whole(x, masked, count, index))

    def _shaped(self, lines: list[str]) -> list[str]:
        """`lines` with reductions over the whole tile where it is a single row."""
        if not self.single:
            return lines
        return [
            line.replace(", axis=1)[:, None]", ")").replace(", 1, _product)[:, None]", ", None, _product)")
            for line in lines
        ]

    def _collapse(self) -> list[str]:
        n = self.name
        if self.kind == "welford":
            return [
                f"{n}_count = tl.sum({n}_n, axis=1)[:, None]",
                f"{n}_i = 1.0 / tl.maximum({n}_n, 1.0)",
                f"{n}_l = {n}_c + {n}_s * {n}_i",
                *_mean_of(n, f"{n}_l", f"{n}_n"),
                f"{n}_g = {n}_c - {n}_mean + {n}_s * {n}_i",  # the lane's mean itself is rounded
                f"{n}_h = {n}_q - {n}_s * {n}_s * {n}_i + {n}_n * {n}_g * {n}_g",
                f"{n}_o = ({n}_q == float('inf')) & (tl.abs({n}_s) < float('inf'))",  # squares of finite numbers
                f"{n}_m2 = tl.sum(tl.where({n}_o, {n}_q, {n}_h), axis=1)[:, None]",
                *corrected(n, f"tl.sum({n}_n * {n}_g, axis=1)[:, None]"),
            ]
        if self.kind == "sumexp":
            return [
                f"{n}_max = tl.max({n}_m, axis=1)[:, None]",
                f"{n}_sum = tl.sum({n}_s * {self._falling(f'{n}_m')}, axis=1)[:, None]",
            ]
        if self.kind in ("argmax", "argmin"):
            return self._pick(f"{n}_v", f"{n}_i")
        return self._fold(f"{n}_a")

    def _merge(self, parts: list[str], mask: str) -> list[str]:
        n = self.name
        if self.kind == "welford":
            mean, m2, count, low = parts
            return [
                f"{n}_count = tl.sum({count}, axis=1)[:, None]",
                *_mean_of(n, mean, count),
                f"{n}_g = {mean} - {n}_mean + {low}",
                f"{n}_m2 = tl.sum({m2} + {count} * {n}_g * {n}_g, axis=1)[:, None]",
                *corrected(n, f"tl.sum({count} * {n}_g, axis=1)[:, None]"),
            ]
        if self.kind == "sumexp":
            top, total = parts
            return [
                f"{n}_t = tl.where({mask}, {top}, {self.lowest})",
                f"{n}_max = tl.max({n}_t, axis=1)[:, None]",
                f"{n}_sum = tl.sum(tl.where({mask}, {total} * {self._falling(f'{n}_t')}, 0.0), axis=1)[:, None]",
            ]
        if self.kind in ("argmax", "argmin"):
            return [f"{n}_t = tl.where({mask}, {parts[0]}, {self.neutral})", *self._pick(f"{n}_t", parts[1])]
        return [f"{n}_t = tl.where({mask}, {parts[0]}, {self.neutral})", *self._fold(f"{n}_t")]

    def _whole(self, x: str, masked: str, count: str, index: str) -> list[str]:
        n = self.name
        if self.kind == "welford":
            inside = f"tl.where({masked}, {n}_x, 0.0)" if masked else f"{n}_x"
            return [
                f"{n}_x = {self._tile(x)}",
                f"{n}_count = {count} * 1.0" if self.single else f"{n}_count = tl.full([PB, 1], {count}, {self.dtype})",
                f"{n}_w = 1.0 / RB",  # a power of two, so that sums of large numbers do not overflow
                f"{n}_mean = tl.sum({inside} * {n}_w, axis=1)[:, None] / tl.maximum({n}_count * {n}_w, {n}_w)",
                f"{n}_d = {n}_x - {n}_mean" if not masked else f"{n}_d = tl.where({masked}, {n}_x - {n}_mean, 0.0)",
                f"{n}_m2 = tl.sum({n}_d * {n}_d, axis=1)[:, None]",
                *corrected(n, f"tl.sum({n}_d, axis=1)[:, None]"),
            ]
        fill = f"tl.where({masked}, {n}_x, {self.neutral})" if masked else f"{n}_x"
        lines = [f"{n}_x = {self._tile(x)}", f"{n}_x = {fill}"]
        if self.kind == "sumexp":
            x = f"{n}_x * {n}_one" if self.product else f"{n}_x"
            return [
                *lines,
                f"{n}_max = tl.maximum(tl.max({n}_x, axis=1)[:, None], {self.lowest})",  # finite where all are -inf
                *([f"{n}_one = {one_beside(f'{n}_max')}"] if self.product else []),
                f"{n}_sum = tl.sum({_exp(f'{x} - tl.minimum({n}_max, {self.highest})')}, axis=1)[:, None]",
            ]
        if self.kind in ("argmax", "argmin"):
            return [*lines, *self._pick(f"{n}_x", f"tl.broadcast_to({index}, [PB, RB]).to(tl.int64)")]
        return [*lines, *self._fold(f"{n}_x")]

    def _falling(self, x: str) -> str:
        """e^(x - max), where an infinite maximum counts as the largest number: inf - inf would be NaN."""
        return _exp(f"tl.minimum({x}, {self.highest}) - tl.minimum({self.name}_max, {self.highest})")

    def _tile(self, x: str) -> str:
        """The value `x`, a variable or a number, as a whole tile."""
        variable = (x.isidentifier() and not keyword.iskeyword(x)) or "tl." in x
        return f"tl.broadcast_to({x}, [PB, RB])" if variable else f"tl.full([PB, RB], {x}, {self.dtype})"

    def _fold(self, lanes: str) -> list[str]:
        n = self.name
        if self.kind == "sum":
            return [f"{n} = tl.sum({lanes}, axis=1)[:, None]"]
        if self.kind == "prod":
            return [f"{n} = tl.reduce({lanes}, 1, _product)[:, None]"]
        fold = f"tl.{self.kind}({lanes}, axis=1)[:, None]"
        if not self.floating or self.lone:
            return [f"{n} = {fold}"]
        return [f"{n} = tl.where(tl.max(({lanes} != {lanes}).to(tl.int32), axis=1)[:, None] > 0, float('nan'), {fold})"]

    def _pick(self, values: str, positions: str) -> list[str]:
        """The first of the best positions; NaN is better than any number, as in PyTorch."""
        n, fold = self.name, "max" if self.kind == "argmax" else "min"
        lines = [f"{n}_best = tl.{fold}({values}, axis=1)[:, None]", f"{n}_hit = {values} == {n}_best"]
        if self.floating:
            lines += [
                f"{n}_odd = {values} != {values}",
                f"{n}_any = tl.max({n}_odd.to(tl.int32), axis=1)[:, None] > 0",
                f"{n}_best = tl.where({n}_any, float('nan'), {n}_best)",
                f"{n}_hit = tl.where({n}_any, {n}_odd, {n}_hit)",
            ]
        return [*lines, f"{n}_at = tl.min(tl.where({n}_hit, {positions}, 9223372036854775807), axis=1)[:, None]"]


def _mean_of(n: str, means: str, counts: str) -> list[str]:
    """Lines that make `<n>_mean` of the lanes' means and counts, and of `<n>_count`.

    Counts are scaled by a power of two, which rounds nothing, so that a sum of large numbers does not overflow.
    """
    return [
        f"{n}_w = tl.exp2(-tl.ceil(tl.log2(tl.maximum({n}_count, 1.0))))",
        f"{n}_mean = tl.sum({means} * ({counts} * {n}_w), axis=1)[:, None] / tl.maximum({n}_count * {n}_w, {n}_w)",
    ]


def corrected(n: str, total: str) -> list[str]:
    """Lines that make `<n>_mean` and `<n>_m2` more exact; `<n>_low` is what the mean's rounding drops.

    A sum of nearly equal numbers is rounded in the same direction again and again, which shows where they hardly
    differ. Deviations from the mean are small, and their sum says how far it is off (T. F. Chan, G. H. Golub,
    R. J. LeVeque, Algorithms for computing the sample variance, The American Statistician 37(3), 1983).

    Args:
        n: beginning of the names.
        total: text of the sum of all deviations from `<n>_mean`.
    """
    return [
        f"{n}_e = {total} / tl.maximum({n}_count, 1.0)",
        f"{n}_e = tl.where(tl.abs({n}_e) < float('inf'), {n}_e, 0.0)",
        f"{n}_low = {n}_mean",
        f"{n}_mean = {n}_mean + {n}_e",
        f"{n}_low = {n}_e - ({n}_mean - {n}_low)",
        f"{n}_e = {n}_count * {n}_e * {n}_e",
        f"{n}_e = tl.where({n}_e < float('inf'), {n}_e, 0.0)",  # squares of finite numbers
        f"{n}_m2 = tl.where({n}_m2 <= {n}_e, 0.0, {n}_m2 - {n}_e)",
    ]


__all__ = ["Accumulator", "corrected"]
