"""What a worker takes over of TorchInductor's work in another process, whose folder it may read but not write.

Deals in files of `torch.compiler.save_cache_artifacts`. Knows nothing about which programs use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
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
    from torch._inductor.remote_cache import LocalCacheBackend

    put = LocalCacheBackend._put
    if getattr(put, "may_fail", False):
        return

    def put_or_not(self: LocalCacheBackend, key: str, data: bytes) -> Any:
        with suppress(PermissionError):
            put(self, key, data)

    put_or_not.may_fail = True  # type: ignore[attr-defined]
    LocalCacheBackend._put = put_or_not


__all__ = ["take_over"]
