"""The clipped policy loss of an update, over the tokens that were sampled.

Deals in log-probabilities and advantages. Sources: PPO (arXiv 1707.06347), equation 7; bounds of their own below and
above, and the mean over all tokens, after DAPO (arXiv 2503.14476), sections 3.1 and 3.3; their values as in Dr.
Kernel's settings (0.2 and 0.28).
"""

from __future__ import annotations

import torch

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""How far a token's ratio counts below and above 1."""


def policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    low: float = CLIP_LOW,
    high: float = CLIP_HIGH,
) -> torch.Tensor:
    """-mean over tokens of min(r * A, clip(r, 1 - low, 1 + high) * A), r = exp(new - old).

    The upper bound is farther away, so that an unlikely token may become likelier in one update. `old` is the trainer's
    before the update, not the sampler's: how the two differ is looked at apart (`qimeng.finetune.mismatch`).

    Args:
        new: log-probabilities under the weights that are trained (any shape).
        old: the same before the update; no gradient.
        advantages: A of each token, of a shape that broadcasts.
        mask: which tokens were sampled, true or false.
        low: clip below 1.
        high: clip above 1.

    Returns:
        The loss, a scalar; 0 where the mask is empty.
    """
    ratio = (new - old.detach()).exp()
    each = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    weights = mask.to(each.dtype)
    return -(each * weights).sum() / weights.sum().clamp(min=1)


def clipped_share(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    low: float = CLIP_LOW,
    high: float = CLIP_HIGH,
) -> float:
    """Share of the sampled tokens that give no gradient because their ratio is beyond the bounds; as `policy_loss`."""
    ratio = (new - old).detach().exp()
    beyond = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    return float((beyond & mask.bool()).sum() / mask.sum().clamp(min=1))


__all__ = ["CLIP_HIGH", "CLIP_LOW", "clipped_share", "policy_loss"]
