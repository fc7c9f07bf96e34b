"""Reads planners that were trained on the first observation (`-v0`), whose features named four families of kernels.

Deals in the value head's weights: the policy reads texts, which are the same. The first observation had four numbers of
each region's family, one of them 1. Now there is the hash of the family's word. The new weights give a value for each
of the four that equals the old one but for rounding, and for any other family about that of ``"other"``.
"""

from __future__ import annotations

import torch

from qimeng.envs.gym.observation import FEATURES, REGION_SLOTS
from qimeng.envs.gym.words import WIDTH, vector

FORMAT = 2
"""Of the folders of such planners."""

TEXTS = 2
"""Version of the texts that they read."""

FAMILIES = ("pointwise", "reduction", "gemm", "other")
"""What their features named, in this order."""

KEPT = 5
"""Numbers of a region before those of its family, the same in both observations."""

REGION = KEPT + 1 + 2 * WIDTH
"""Numbers of a region now: those before, whether there is one, its family's word, its operators."""

SINGLE = len(FEATURES) - REGION_SLOTS * REGION
"""Numbers that are about no region, the same in both observations."""

COUNT = SINGLE + REGION_SLOTS * (KEPT + len(FAMILIES))
"""Numbers of the first observation."""


def translated(weights: torch.Tensor) -> torch.Tensor:
    """The first layer of a value head for today's features.

    For a region of the family f, whose vector is v(f), the old layer adds w(f). The new one adds
    ``w(other) + D v(f)`` with the least D such that ``D v(f) = w(f) - w(other)`` for the four families.

    Args:
        weights: for the first observation: outputs x (hidden + `COUNT`).

    Returns:
        outputs x (hidden + number of today's features).
    """
    hidden = weights.shape[1] - COUNT
    known = torch.stack([torch.from_numpy(vector(f).copy()).double() for f in FAMILIES], dim=1)  # WIDTH x families
    found = [weights[:, : hidden + SINGLE].double()]
    for region in weights[:, hidden + SINGLE :].double().split(KEPT + len(FAMILIES), dim=1):
        families = region[:, KEPT:]
        other = families[:, FAMILIES.index("other")].unsqueeze(1)
        word = (families - other) @ torch.linalg.pinv(known)
        found += [region[:, :KEPT], other, word, torch.zeros_like(word)]
    return torch.cat(found, dim=1).to(weights.dtype)


__all__ = ["COUNT", "FAMILIES", "FORMAT", "TEXTS", "translated"]
