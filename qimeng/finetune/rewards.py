"""What one turn of a coder is worth, and which right answers are learnt from.

Deals in numbers that a judge found. Knows nothing about models or tokens.

Source: Dr. Kernel (arXiv 2602.05885), equations 1, 2 and 7 to 9. Kernel-Smith (arXiv 2603.28342) takes the speedup over
the parent where Dr. Kernel takes the one over PyTorch; that choice is the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

MOST_SPEEDUP = 3.0
"""Speedups above it are worth no more (Dr. Kernel, equation 1)."""

SHARE_FROM, SHARE_WIDTH = 0.3, 0.1
"""Threshold and width of `kept_probability` (Dr. Kernel, equation 9: tau and s)."""


def profile_share(generated_ms: float, total_ms: float) -> float:
    """PR: the share of the device time that generated kernels take, 0 to 1 (Dr. Kernel, equation 7).

    Args:
        generated_ms: device milliseconds of a call in generated kernels.
        total_ms: of the whole call.

    Raises:
        ValueError: the times are no times of a call.

    >>> profile_share(0.5, 2.0)
    0.25
    """
    if not 0 <= generated_ms <= total_ms or total_ms <= 0:
        raise ValueError(f"generated kernels took {generated_ms} ms of {total_ms} ms: pass both times of the same call")
    return generated_ms / total_ms


def turn_reward(right: bool, speedup: float = 0.0, share: float = 0.0) -> float:
    """The reward of one turn: C + C * min(speedup, 3) + C * PR, C = 1 if right, else 0 (Dr. Kernel, equation 8).

    With a share of 0 it is equation 1.

    Args:
        right: whether all gates passed.
        speedup: time of what it is compared with over the time of the answer.
        share: PR (`profile_share`).

    >>> turn_reward(True, 2.0, 0.5), turn_reward(True, 9.0), turn_reward(False, 9.0, 1.0)
    (3.5, 4.0, 0.0)
    """
    return 1.0 + min(speedup, MOST_SPEEDUP) + share if right else 0.0


def returns(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """G of each turn: its reward and the discounted ones after it (Dr. Kernel, equation 2; gamma is 1 there).

    >>> returns([0.0, 1.0, 3.0]), returns([0.0, 1.0, 3.0], gamma=0.5)
    ([4.0, 4.0, 3.0], [1.25, 2.5, 3.0])
    """
    found, after = [], 0.0
    for reward in reversed(rewards):
        after = reward + gamma * after
        found.append(after)
    return found[::-1]


def kept_probability(right: bool, share: float) -> float:
    """PRS: how likely an answer is learnt from, clip((PR - 0.3) / 0.1, 0, 1); 1 if it is wrong (equation 9).

    >>> [round(kept_probability(True, s), 3) for s in (0.25, 0.3, 0.35, 0.4, 0.9)], kept_probability(False, 0.0)
    ([0.0, 0.0, 0.5, 1.0, 1.0], 1.0)
    """
    return min(max((share - SHARE_FROM) / SHARE_WIDTH, 0.0), 1.0) if right else 1.0


def kept(right: bool, share: float, rng: random.Random) -> bool:
    """A draw with the probability `kept_probability`."""
    return rng.random() < kept_probability(right, share)


__all__ = ["kept", "kept_probability", "profile_share", "returns", "turn_reward"]
