"""Detects degenerate computations: would a constant pass as the result?

Deals in the results of PyTorch eager, judged by KernelBench's own rule. Knows nothing about candidates. Such problems
are flagged, not left out (KernelBench issue 165, https://github.com/ScalingIntelligence/KernelBench/issues/165).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from qimeng.envs.errors.accuracy import kernelbench_close


def degenerate(outputs: Sequence[torch.Tensor], others: Callable[[], Sequence[torch.Tensor] | None] | None) -> str:
    """Why the result of a computation can be guessed, or an empty string.

    Args:
        outputs: its result, at the size that counts (a long softmax is nearly zero, a short one is not).
        others: computes the result of other inputs (None where they have none); None where it has no inputs.
    """
    if _close([_constant(y, 0.0) for y in outputs], outputs):
        return "zeros pass"
    if any(y.numel() > 1 for y in outputs) and _close([_constant(y, _mean(y)) for y in outputs], outputs):
        return "a constant passes"
    if all(y.dim() > 0 and y.shape[-1] > 1 for y in outputs) and _close([_row_means(y) for y in outputs], outputs):
        return "the mean of each row passes"
    other = others() if others is not None else None
    if other is not None and _close(other, outputs):
        return "the output does not depend on the inputs"
    return ""


def _constant(like: torch.Tensor, value: float) -> torch.Tensor:
    """A tensor of one value; it takes no memory, which large problems need themselves."""
    return torch.full((), value, device=like.device).to(like.dtype).expand(like.shape)


def _mean(y: torch.Tensor) -> float:
    return float((y.real if y.is_complex() else y).mean(dtype=torch.float32))


def _row_means(y: torch.Tensor) -> torch.Tensor:
    """Each row's mean in place of its elements; it takes the memory of one element a row."""
    wide = torch.complex64 if y.is_complex() else torch.float32
    return y.mean(-1, keepdim=True, dtype=wide).to(y.dtype).expand_as(y)


def _close(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(kernelbench_close(a, b) for a, b in zip(found, wanted, strict=True))


__all__ = ["degenerate"]
