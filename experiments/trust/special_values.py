"""Tensors full of values at which identities fail: zeros of both signs, infinities, NaN, ends of ranges, halves.

Deals in values by dtype, laid out so that every pair of them meets. Knows nothing about operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES = FLOATS + INTEGERS

COLUMNS = 37
"""Length of the rows that reductions take: no power of two, no multiple of a vector."""

_ORDINARY = (
    1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 7.0, 0.1, -0.3, 0.7, -0.85, 100.7, -88.9, 20.5, 1e-3, -11.25,
    0.4999, -0.4999, 1.5707964, 5e-8, 8.3, -130.7,
)  # fmt: skip


def special_floats(dtype: torch.dtype) -> Tensor:
    """Special and ordinary values of a floating dtype."""
    facts = torch.finfo(dtype)
    least = torch.finfo(dtype).smallest_normal * facts.eps
    edges = [
        0.0, -0.0, float("inf"), float("-inf"), float("nan"), least, -least, facts.smallest_normal / 2,
        facts.smallest_normal, -facts.smallest_normal, facts.max, facts.min, facts.max / 2, 1 / facts.eps + 1,
        0.5 - facts.eps / 4, -1 - facts.eps,
    ]  # fmt: skip
    return torch.tensor([*edges, *_ORDINARY], dtype=torch.float64).to(dtype)


def special_integers(dtype: torch.dtype) -> Tensor:
    """Ends of the range, small numbers of both signs, and odd ones."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    facts = torch.iinfo(dtype)
    values = [0, 1, 2, 3, 5, 7, 13, 63, 64, 100, facts.max, facts.max - 1, facts.min, facts.min + 1]
    if facts.min < 0:
        values += [-1, -2, -3, -7, -64, -100]
    return torch.tensor(values, dtype=torch.int64).to(dtype)


def operands(name: str, device: str = "cpu") -> dict[str, Tensor]:
    """Tensors of dtype `name`, by the letter that cases call them by.

    ``x`` and ``y`` hold every pair of special values, ``z`` the same values in another order, ``d`` is ``y`` where it
    may divide integers ``x``, ``s`` small values that any dtype holds, ``m`` booleans; ``r`` has rows for reductions,
    ``q`` rows that products take.
    """
    dtype = getattr(torch, name)
    values = special_floats(dtype) if dtype.is_floating_point else special_integers(dtype)
    n = len(values)
    x, y = values[:, None].expand(n, n).contiguous(), values[None, :].expand(n, n).contiguous()
    generator = torch.Generator().manual_seed(0)
    z = x.flatten()[torch.randperm(n * n, generator=generator)].reshape(n, n)
    mask = torch.rand(n, n, generator=generator) < 0.5
    small = torch.randint(-8, 9, (n, n), generator=generator).double() / 2
    small = small.clamp(min=0) if name in ("uint8", "bool") else small
    small = torch.where(small == 0, torch.where(mask, -0.0, 0.0).double(), small)
    found = {"x": x, "y": y, "z": z, "m": mask, "s": small.to(dtype), "d": _divisors(x, y)}
    found |= {"r": rows(dtype, generator), "q": product_rows(dtype, generator)}
    return {letter: t.to(device) for letter, t in found.items()}


def _divisors(x: Tensor, y: Tensor) -> Tensor:
    """`y` without zeros of integers, by which PyTorch does not divide, and without overflow of the least integer."""
    if x.is_floating_point() or x.dtype is torch.bool:
        return y
    y = torch.where(y == 0, torch.full_like(y, 3), y)
    return torch.where((x == torch.iinfo(x.dtype).min) & (y == -1), torch.full_like(y, -2), y) if x.min() < 0 else y


def rows(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows with ties, zeros of one sign, NaN, infinities, all of one kind, huge and subnormal values."""
    if not dtype.is_floating_point:
        low, high = (0, 2) if dtype is torch.bool else (max(torch.iinfo(dtype).min, -9), 10)
        found = torch.randint(low, high, (24, COLUMNS), generator=generator).to(dtype)
        if dtype is not torch.bool:
            found[0], found[1, ::2], found[2, 5] = (
                torch.iinfo(dtype).max,
                torch.iinfo(dtype).min,
                torch.iinfo(dtype).min,
            )
        return found
    facts, inf, nan = torch.finfo(dtype), float("inf"), float("nan")
    found = torch.randn(24, COLUMNS, generator=generator, dtype=torch.float64)
    found[1] = found[1].round()
    for row, value in enumerate((0.0, -0.0, inf, -inf, nan, facts.max**0.5 / 64, facts.smallest_normal * facts.eps), 2):
        found[row] = value
    found[9, 5] = nan
    found[10, COLUMNS - 1] = nan
    found[11, 3], found[11, 20] = inf, nan
    found[12, 7], found[12, 30] = nan, inf
    found[13, 3], found[13, 20] = inf, -inf
    found[14, 11] = inf
    found[15, 11] = -inf
    found[16, :] = -inf
    found[16, 4] = 1.0
    found[17] = found[17] * 1e-3 + 100
    found[18, ::3] = 0.0
    found[18, 1::3] = -0.0
    found[18, 2::3] = -1.0
    found[19] = 3.0
    found[20] = found[20] * facts.smallest_normal
    found[21] = found[21].abs() * facts.max / 256
    found[22, 1::2] = -found[22, ::2][:-1]
    found[23, 2], found[23, 9] = nan, nan
    return found.to(dtype)


def product_rows(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A square matrix whose rows are ordinary but for an infinity, a NaN and a huge value beside zeros."""
    if not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype is torch.bool else 5, (COLUMNS, COLUMNS), generator=generator).to(dtype)
    found = torch.randn(COLUMNS, COLUMNS, generator=generator)
    found[1, 3], found[2, 5], found[4] = float("inf"), float("nan"), 0.0
    return found.to(dtype)


__all__ = ["DTYPES", "FLOATS", "INTEGERS", "operands", "special_floats", "special_integers"]
