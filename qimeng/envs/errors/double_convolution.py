"""Convolutions in float64 as products of matrices, which a GPU computes on its tensor cores.

Deals in tensors, as `torch.ops.aten.convolution` takes them. Knows nothing about references.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch.nn import functional

COLUMNS = 1 << 25
"""Numbers of the columns that one product reads: 256 MiB."""

OUTPUTS = 128
"""Outputs from which on columns of windows are worth their copy, where channels are in one group."""


class _Window(NamedTuple):
    """How windows move: a number for each dimension of places; see `as_products`."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    more: Sequence[int]


def as_products(
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
    """What `torch.ops.aten.convolution` computes of the same arguments, in any floating dtype.

    Args:
        x: [samples, channels, places…].
        weight: [outputs, channels of a group, window…]; of a transposed convolution [channels, outputs of a group,
            window…].
        bias: [outputs].
        stride: a number for each dimension of places, or one for all; likewise `padding`, `dilation`,
            `output_padding`.
        padding: zeros on both sides; of a transposed convolution what is cut off.
        dilation: places between two of a window.
        transposed: whether it is a transposed convolution.
        output_padding: places added at the end of a transposed convolution's outputs.
        groups: of channels.

    Returns:
        [samples, outputs, places…]
    """
    dims = x.dim() - 2
    numbers = (stride, padding, dilation, output_padding)
    window = _Window(*(tuple(values) * (dims if len(values) == 1 else 1) for values in numbers))
    found = (_transposed if transposed else _convolution)(x, weight, window, groups)
    return found if bias is None else found.add_(bias.view(-1, *[1] * dims))


def is_worth_it(weight: torch.Tensor, transposed: bool, groups: int) -> bool:
    """Whether products are faster than what PyTorch calls: by one run of nine shapes on an H200, which is not stored.

    They are for transposed convolutions, for windows of several elements with many outputs, and for groups of several
    channels. They are slower for pointwise convolutions in one group, and for 3 channels and a stride of 4.
    """
    outputs, terms = weight.shape[1] if transposed else weight.shape[0] // groups, weight.shape[1]
    if transposed or groups > 1:
        return transposed or (outputs > 1 and terms > 1)
    return outputs >= OUTPUTS and weight[0, 0].numel() > 1


def _convolution(x: torch.Tensor, weight: torch.Tensor, w: _Window, groups: int) -> torch.Tensor:
    """Columns of windows, a product with the weight for some samples and some places of the window at a time."""
    if any(w.padding):
        x = functional.pad(x, [p for size in reversed(w.padding) for p in (size, size)])
    (samples, channels), window = x.shape[:2], weight.shape[2:]
    sizes = [
        (n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], window, w.stride, w.dilation, strict=True)
    ]
    places, outputs = math.prod(sizes), weight.shape[0]
    found = x.new_empty(samples, groups, outputs // groups, places)
    filters = weight.reshape(groups, outputs // groups, channels // groups, -1)
    taps = list(product(*map(range, window)))
    for some, parts in _portions(samples, len(taps), channels * places):
        columns = torch.stack([_seen(x[some], taps[t], sizes, w) for t in parts], dim=2)
        columns = columns.reshape(-1, groups, channels // groups * len(parts), places)  # of x in channels-last, too
        of_parts = filters[..., parts.start : parts.stop].flatten(2)
        if parts.start:
            found[some] += of_parts @ columns
        else:
            torch.matmul(of_parts, columns, out=found[some])
    return found.view(samples, outputs, *sizes)


def _transposed(x: torch.Tensor, weight: torch.Tensor, w: _Window, groups: int) -> torch.Tensor:
    """A product with the weight, of which each place of the window is added where it belongs."""
    (samples, channels), window, sizes = x.shape[:2], weight.shape[2:], x.shape[2:]
    whole = [
        (n - 1) * s + d * (k - 1) + 1 + p
        for n, k, s, d, p in zip(sizes, window, w.stride, w.dilation, w.more, strict=True)
    ]
    outputs = groups * weight.shape[1]
    found = x.new_zeros(samples, outputs, *whole)
    filters = weight.reshape(groups, channels // groups, weight.shape[1], -1)
    taps = list(product(*map(range, window)))
    for some, parts in _portions(samples, len(taps), outputs * math.prod(sizes)):
        of_parts = filters[..., parts.start : parts.stop].permute(0, 3, 2, 1).flatten(1, 2)
        columns = of_parts @ x[some].reshape(-1, groups, channels // groups, math.prod(sizes))
        columns = columns.view(columns.shape[0], groups, len(parts), weight.shape[1], *sizes)
        for number, tap in enumerate(parts):
            seen = _seen(found[some], taps[tap], sizes, w)
            seen += columns[:, :, number].flatten(1, 2)
    for dim, (n, p) in enumerate(zip(whole, w.padding, strict=True), start=2):
        found = found.narrow(dim, p, n - 2 * p)
    return found.contiguous()


def _seen(x: torch.Tensor, tap: Sequence[int], sizes: Sequence[int], w: _Window) -> torch.Tensor:
    """The part of `x` that one place of the window meets: a view of the window's `sizes` places."""
    steps = zip(tap, sizes, w.stride, w.dilation, strict=True)
    return x[(slice(None), slice(None), *(slice(t * d, t * d + (n - 1) * s + 1, s) for t, n, s, d in steps))]


def _portions(samples: int, taps: int, each: int) -> Iterator[tuple[slice, range]]:
    """Samples and places of the window to compute at a time, of which each pair has `each` numbers."""
    taps_at_once = max(1, min(taps, COLUMNS // max(each, 1)))
    samples_at_once = max(1, COLUMNS // max(each * taps_at_once, 1))
    for first in range(0, samples, samples_at_once):
        for tap in range(0, taps, taps_at_once):
            yield slice(first, first + samples_at_once), range(tap, min(tap + taps_at_once, taps))


__all__ = ["as_products", "is_worth_it"]
