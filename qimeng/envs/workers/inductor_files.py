"""What a worker takes over of TorchInductor's work in another process, whose folder it may read but not write.

Deals in files of `torch.compiler.save_cache_artifacts`. Knows nothing about which programs use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch


def take_over(files: Sequence[str]) -> None:
    """Have what torch.compile compiled ahead; nothing foreign has run in this process."""
    _do_without_writing()
    for file in files:
        torch.compiler.load_cache_artifacts(Path(file).read_bytes())


def _do_without_writing() -> None:
    """Let tuning go on where its outcome cannot be stored.

    A kernel whose configuration is looked for at its first call (``coordinate_descent_tuning``) stores it beside its
    text, in the folder of the process that wrote the text. PyTorch raises where that folder is not to be written.
    """
    from torch._inductor import codecache

    write = getattr(codecache, "write_atomic", None)
    if write is None or hasattr(write, "__wrapped__"):
        return

    @wraps(write)
    def write_or_not(*arguments: Any, **named: Any) -> None:
        with suppress(PermissionError):
            write(*arguments, **named)

    codecache.write_atomic = write_or_not


__all__ = ["take_over"]
