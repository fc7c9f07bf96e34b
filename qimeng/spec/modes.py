"""Precision modes: which lower-precision shortcuts PyTorch itself may take.

Deals in PyTorch's global flags. Only the flags that every supported version has are set; mixing them with the newer
`fp32_precision` settings raises inside Inductor. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qimeng.errors import SpecError

_FLAGS = {"default": ("highest", True), "highest": ("highest", False), "high": ("high", True)}
"""Mode to the precision of fp32 matrix products and whether cuDNN's convolutions may use TF32."""


def set_mode(mode: str) -> None:
    """Set PyTorch's flags for `mode`: ``"default"`` (as PyTorch ships), ``"highest"`` (no TF32) or ``"high"``.

    Raises:
        SpecError: no such mode.
    """
    if mode not in _FLAGS:
        raise SpecError(f"unknown precision mode {mode!r}; known: {', '.join(_FLAGS)}")
    matmul, convolutions = _FLAGS[mode]
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def precision(mode: str) -> Iterator[None]:
    """PyTorch's flags for `mode` inside the block, what they were before after it."""
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_mode(mode)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions


__all__ = ["precision", "set_mode"]
