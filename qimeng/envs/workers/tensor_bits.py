"""The bits of a tensor: whether two are the same, and checksums that show a change.

Works in blocks, so that tensors of many GiB need little extra memory. Knows nothing about what the values should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

BLOCK = 1 << 24
"""Elements compared at a time: 128 MiB in float64."""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where shape, dtype and every bit pattern agree (two NaN with the same bits are the same)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(torch.equal(bits_of(block(a, w)), bits_of(block(b, w))) for w in blocks(a.shape))


def checksum(tensor: torch.Tensor) -> int:
    """A checksum of the bits of a tensor: equal for equal content, very rarely for other content."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for where in blocks(tensor.shape):
        total += bits_of(block(tensor, where)).sum(dtype=torch.int64)
    return int(total)


def weighted_sum(tensor: torch.Tensor, seed: int) -> int:
    """A checksum of the bits of a tensor, each element times a weight of its place; other content very rarely has it.

    Args:
        tensor: any.
        seed: of the weights; it is secret, so one change cannot be hidden by another.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.empty(0)
    for number, where in enumerate(blocks(tensor.shape)):
        bits = bits_of(block(tensor, where)).reshape(-1)
        if weights.numel() < min(bits.numel(), BLOCK):
            generator = torch.Generator(device=tensor.device).manual_seed(seed)
            count = min(bits.numel(), BLOCK)
            weights = torch.randint(1, 1 << 30, (count,), generator=generator, device=tensor.device)
        for start in range(0, bits.numel(), BLOCK):
            part = bits[start : start + BLOCK]
            total += (number + start + 1) * (part.to(torch.int64) * weights[: part.numel()]).sum()
    return int(total)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_INTEGERS[tensor.element_size()])


def blocks(shape: torch.Size, size: int = BLOCK) -> Iterator[tuple[slice, ...]]:
    """Slices over the leading dimensions that cut a tensor into parts of at most `size` elements, rows kept whole."""
    if len(shape) < 2 or math.prod(shape) <= size:
        yield ()
        return
    rest = math.prod(shape[1:])
    step = max(size // max(rest, 1), 1)
    for start in range(0, shape[0], step):
        here = slice(start, start + step)
        if step > 1 or rest <= size:
            yield (here,)
        else:
            for inner in blocks(shape[1:], size):
                yield (here, *inner)


def block(tensor: torch.Tensor, where: tuple[slice, ...]) -> torch.Tensor:
    """One of the parts that `blocks` cuts."""
    return tensor[where] if where else tensor


__all__ = ["BLOCK", "bits_of", "block", "blocks", "checksum", "same", "weighted_sum"]
