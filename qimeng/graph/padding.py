"""Encoders of `torch.nn` with padded sequences, as PyTorch runs them without gradients.

There `TransformerEncoder` takes sequences that end in padding out of their padding, computes them alone, and puts 0 in
the place of the padding. torch.export follows the code for all other cases, which computes the padding like the rest.
Deals in what to add to that. Knows nothing about the graph.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import TransformerEncoder


def as_without_gradients(module: torch.nn.Module) -> None:
    """Let the encoders in `module` put 0 in the place of padding, in their input and in their last layer's result."""
    for part in module.modules():
        if type(part) is TransformerEncoder and _takes_padding_out(part):
            _fill(part)


def _takes_padding_out(encoder: TransformerEncoder) -> bool:
    usable = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    return bool(usable and getattr(encoder, "use_nested_tensor", False) and not encoder.layers[0].training)


def _fill(encoder: TransformerEncoder) -> None:
    encoder.use_nested_tensor = False
    padding: list[Tensor | None] = [None]
    parameters = inspect.signature(TransformerEncoder.forward)
    checked = getattr(encoder, "mask_check", True)

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = parameters.bind(encoder, *args, **kwargs).arguments
        src, mask = given["src"], given.get("src_key_padding_mask")
        padding[0] = None
        if mask is None or given.get("mask") is not None or src.dim() != 3:
            return None
        padding[0] = _at_the_end(mask.bool(), checked)[..., None]
        given["src"] = src.masked_fill(padding[0], 0.0)
        return (), {name: value for name, value in given.items() if name != "self"}

    def after(_: Any, args: Any, output: Tensor) -> Tensor:
        return output if padding[0] is None else output.masked_fill(padding[0], 0.0)

    encoder.register_forward_pre_hook(before, with_kwargs=True)
    encoder.layers[-1].register_forward_hook(after)


def _at_the_end(padding: Tensor, checked: bool) -> Tensor:
    """`padding` of [batch, positions]; where it is `checked`, nothing unless it is at the end of every sequence."""
    if not checked:
        return padding
    inside = padding[:, :-1] & ~padding[:, 1:]
    return padding & ~inside.any()


__all__ = ["as_without_gradients"]
