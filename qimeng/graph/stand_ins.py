"""Functions that torch.export refuses or takes for something else, by others that mean the same.

For a write at a place that a tensor of one number says, PyTorch asks for the number, which is not known in a graph.
For a covariance, it asks a tensor whether there are enough observations, which their number alone decides.
``fill_diagonal_`` reads memory, which no graph knows of a view. ``multi_margin_loss`` of a NaN becomes another number.
Deals in the definitions of PyTorch's documentation. Knows nothing about graphs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_COVARIANCES = (torch.cov, torch.Tensor.cov)
_CORRELATIONS = (torch.corrcoef, torch.Tensor.corrcoef)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
_OLD = ("size_average", "reduce")
"""What losses had in the place of `reduction`."""


class OtherFunctions(TorchFunctionMode):
    """In the block, the functions below take the place of PyTorch's; of covariances, of those without weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of `func`."""
        given = dict(kwargs or {})
        if func is torch.Tensor.fill_diagonal_ and _is_plain(*args, **given):
            return with_diagonal(*args, **given)
        if func is torch.Tensor.__setitem__ and _is_picked(args[1]):
            return write_picked(*args)
        if func is torch.nn.functional.multi_margin_loss and not any(given.get(name) is not None for name in _OLD):
            return multi_margin_loss(*args, **{name: value for name, value in given.items() if name not in _OLD})
        plain = all(given.pop(name, None) is None for name in ("fweights", "aweights"))
        if func in _COVARIANCES and plain:
            return covariance(*args, **given)
        if func in _CORRELATIONS:
            return correlation(*args, **given)
        return func(*args, **(kwargs or {}))


def _is_plain(x: torch.Tensor, fill_value: Any = None, wrap: bool = False) -> bool:
    return x.ndim == 2 and x.is_floating_point() and not wrap


def with_diagonal(x: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    """The matrix `x`, with a number in its diagonal from now on.

    >>> with_diagonal(torch.zeros(2, 3), 1.0)
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return x.masked_fill_(rows[:, None] == columns, fill_value)


def _is_picked(key: Any) -> bool:
    """Whether tensors of one whole number say where something is written, and numbers and slices beside them."""
    keys = key if isinstance(key, tuple) else (key,)
    numbers = [k for k in keys if isinstance(k, torch.Tensor)]
    others = [k for k in keys if not isinstance(k, torch.Tensor)]
    return (
        bool(numbers)
        and all(k.ndim == 0 and k.dtype in _WHOLE for k in numbers)
        and all(k is None or k is ... or type(k) in (int, slice) for k in others)
    )


def write_picked(x: torch.Tensor, key: Any, value: Any) -> None:
    """``x[key] = value``, for which PyTorch asks each tensor in `key` for its number.

    >>> x = torch.zeros(2, 3)
    >>> write_picked(x, (slice(None), torch.tensor(-1)), torch.tensor([[1.0, 2.0]]))
    >>> x
    tensor([[0., 0., 1.],
            [0., 0., 2.]])
    """
    keys = key if isinstance(key, tuple) else (key,)
    part = x[tuple(slice(None) if isinstance(k, torch.Tensor) else k for k in keys)]
    if any(k is ... for k in keys):
        at = next(n for n, k in enumerate(keys) if k is ...)
        named = sum(k is not None and k is not ... for k in keys)
        keys = (*keys[:at], *[slice(None)] * (x.ndim - named), *keys[at + 1 :])
    kept = [k for k in keys if type(k) is not int]  # a dimension of `part` each
    indices = [k.long() if isinstance(k, torch.Tensor) else None for k in kept]
    rank = part.ndim - sum(i is not None for i in indices)
    value = value.to(x.dtype) if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype)
    value = value.to(x.device)
    while value.ndim > rank and value.shape[0] == 1:
        value = value[0]
    torch.ops.aten.index_put_(part, indices, value)


def multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
    *,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss of `torch.nn.functional`, in which a NaN counts as no violation; torch.export's has a NaN there.

    >>> multi_margin_loss(torch.tensor([0.0, 0.5, float("nan")]), torch.tensor(0))
    tensor(0.5000)
    """
    rows, at = torch.atleast_2d(input), torch.atleast_1d(target).unsqueeze(1)
    short = margin - rows.gather(1, at) + rows
    counts = (torch.arange(rows.shape[1], device=input.device) != at) & (short > 0)
    short = short if p == 1 else short * short
    each = torch.where(counts, short if weight is None else short * weight[at], 0)
    if reduction != "none":
        return each.mean() if reduction == "mean" else each.sum() / rows.shape[1]
    return each.mean(1) if input.dim() > 1 else each.mean()


def covariance(input: torch.Tensor, *, correction: int = 1) -> torch.Tensor:
    """The covariances of rows: ``[variables, observations] -> [variables, variables]``; of one row without dimension.

    >>> covariance(torch.tensor([[1.0, 3.0], [2.0, 6.0]]))
    tensor([[2., 4.],
            [4., 8.]])
    """
    rows = input.view(1, -1) if input.ndim < 2 else input
    count = rows.shape[1] - correction
    if count <= 0:
        warnings.warn("cov(): degrees of freedom is <= 0", stacklevel=2)
    centred = rows - rows.sum(1, keepdim=True) / rows.shape[1]
    found = torch.true_divide(centred @ centred.t().conj(), max(count, 0))
    return found.squeeze() if found.shape[0] == 1 else found


def correlation(input: torch.Tensor) -> torch.Tensor:
    """The correlations of rows: ``[variables, observations] -> [variables, variables]``; from -1 to 1.

    >>> correlation(torch.tensor([[1.0, 3.0], [2.0, -6.0]]))
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    found = covariance(input)
    if found.ndim == 0:
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviation[:, None] / deviation[None, :]
    if not found.is_complex():
        return found.clamp(-1, 1)
    return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))


__all__ = ["OtherFunctions", "correlation", "covariance", "multi_margin_loss", "with_diagonal", "write_picked"]
