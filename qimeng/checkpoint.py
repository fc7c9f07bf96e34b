"""Checkpoints of PyTorch, and the texts beside them, each a file that is written whole or not at all.

Deals in files. Knows nothing about what is trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qimeng.errors import QimengError


def write_checkpoint(state: Mapping[str, Any], path: Path, error: type[QimengError]) -> None:
    """Write a checkpoint; one that is killed meanwhile, or finds no room, leaves the file that was there.

    Args:
        state: what `torch.load` shall give with `weights_only=True`.
        path: of the file; its folder is made.
        error: what is raised where it cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(state), partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as found:  # PyTorch raises the latter on a full disk
        partial.unlink(missing_ok=True)
        reason = found.strerror if isinstance(found, OSError) else str(found).split("\n")[0]
        text = f"{path} cannot be written ({reason}): make room on its disk, then run the same command again"
        raise error(text) from found


def write_text(text: str, path: Path) -> None:
    """Write a small file beside checkpoints, whole or not at all as well.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    """What `write_checkpoint` wrote, with tensors on `device`.

    Raises:
        ValueError: the file is damaged, or cannot be read.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # of many classes, by where the file is damaged
        raise ValueError(f"the file cannot be read ({type(error).__name__}: {error})") from error
    return state


__all__ = ["read_checkpoint", "write_checkpoint", "write_text"]
