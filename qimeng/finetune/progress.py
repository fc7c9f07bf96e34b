"""What trainings have in common: the course of the learning rate, and checkpoints that survive a kill.

Deals in numbers and files. Knows nothing about models.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

WARM, END = 0.05, 0.05
"""Share of a training in which the learning rate rises, and what is left of it at the end."""


def schedule(share: float) -> float:
    """The learning rate over its highest, `share` of the way through: it rises, then falls along a cosine.

    >>> [round(schedule(s), 2) for s in (0.0, 0.025, 0.05, 1.0)]
    [0.0, 0.5, 1.0, 0.05]
    """
    if share < WARM:
        return share / WARM
    return END + (1 - END) / 2 * (1 + math.cos(math.pi * (share - WARM) / (1 - WARM)))


def adamw(weights: Iterable[torch.Tensor], rate: float) -> torch.optim.AdamW:
    """AdamW with betas of 0.9 and 0.95 and no decay, in few kernels on a GPU."""
    some = list(weights)
    return torch.optim.AdamW(
        some, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=all(w.device.type == "cuda" for w in some)
    )


def keep(path: Path, parts: Mapping[str, Any]) -> None:
    """Write a checkpoint; one that is killed meanwhile leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(parts), path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def kept(path: Path, settings: Mapping[str, Any], device: str) -> dict[str, Any] | None:
    """The checkpoint of a training with these `settings`; None where there is none, or one of other settings."""
    if not path.exists():
        return None
    found: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return found if found["settings"] == dict(settings) else None


def put(weights: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Write `values` into parameters of the same names, in place."""
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(values[name])


__all__ = ["adamw", "keep", "kept", "put", "schedule"]
