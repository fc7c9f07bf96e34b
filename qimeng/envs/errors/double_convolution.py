"""Convolutions in float64 as matrix products.

PyTorch's own float64 convolutions on a GPU do not use its tensor cores, and dominate the time of a check. The windows
of some samples are written out (im2col) and multiplied with the weight; a transposed convolution multiplies first and
adds up what falls on the same place (Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", 2016).

Deals in tensors. Knows nothing about modules or budgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch.nn import functional

WINDOW_BYTES = 1 << 29
"""Bytes of windows that are written out at a time, where one row of the leading spatial axis takes no more."""
LEAST_PRODUCT = 8
"""Channels a group that both sides need at least: PyTorch's own kernels for depthwise convolutions are quicker."""


def is_worthwhile(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether products are quicker: float64 on a GPU, and not depthwise.

    Args:
        x: the input, N x channels x spatial axes.
        weight: of a convolution or a transposed one; axis 1 has the channels of a group.
    """
    return (
        x.is_cuda
        and x.dtype is torch.float64
        and x.dim() == weight.dim() >= 3
        and x.numel() > 0
        and weight.shape[1] >= LEAST_PRODUCT
    )


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """What ``torch.ops.aten.convolution`` computes; arguments as there, with one number for each spatial axis.

    Args:
        x: N x C x spatial axes.
        weight: M x C / groups x kernel, or C x M / groups x kernel where `transposed`.
        bias: M, or None.
        stride: of windows.
        padding: zeros on both sides of an axis.
        dilation: distance between a window's elements.
        transposed: whether it is a transposed convolution.
        output_padding: more places at the end of an axis, where `transposed`.
        groups: of channels.

    Returns:
        N x M x spatial axes, in channels-last memory where `x` or `weight` are.
    """
    space = x.dim() - 2
    stride, padding, dilation, output_padding = (
        tuple(a) * (space if len(a) == 1 else 1) for a in (stride, padding, dilation, output_padding)
    )
    if transposed:
        made = _transposed(x, weight, stride, padding, dilation, output_padding, groups)
    else:
        made = _direct(x, weight, stride, padding, dilation, groups)
    if bias is not None:
        made += bias.view(-1, *[1] * space)
    return made.contiguous(memory_format=_memory_format(x, weight))


def _direct(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    space, kernel = x.dim() - 2, weight.shape[2:]
    if any(padding):
        x = functional.pad(x, [p for p in reversed(padding) for _ in range(2)])
    x = x.contiguous()
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]
    count, channels = x.shape[0], x.shape[1] // groups
    made = x.new_empty(count, weight.shape[0], *sizes)
    flat = weight.reshape(groups, weight.shape[0] // groups, -1)
    steps = x.stride()[2:]
    windows = x.as_strided(
        (count, groups, channels, *kernel, *sizes),
        (
            x.stride(0), channels * x.stride(1), x.stride(1), *(a * d for a, d in zip(steps, dilation, strict=True)),
            *(a * s for a, s in zip(steps, stride, strict=True)),
        ),
    )  # fmt: skip
    rows = x.shape[1] * math.prod(kernel) * math.prod(sizes[1:])
    for n, r in _parts(count, sizes[0], rows):
        part = windows[n].narrow(3 + space, r.start, r.stop - r.start)
        found = torch.matmul(flat, part.reshape(part.shape[0], groups, flat.shape[2], -1))
        made[n, :, r] = found.view(part.shape[0], weight.shape[0], *part.shape[3 + space :])
    return made


def _transposed(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    kernel, sizes = weight.shape[2:], x.shape[2:]
    count, channels, outputs = x.shape[0], x.shape[1] // groups, weight.shape[1]
    whole = [
        (n - 1) * s + d * (k - 1) + 1 + o
        for n, k, s, d, o in zip(sizes, kernel, stride, dilation, output_padding, strict=True)
    ]
    made = x.new_zeros(count, groups * outputs, *whole)
    flat = weight.reshape(groups, channels, -1).transpose(1, 2)
    rows = groups * flat.shape[1] * math.prod(sizes[1:])
    for n, r in _parts(count, sizes[0], rows):
        part = x[n, :, r]
        found = torch.matmul(flat, part.reshape(part.shape[0], groups, channels, -1))
        found = found.view(part.shape[0], groups, outputs, *kernel, *part.shape[2:])
        for at in product(*[range(k) for k in kernel]):
            begins = [a * d for a, d in zip(at, dilation, strict=True)]
            begins[0] += r.start * stride[0]
            places = [slice(b, b + s * (m - 1) + 1, s) for b, s, m in zip(begins, stride, part.shape[2:], strict=True)]
            place: list[Any] = [slice(None), slice(None), *places]
            tap: list[Any] = [slice(None), slice(None), slice(None), *at]
            target = made[n][tuple(place)]
            target += found[tuple(tap)].flatten(1, 2)
    inner: list[Any] = [slice(p, w - p) for p, w in zip(padding, whole, strict=True)]
    return made[(slice(None), slice(None), *inner)]


def _parts(count: int, rows: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Samples and rows of the leading spatial axis whose windows are written out at a time.

    Args:
        count: samples.
        rows: of the leading spatial axis.
        elements: written for one of them.
    """
    at_once = max(1, WINDOW_BYTES // (8 * elements))
    samples = max(1, at_once // rows)
    step = min(rows, at_once)
    for n in range(0, count, samples):
        for r in range(0, rows, step):
            yield slice(n, min(n + samples, count)), slice(r, min(r + step, rows))


def _memory_format(x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or not any(a.is_contiguous(memory_format=last) and not a.is_contiguous() for a in (x, weight)):
        return torch.contiguous_format
    return last


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator; a convolution whose products are quicker as these."""
    if func is torch.ops.aten.convolution.default and not kwargs and is_worthwhile(args[0], args[1]):
        return convolution(*args)
    return func(*args, **kwargs)


__all__ = ["LEAST_PRODUCT", "WINDOW_BYTES", "call", "convolution", "is_worthwhile"]
