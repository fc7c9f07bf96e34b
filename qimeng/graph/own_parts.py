"""Operators that PyTorch's table leaves whole and that are taken apart here: into products, norms, choices, one form.

Deals in functions of tensors, of the same arguments as the operators. Knows nothing about graphs or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def _addbmm(c: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """The sum of the products of a batch is one product, whose depth is that of all of them."""
    rows, columns = x.shape[1], y.shape[2]
    left, right = x.permute(1, 0, 2).reshape(rows, -1), y.reshape(-1, columns)
    return torch.addmm(c, left, right, beta=beta, alpha=alpha)


BILINEAR = ([1, 3], [0], [1, 2], [2, 3])
"""Where `torch.nn.functional.bilinear` adds dimensions to what `_trilinear` multiplies, and what that sums over."""


def _trilinear(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sums: Sequence[int],
    unroll: int = 1,
) -> Any:
    """A bilinear form is a product with the first operand and a sum with the second: an infinity there stays one."""
    if tuple(list(dims) for dims in (expand1, expand2, expand3, sums)) != BILINEAR or 0 in weight.shape:
        return NotImplemented
    units, depth, terms = weight.shape
    matrix = weight.permute(0, 2, 1).reshape(units * terms, depth)
    half = torch.nn.functional.linear(x, matrix).view(-1, units, terms)
    return (half * y.unsqueeze(1)).sum(2)


def _pdist(x: Tensor, p: float = 2.0) -> Any:
    """The norms of the differences of every two rows; those that pass over NaN stay whole."""
    if not 0 < p < float("inf") or x.shape[0] < 2 or x.shape[1] < 2:
        return NotImplemented
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return torch.linalg.vector_norm(x[first] - x[second], p, 1)


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """A mask that writes the same values at each place (``x[mask] = 0``) is a choice between two tensors."""
    chosen = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(chosen) != 1 or chosen[0][1].dtype != torch.bool:
        return NotImplemented
    first, mask = chosen[0]
    behind, sizes = x.dim() - first - mask.dim(), list(values.shape)
    place = len(sizes) - behind - 1  # the dimension of `values` for the places that the mask chooses
    if place >= 0:
        if not isinstance(sizes[place], int) or sizes[place] != 1:  # a symbol: as many as the mask chooses
            return NotImplemented
        if mask.dim() > 1:
            values = values.reshape(sizes[:place] + [1] * mask.dim() + sizes[place + 1 :])
    if behind:
        mask = mask.reshape(list(mask.shape) + [1] * behind)
    return torch.where(mask, x + values if accumulate else values, x)


def _var_mean(x: Tensor, unbiased: bool = True) -> Any:
    return torch.var_mean(x, correction=int(unbiased))


def _var_mean_along(x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return torch.var_mean(x, dim, correction=int(unbiased), keepdim=keepdim)


PARTS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.addbmm.default: _addbmm,
    torch.ops.aten._trilinear.default: _trilinear,
    torch.ops.aten._pdist_forward.default: _pdist,
    torch.ops.aten.index_put.default: _index_put,
    torch.ops.aten.var_mean.default: _var_mean,
    torch.ops.aten.var_mean.dim: _var_mean_along,
}
"""Operator to what it is made of."""

__all__ = ["PARTS"]
