"""Whether the sampler and the trainer agree about how likely a trajectory was.

The same weights give other probabilities where answers are generated (a cache, other kernels, lower precision) than
where gradients are computed. An update from a trajectory on which the two differ has a bias, so it is dropped. Deals in
log-probabilities. Source: Dr. Kernel (arXiv 2602.05885), equation 6 and its token veto.
"""

from __future__ import annotations

import torch

LEAST_RATIO, MOST_RATIO = 0.999, 1.001
"""Bounds of the geometric mean ratio."""

VETO = 1e-4
"""A trajectory with one token whose ratio is below it is dropped."""


def mean_ratio(trainer: torch.Tensor, sampler: torch.Tensor) -> float:
    """The geometric mean of the tokens' ratios: w = exp(mean over the tokens of log(pi_train / pi_rollout)).

    Args:
        trainer: log-probabilities of a trajectory's sampled tokens, of all its turns (t).
        sampler: the same where they were sampled (t).

    Raises:
        ValueError: the two are not about the same tokens, or there is none.

    >>> round(mean_ratio(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.5])), 4)
    1.6487
    """
    return float(_differences(trainer, sampler).mean().exp())


def agrees(
    trainer: torch.Tensor,
    sampler: torch.Tensor,
    least: float = LEAST_RATIO,
    most: float = MOST_RATIO,
    veto: float = VETO,
) -> bool:
    """Whether a trajectory is kept: least <= w <= most, and no token's ratio is below `veto`.

    Args:
        trainer: log-probabilities of a trajectory's sampled tokens, of all its turns (t).
        sampler: the same where they were sampled (t).
        least: bound of `mean_ratio`.
        most: bound of `mean_ratio`.
        veto: bound of each token's ratio.

    Raises:
        ValueError: the two are not about the same tokens, or there is none.
    """
    differences = _differences(trainer, sampler)
    ratio = float(differences.mean().exp())
    return least <= ratio <= most and bool((differences.exp() >= veto).all())


def _differences(trainer: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    if trainer.shape != sampler.shape or not trainer.numel():
        shapes = f"{tuple(trainer.shape)} and {tuple(sampler.shape)}"
        raise ValueError(f"log-probabilities of shapes {shapes}: pass both for the same tokens, at least one")
    return trainer.double() - sampler.double()


__all__ = ["agrees", "mean_ratio"]
