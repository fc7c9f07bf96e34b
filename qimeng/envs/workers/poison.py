"""Fills fresh memory and the surroundings of inputs with NaN, so that wrong reads show in the result.

Deals in bytes that are NaN in any floating dtype. Knows nothing about programs or verdicts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

FENCE = 4096
"""Bytes beside an input or a parameter that are NaN in any floating dtype; a multiple of every alignment."""


def poison(device: torch.device, sizes: Sequence[int]) -> None:
    """Fill the memory of the next allocations with NaN, so that unwritten outputs show.

    Args:
        device: where.
        sizes: bytes of the tensors that are about to be allocated.
    """
    if device.type != "cuda":  # see perturb_malloc
        return
    torch.cuda.ipc_collect()
    blocks = [torch.empty(max(n, 1), dtype=torch.uint8, device=device) for n in sizes for _ in range(2)]
    free = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    blocks += [torch.empty(n, dtype=torch.uint8, device=device) for n in sorted(free, reverse=True)]
    for block in blocks:
        block.fill_(0xFF)


def fenced(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x`, of its shape and strides, with `FENCE` bytes of NaN on both sides: what reads beyond it shows.

    Otherwise an out-of-bounds read would find other tensors' values, which often look plausible. Tensors whose elements
    share memory are returned as they are.
    """
    if not x.numel() or any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)):
        return x
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    room = torch.empty(span * x.itemsize + 2 * FENCE, dtype=torch.uint8, device=x.device)
    between = span > x.numel()  # memory that lies between elements
    for part in (room,) if between else (room[:FENCE], room[-FENCE:]):
        part.fill_(0xFF)
    inside = torch.empty(0, dtype=x.dtype, device=x.device)
    return inside.set_(room.untyped_storage(), FENCE // x.itemsize, x.shape, x.stride()).copy_(x)


def perturb_malloc() -> None:
    """Let the C library fill fresh memory with 0xFF, which is NaN in any floating dtype.

    glibc's M_PERTURB takes the complement of the lowest byte, and 0 would turn it off. A number in place of NaN would
    not show where any number is right, such as a count that is divided out again.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-6, 0x100)


__all__ = ["FENCE", "fenced", "perturb_malloc", "poison"]
