"""Calls of the cumulative operators, forwards, backwards, shifted and among other operators.

Deals in PyTorch calls by operator. Knows nothing about kernels, and nothing about the values that are put in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from experiments.trust.case import HEAVY, Case


def scan_cases() -> Iterator[Case]:
    """All of them."""
    for label, dim in (("", -1), ("columns", 0)):
        yield Case("cumsum", label, lambda r, d=dim: r.cumsum(d), "r", HEAVY, lambda r, d=dim: _sums(r, d))
        yield Case("cumprod", label, lambda r, d=dim: _signs(r).cumprod(d), "r", 2 * HEAVY)
        yield Case(
            "logcumsumexp",
            label,
            lambda r, d=dim: r.logcumsumexp(d) if r.is_floating_point() else r.float().logcumsumexp(d),
            "r",
            HEAVY,
            lambda r, d=dim: r.abs().nan_to_num(posinf=0.0).cummax(d)[0] + 4,
        )
        for name in ("cummax", "cummin"):
            yield Case(name, label, lambda r, d=dim, n=name: getattr(torch, n)(r, d), "r")
    yield Case("cumsum", "booleans", lambda r: (r > 0).cumsum(-1), "r")
    yield Case(
        "cumsum", "reverse", lambda r: r.flip(1).cumsum(1).flip(1), "r", HEAVY, lambda r: _sums(r.flip(1)).flip(1)
    )
    yield Case("cumsum", "exclusive", _exclusive, "r", HEAVY, _sums)
    yield Case("cumsum", "masked", lambda r: (r * (r > 0)).cumsum(1), "r", HEAVY, _sums)
    yield Case("cummax", "reverse", lambda r: r.flip(1).cummax(1)[0].flip(1) * 2, "r")
    yield Case("cummin", "of positions", lambda r: r.flip(1).cummin(1)[1] * 2, "r")


def _signs(r: Tensor) -> Tensor:
    return r.sign() * 1.25 if r.is_floating_point() else r


def _sums(r: Tensor, dim: int = -1) -> Tensor:
    return r.abs().nan_to_num(posinf=0.0).cumsum(dim)


def _exclusive(r: Tensor) -> Tensor:
    return functional.pad(r.cumsum(1)[:, :-1], (1, 0))


__all__ = ["scan_cases"]
