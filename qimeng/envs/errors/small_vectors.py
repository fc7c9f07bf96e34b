"""The errors of many small vectors at once, such as the running statistics of a network in training mode.

On a GPU, `qimeng.envs.errors.accuracy` takes some fifty operators and five waits for the device for each output. Here
vectors of about one length are rows of one table, and the device is waited for once. What is not plain (a value that is
not finite, say) is left to that module, and so is what comes near a budget, so that no verdict changes.

Deals in real tensors with one dimension of more than one element at most. Knows nothing about what makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from qimeng.envs.errors.accuracy import OF_ALL, Error, is_float, rows_of
from qimeng.envs.errors.column_errors import FEWEST, SHARE, alone_floor
from qimeng.envs.errors.error_budget import Expected
from qimeng.envs.workers.small_tensors import differing

LONGEST = 1 << 14
"""Elements of the longest vector that shares a table with others."""
FEWEST_VECTORS = 4
"""Vectors that are worth a table."""
TABLE = 1 << 22
"""Elements of a table."""
NEAR = 1e-6
"""Share of a budget within which an error counts as near it: sums over a table add up in another order."""


def errors_of_right(actual: Sequence[torch.Tensor], expected: Sequence[Expected]) -> list[Error | None]:
    """The errors of those tensors that are certainly right (`error_budget.check`); None where that has to be asked."""
    signed = any(e.signed for e in expected)
    plain = [i for i, e in enumerate(expected) if e.eager is None]
    found: list[Error | None] = [None] * len(expected)
    errors = errors_together([actual[i] for i in plain], [expected[i].value for i in plain], signed)
    for i, error in zip(plain, errors, strict=True):
        if error is not None and error.within(expected[i].budget * (1 - NEAR)):
            found[i] = error
    return found


def errors_together(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], signed: bool = False
) -> list[Error | None]:
    """`accuracy.measure` of each pair, to the last rounding; None where that has to be asked.

    Integers and booleans that are the same have none.

    Args:
        actual: what was computed.
        expected: what it should be.
        signed: whether zeros of another sign are a matter for another look, too.
    """
    found: list[Error | None] = [None] * len(actual)
    tables: dict[object, list[int]] = {}
    for number, (y, r) in enumerate(zip(actual, expected, strict=True)):
        if _fits(y, r):
            tables.setdefault((y.device, y.dtype, r.dtype, r.numel().bit_length() // 2), []).append(number)
    exact = [i for i, r in enumerate(expected) if not is_float(r) and not is_float(actual[i])]
    unlike = set(differing([actual[i] for i in exact], [expected[i] for i in exact]))
    for number, i in enumerate(exact):
        found[i] = None if number in unlike else Error()
    for numbers in tables.values():
        if len(numbers) < FEWEST_VECTORS:
            continue
        most = TABLE // max(actual[i].numel() for i in numbers)
        for start in range(0, len(numbers), most):
            part = numbers[start : start + most]
            errors = _errors_of([actual[i] for i in part], [expected[i] for i in part], signed)
            for i, error in zip(part, errors, strict=True):
                found[i] = error
    return found


def _fits(y: torch.Tensor, r: torch.Tensor) -> bool:
    plain = all(x.is_floating_point() and x.dtype.itemsize > 1 for x in (y, r))
    return plain and y.shape == r.shape and y.device == r.device and rows_of(r).dim() < 2 and 0 < r.numel() <= LONGEST


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _errors_of(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], signed: bool) -> list[Error | None]:
    """Those of vectors of one dtype each on one device. What fills a row up is 0 in both, and is no error."""
    dtype, device = expected[0].dtype, expected[0].device
    lengths = [r.numel() for r in expected]
    width = max(lengths)
    n = torch.tensor(lengths, dtype=torch.float64).to(device)
    inside = torch.arange(width, device=device) < n[:, None]
    y, r = (
        torch.zeros(len(lengths), width, dtype=x[0].dtype, device=device).masked_scatter_(inside, _flat(x))
        for x in (actual, expected)
    )

    norms = torch.linalg.vector_norm(r, dim=-1, dtype=torch.float64) / n.sqrt()
    kind, wide = torch.finfo(dtype), torch.promote_types(torch.promote_types(y.dtype, dtype), torch.float32)
    least = (OF_ALL * kind.eps * norms).clamp(min=kind.tiny)
    scale = (r.abs().to(wide) + norms.to(wide)[:, None]).maximum(least.to(wide)[:, None])
    error = (y.to(wide) - r.to(wide)).abs_().div_(scale)
    top = error.amax(-1).double()
    rms = (error.square_().sum(-1, dtype=torch.float64) / n).sqrt()

    alone = _alone(y.double(), r.double(), inside, n, dtype) if width >= FEWEST else torch.zeros_like(top)
    known = top.isfinite() & norms.isfinite()
    if signed:
        known &= ~((y == 0) & (r == 0) & (torch.signbit(y) != torch.signbit(r))).any(-1)
    rows = torch.stack([known.double(), top, rms, alone]).T.tolist()
    return [Error(a, b, 0.0, c) if finite else None for finite, a, b, c in rows]


def _alone(y: torch.Tensor, r: torch.Tensor, inside: torch.Tensor, n: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """|y - r| / |r| of `SHARE` of the elements of each row; 0 where they are few."""
    sizes = r.abs()
    counted = (sizes > 0).sum(-1)  # beside them come the zeros, then what fills the row up
    place = n.long() - counted + (counted - 1).clamp(min=0) // 2
    ordered = torch.where(inside, sizes, math.inf).sort(-1).values
    usual = ordered.gather(-1, place.clamp(max=r.shape[-1] - 1)[:, None]).where(counted[:, None] > 0, 0.0)
    least, slope = alone_floor(dtype)
    error = (y - r).abs_().div_(sizes.maximum((slope * usual).clamp(min=least)))
    ordered = torch.where(inside, error, math.inf).sort(-1).values
    place = (SHARE * (n - 1)).long()
    return ordered.gather(-1, place[:, None])[:, 0].where(n >= FEWEST, 0.0)


__all__ = ["FEWEST_VECTORS", "LONGEST", "errors_of_right", "errors_together"]
