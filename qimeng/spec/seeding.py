"""Seeds of PyTorch's global generators.

Deals in one number. Knows nothing about what is drawn.
"""

from __future__ import annotations

import torch


def seed_generators(seed: int) -> None:
    """Start PyTorch's generators from `seed`: the CPU's, and those of every CUDA device once CUDA is in use.

    `torch.manual_seed` does the same, and for each kind of device that is not in use it also keeps the call and its
    formatted traceback. That takes milliseconds, more than a small module does, and memory at every call.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


__all__ = ["seed_generators"]
