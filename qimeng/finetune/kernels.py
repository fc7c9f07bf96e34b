"""How a model that is trained computes: which kernels attend, and a last layer in float32.

Deals in PyTorch's choices of kernels, and in hidden states and scores. Knows nothing about what is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of attention that take any length at once. cuDNN's are planned anew for each length of a batch."""


def exact_logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Scores of all tokens after `hidden` (n x width), computed in float32 whatever surrounds it (n x vocabulary).

    In bfloat16 a score near 20 is rounded by up to 0.06. A sampler and a trainer, whose hidden states differ in their
    last bits, round otherwise, and `qimeng.finetune.mismatch` drops conversations for such differences.
    """
    bias = None if head.bias is None else head.bias.float()
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)


__all__ = ["ANY_LENGTH", "exact_logits"]
