"""Which properties an example's values have, and which ways of drawing other values keep them.

Deals in one example on the CPU, as stored in memory (broadcast dimensions cut to 1). This module finds the properties;
`qimeng.spec.ways` draws values that keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from qimeng.spec.law import Law, special_values
from qimeng.spec.ways import Distinct, Drawn, Ordered, Prefix, Scaled, Shuffled, Signs, Spread, Steps, Way, Within

STRUCTURED = ("log_probability", "unit", "orthogonal", "definite", "sorted", "offsets", "permutation", "fixed")
"""Domains beyond the plain ones: rows whose exponentials sum to 1; slices of norm 1; orthonormal rows or columns;
square matrices that are symmetric, triangular or mostly diagonal; real numbers in order; whole numbers in order;
whole numbers that are all different within a row; never changed."""

_FEW = 16
"""Elements of each dimension that are checked first."""
_MOST = 1 << 22
"""A matrix with at most this many elements is checked as a whole."""
_WIDE = 1000.0
"""If the magnitudes of a vector's elements (without the tenth at each end) differ by more than this factor, each
element has its own scale."""
_LARGE = 1 << 24


def structure_of(x: torch.Tensor, domain: str) -> str:
    """The more specific domain of `x`, if its values have one of the properties in `STRUCTURED`; else `domain`.

    >>> structure_of(torch.tensor([0, 3, 7, 10]), "index"), structure_of(torch.randperm(9), "index")
    ('offsets', 'permutation')
    """
    if x.numel() < 2 or x.dim() == 0 or domain not in ("real", "positive", "index"):
        return domain
    if domain == "index":
        return _of_whole(x)
    if x.dtype.itemsize == 1:
        return domain
    if x.is_complex():
        hermitian = _is_square(x) and bool((x == x.mH).all())
        phases = _holds(lambda y: bool(((y.abs() - 1).abs() < 1e-4).all()), x)
        return "definite" if hermitian else "unit" if phases else domain
    first = x[(slice(1),) * x.dim()].reshape(())
    if bool(first.isnan()) or bool((_corner(x, -1) == first).all()) and bool((x == first).all()):
        return domain
    if _holds(_is_log_probability, x, -1):
        return "log_probability"
    if not bool(x.isfinite().all()):
        return domain
    if _is_orthogonal(x):
        return "orthogonal"
    if _is_square(x) and _keeps_when_scaled(x[..., :_FEW, :_FEW]) and _keeps_when_scaled(x):
        return "definite"
    if _unit_dim(x) is not None:
        return "unit"
    return "sorted" if _sorted_dim(x) is not None else domain


def _corner(x: torch.Tensor, *whole: int) -> torch.Tensor:
    """The first elements of `x` in each dimension, all of them for `whole`. Properties of `x` hold there too."""
    kept = {d % x.dim() for d in whole}
    return x[tuple(slice(None) if d in kept else slice(_FEW) for d in range(x.dim()))]


def _holds(rule: Callable[[torch.Tensor], bool], x: torch.Tensor, *whole: int) -> bool:
    return rule(_corner(x, *whole)) and rule(x)


def ways_of(x: torch.Tensor, domain: str) -> tuple[Way, ...]:
    """Ways to make other values of `domain` like those of `x`, the one that changes most first."""
    if x.numel() == 0 or domain in ("fixed", "scalar"):
        return ()
    dims = tuple(d for d in range(x.dim()) if x.shape[d] > 1)
    shuffled = (Shuffled(dims[:-1]),) if len(dims) > 1 else (Shuffled(dims),) if dims else ()
    if domain in ("offsets", "permutation", "sorted", "definite"):
        return _ordered(x, domain)
    if domain == "index" and not x.is_floating_point():
        return _whole(x, dims) + shuffled
    if domain == "mask":
        return _two_valued(x, dims)
    if domain == "sign":
        seen = x.to(torch.float64)
        return (Signs(-1.0, 1.0, float((seen > 0).double().mean())), *shuffled)
    if not (x.is_floating_point() or x.is_complex()):
        return shuffled
    if bool((x == x.reshape(-1)[0]).all()):
        return ()  # a constant
    if _has_scales_of_its_own(x):
        return (Spread(), *shuffled)
    if x.is_complex():
        return (Drawn(Law.of(torch.view_as_real(x.resolve_conj())), "phase" if domain == "unit" else ""), *shuffled)
    rule = domain if domain in ("probability", "log_probability", "unit", "orthogonal") else ""
    dim = (_unit_dim(x) or -1) if rule == "unit" else -1
    return (Drawn(Law.of(x), rule, dim), *shuffled)


# ---- whole numbers


def _of_whole(x: torch.Tensor) -> str:
    size, v = x.shape[-1], x.long()
    if size < 2 or bool((v == v.reshape(-1)[0]).all()):
        return "index"
    steps = v.diff()
    if size > 2 and bool((steps >= 0).all() | (steps <= 0).all()) and bool((v[..., :1] != v[..., -1:]).any()):
        return "offsets"
    ordered = v.sort(-1).values
    if size > 2 and bool((ordered.diff() > 0).all()):
        return "permutation"
    return "index"


def _whole(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[Way, ...]:
    v = x.long()
    low, high = int(v.min()), int(v.max())
    if low == high:
        return ()
    if len(dims) > 1 and bool(((v == low) | (v == high)).all()):
        return _two_valued(x, dims)
    special = tuple(int(s) for s in special_values(v.double(), whole=True)) if high < 1 << 52 else ()
    usual = v[~torch.isin(v, torch.tensor(special, dtype=torch.int64))] if special else v
    if not usual.numel() or int(usual.min()) == int(usual.max()):
        return ()
    return (Within(int(usual.min()), int(usual.max()), special),)


def _two_valued(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[Way, ...]:
    """Rows that change value only once must stay so. Columns are reordered only if rows change value freely."""
    if not dims:
        return ()
    if x.shape[-1] < 2:
        return (Shuffled(dims),)
    changes = (x[..., 1:] != x[..., :-1]).sum(-1)
    if bool((changes > 1).any()):
        return (Shuffled(dims), Shuffled(dims[:-1])) if len(dims) > 1 else (Shuffled(dims),)
    rows = x.reshape(-1, x.shape[-1])
    if bool((rows == rows[:1]).all()):
        return (Prefix(),) if bool((changes == 1).all()) else ()
    return (Shuffled(tuple(d for d in dims if d != x.dim() - 1)),)


# ---- numbers in order, matrices


def _ordered(x: torch.Tensor, domain: str) -> tuple[Way, ...]:
    if domain == "definite":
        if not _is_square(x):
            return ()
        diagonal = x.diagonal(dim1=-2, dim2=-1)
        return (Scaled(only_signs=bool((diagonal == diagonal.reshape(-1)[0]).all())), Scaled(only_signs=True))
    if domain == "permutation":
        return distinct(x)
    dim = _sorted_dim(x)
    if dim is None:  # declared, and not so
        return ()
    if not x.is_floating_point():
        return (Steps(dim),)
    steps = x.double().movedim(dim, -1).diff()
    alike = bool(((steps - steps[..., :1]).abs() <= 1e-3 * steps.abs().amax()).all())
    strict = bool((steps != 0).all())
    if alike or strict:
        return (Steps(dim),)
    return (Ordered(Law.of(x), dim, bool((steps <= 0).all())), Steps(dim))


def distinct(x: torch.Tensor) -> tuple[Way, ...]:
    """Ways to make other whole numbers that are all different within a row, as those of `x` are."""
    low, high, rows = int(x.min()), int(x.max()), x.numel() // x.shape[-1]
    fits = rows * (high - low + 1) <= _LARGE
    shuffled = Shuffled(tuple(d for d in range(x.dim()) if x.shape[d] > 1))
    return (Distinct(low, high), shuffled) if fits else (shuffled,)


def _sorted_dim(x: torch.Tensor) -> int | None:
    """The dimension along which all of `x` is in order; None where there is none, or too few numbers to tell."""
    if x.dtype is torch.bool:
        return None
    for dim in range(-1, x.dim() - 1):
        if x.shape[dim] < (2 if not x.is_floating_point() else 3):
            continue
        lines = x.numel() // x.shape[dim]
        if (x.dim() == 1 or lines * (x.shape[dim] - 1) >= 4) and _holds(partial(_in_order, dim), x, dim):
            return dim
    return None


def _in_order(dim: int, x: torch.Tensor) -> bool:
    steps = (x if x.is_floating_point() else x.long()).movedim(dim, -1).diff()
    return bool((steps >= 0).all() | (steps <= 0).all()) and bool((steps != 0).any())


def _is_square(x: torch.Tensor) -> bool:
    return x.dim() >= 2 and x.shape[-1] == x.shape[-2] >= 2 and x.numel() <= _MOST


def _keeps_when_scaled(x: torch.Tensor) -> bool:
    """Whether matrices are symmetric, triangular, or have a diagonal far above the rest."""
    if bool((x == 0).all()):
        return False
    off = x - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1))
    close = 16 * torch.finfo(x.dtype).eps * x.abs().amax()
    symmetric = bool(((x - x.mT).abs() <= close).all())
    triangular = bool((x == x.tril()).all()) or bool((x == x.triu()).all())
    size = x.shape[-1]
    mean = off.abs().sum((-2, -1)) / (size * (size - 1))
    dominant = size > 2 and bool((x.diagonal(dim1=-2, dim2=-1).abs().amin(-1) > 4 * mean).all())
    return symmetric or triangular or dominant


def _is_orthogonal(x: torch.Tensor) -> bool:
    if x.dim() < 2 or min(x.shape[-2:]) < 2 or x.numel() * min(x.shape[-2:]) > 1 << 30:
        return False
    dim = -1 if x.shape[-2] <= x.shape[-1] else -2
    if not _holds(partial(_is_unit, dim), x, dim):
        return False
    a = x.double() if x.dtype is torch.float64 else x.float()
    product = a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a
    eye = torch.eye(product.shape[-1], dtype=product.dtype)
    return bool(((product - eye).abs() <= 64 * torch.finfo(x.dtype).eps).all())


def _unit_dim(x: torch.Tensor) -> int | None:
    for dim in range(-1, -x.dim() - 1, -1):
        if x.shape[dim] < 2 or x.numel() // x.shape[dim] < 2 and x.shape[dim] < 8:
            continue
        if _holds(partial(_is_unit, dim), x, dim):
            return dim
    return None


def _is_unit(dim: int, x: torch.Tensor) -> bool:
    norms = torch.linalg.vector_norm(x if x.dtype is torch.float64 else x.float(), dim=dim)
    return bool(((norms - 1).abs() <= 8 * torch.finfo(x.dtype).eps * max(1.0, x.shape[dim] ** 0.5)).all())


def _is_log_probability(x: torch.Tensor) -> bool:
    if x.shape[-1] < 2 or bool((x > 0).any()):
        return False
    wide = x if x.dtype is torch.float64 else x.float()
    limit = 16 * torch.finfo(x.dtype).eps * max(1.0, float(wide.where(wide.isfinite(), 0.0).abs().amax()))
    return bool((wide.logsumexp(-1).abs() <= limit).all())


def _has_scales_of_its_own(x: torch.Tensor) -> bool:
    """Whether `x` is a vector of numbers of very different size."""
    if sum(size > 1 for size in x.shape) != 1 or x.is_complex() or x.dtype.itemsize == 1:
        return False
    size = x.double().abs().reshape(-1)
    size = size[size.isfinite() & (size > 0)].sort().values
    if len(size) < 2:
        return False
    low, high = size[len(size) // 10], size[-1 - len(size) // 10]
    return bool(high > low * _WIDE)


__all__ = ["STRUCTURED", "distinct", "structure_of", "ways_of"]
