"""Imitates on the CPU how a GPU lays out results: heads of an attention side by side, convolutions channels-last.

Group normalizations are contiguous, of contiguous operands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OtherLayouts(TorchFunctionMode):
    """Inside, attentions and convolutions return the other layout, whoever calls them; fake tensors as well."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").split(".")[0]
        if name == "native_group_norm" and not args[0].is_contiguous():
            raise RuntimeError("a GPU's kernel wants a contiguous operand")
        if name == "group_norm":
            args = (args[0].contiguous(), *args[1:])
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dim() == 4:
            if name == "scaled_dot_product_attention":
                return side_by_side(found)
            if name in ("conv2d", "convolution"):
                return found.contiguous(memory_format=torch.channels_last)
        return found


def side_by_side(found: Tensor) -> Tensor:
    """The heads of one position side by side; where they are so, the positions of one head."""
    turned = found.transpose(1, 2).contiguous().transpose(1, 2)
    return found.contiguous() if turned.stride() == found.stride() else turned


__all__ = ["OtherLayouts", "side_by_side"]
