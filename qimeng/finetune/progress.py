"""What trainings have in common: the course of the learning rate, and checkpoints that survive a kill.

Deals in numbers and files. Knows nothing about models.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qimeng.checkpoint import read_checkpoint, write_checkpoint
from qimeng.finetune.weights import FinetuneError

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
    """Write a checkpoint; one that is killed meanwhile, or finds no room, leaves the old one.

    Raises:
        FinetuneError: it cannot be written.
    """
    write_checkpoint(parts, path, FinetuneError)


def kept(path: Path, settings: Mapping[str, Any], device: str) -> dict[str, Any] | None:
    """The checkpoint of a training with these `settings`; None where there is none.

    Raises:
        FinetuneError: it is damaged, or of other settings: what is there is never written over.
    """
    if not path.exists():
        return None
    try:
        found = read_checkpoint(path, device)
    except ValueError as error:
        raise FinetuneError(f"{path}: {error}: delete it, and the training begins anew") from error
    before: Mapping[str, Any] = found.get("settings", {})
    names = [name for name in dict.fromkeys((*settings, *before)) if settings.get(name) != before.get(name)]
    if names:
        changed = ", ".join(f"{name} {before.get(name)}, now {settings.get(name)}" for name in names)
        text = f"{path.parent} holds a training with other settings ({changed})"
        raise FinetuneError(f"{text}: name another folder, or delete {path.name} there to begin anew")
    return found


def fingerprint(model: Any, *data: Sequence[int], adapters: bool = False) -> str:
    """Hash of some numbers of each weight, and of `data`: what a training begins with.

    Numbers are rounded to bfloat16, so that it is the same whatever the weights are kept in.

    Args:
        model: with adapters or without.
        data: numbers of each row.
        adapters: whether adapters' weights count.
    """
    known = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        if adapters or "lora_" not in name:
            known.update(weight.detach().flatten()[:64].bfloat16().float().cpu().numpy().tobytes())
    for numbers in data:
        known.update(array("q", numbers).tobytes())
    return known.hexdigest()


def put(weights: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Write `values` into parameters of the same names, in place."""
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(values[name])


__all__ = ["adamw", "fingerprint", "keep", "kept", "put", "schedule"]
