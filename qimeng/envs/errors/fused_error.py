"""The errors of a large tensor on a GPU, in one pass over memory.

Deals in two tensors and two numbers. Element by element it computes what `qimeng.envs.errors.accuracy` does in some
fifteen passes, which took most of an evaluation's time for outputs of several GiB. Knows nothing about budgets.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

TILE = 4096
"""Elements of a program."""
SLICE = 1 << 24
"""Elements whose norms are taken at a time: 128 MiB in float64."""


@triton.jit
def _errors_of_tile(
    y_ptr, r_ptr, scale_ptr, top_ptr, sum_ptr, least_ptr, rows, width, R: tl.constexpr, C: tl.constexpr
):
    """Largest error and sum of the squared errors of `R` rows by `C` columns; infinite where a value is not finite."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(width, C)
    row = (program // across) * R + tl.arange(0, R)
    column = (program % across) * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    r = tl.load(r_ptr + at, mask=inside, other=0.0)
    y = tl.load(y_ptr + at, mask=inside, other=0.0)
    if r.dtype == tl.float64 or y.dtype == tl.float64:
        r, y = r.to(tl.float64), y.to(tl.float64)
    else:
        r, y = r.to(tl.float32), y.to(tl.float32)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)[:, None].to(r.dtype)
    least = tl.load(least_ptr).to(r.dtype)
    error = tl.abs(y - r) / tl.maximum(tl.abs(r) + scale, least)
    error = tl.where(error == error, error, float("inf"))
    tl.store(top_ptr + program, tl.max(error.to(tl.float64)))
    tl.store(sum_ptr + program, tl.sum((error * error).to(tl.float64)))


def row_scales(expected: torch.Tensor) -> torch.Tensor:
    """Root mean square of each row along the last dimension, of at least one, one after the other; float64."""
    width = expected.shape[-1]
    parts = expected.reshape(-1, width).split(max(1, SLICE // width))  # on a GPU the norm makes a float64 copy first
    norms = [torch.linalg.vector_norm(p, dim=-1, dtype=torch.float64) for p in parts]
    return torch.cat(norms) / math.sqrt(width)


def fused_summary(
    actual: torch.Tensor, expected: torch.Tensor, least: float, scale: torch.Tensor | None = None
) -> tuple[float, float]:
    """Largest error and sum of the squared errors over all elements; infinite where a value is not finite.

    Args:
        actual: real floating-point tensor on a GPU.
        expected: of the same shape and device; at least one dimension.
        least: what errors are divided by at least.
        scale: `row_scales(expected)`, where it is known.
    """
    actual, expected = actual.contiguous(), expected.contiguous()
    width = expected.shape[-1]
    rows = expected.numel() // width
    scale = row_scales(expected) if scale is None else scale
    columns = min(triton.next_power_of_2(width), TILE)
    height = TILE // columns
    programs = triton.cdiv(rows, height) * triton.cdiv(width, columns)
    tops, sums = torch.empty(2, programs, dtype=torch.float64, device=expected.device)
    floor = torch.full((), least, dtype=torch.float64, device=expected.device)
    with torch.cuda.device_of(expected):
        _errors_of_tile[(programs,)](actual, expected, scale, tops, sums, floor, rows, width, height, columns)
    top, total = torch.stack([tops.amax(), sums.sum()]).tolist()
    return top, total


__all__ = ["fused_summary", "row_scales"]
