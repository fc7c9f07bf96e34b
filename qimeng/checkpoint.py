"""Checkpoints of PyTorch, each a file that is written whole or not at all.

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


__all__ = ["write_checkpoint"]
