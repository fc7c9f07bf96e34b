"""PyTorch's own products of codes, as rivals of a linear layer with declared weights and activations.

`torch._scaled_mm` (fp8) and `torch._int_mm` (int8) on codes that are there already, and with the codes of the
activations made in the call by a function that torch.compile fuses. Deals in calls. Knows nothing about clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qimeng.vocabulary.lowprecision.forms import FP8, INT8, LEAST, scaled

Make = Callable[[], Callable[[], Any]]


def codes_of(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of each row, as the declaration has them."""
    codes, scale = scaled(values, INT8 if kind == "int8" else FP8)
    return (codes.round().to(torch.int8) if kind == "int8" else codes.to(torch.float8_e4m3fn)), scale


def rivals(layer: nn.Linear, x: Tensor, kind: str) -> dict[str, Make]:
    """Name to what makes the call, for activations of two dimensions."""
    right, right_scale = codes_of(layer.weight, kind)
    left, left_scale = codes_of(x, kind)
    made: dict[str, Make] = {"bf16 linear": lambda: partial(functional.linear, x, layer.weight)}
    if kind == "int8":
        made["_int_mm"] = lambda: partial(torch._int_mm, left, right.t())
        made["quantize + _int_mm + scale, compiled"] = partial(_compiled, _int8_layer, x, right, right_scale)
        return made
    columns, one = right_scale.t().contiguous(), (left_scale.max().reshape(()), right_scale.max().reshape(()))
    for fast in (True, False):
        word = "fast" if fast else "exact"
        product = partial(torch._scaled_mm, left, right.t(), out_dtype=torch.bfloat16, use_fast_accum=fast)
        made[f"_scaled_mm rows, {word}"] = partial(partial, product, scale_a=left_scale, scale_b=columns)
        made[f"_scaled_mm tensor, {word}"] = partial(partial, product, scale_a=one[0], scale_b=one[1])
        whole = partial(_fp8_layer, fast=fast)
        made[f"quantize + _scaled_mm rows, {word}, compiled"] = partial(_compiled, whole, x, right, columns)
    return made


def _compiled(function: Callable[..., Tensor], *arguments: Tensor) -> Callable[[], Any]:
    torch._dynamo.reset()
    call = partial(torch.compile(function, dynamic=False), *arguments)
    call()
    return call


def _int8_layer(x: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(LEAST) * (1 / INT8)
    left = (x.float() / scale).round().to(torch.int8)
    return (torch._int_mm(left, right.t()).float() * scale * right_scale.t()).to(x.dtype)


def _fp8_layer(x: Tensor, right: Tensor, columns: Tensor, fast: bool) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(LEAST) * (1 / FP8)
    left = (x.float() / scale).to(torch.float8_e4m3fn)
    return torch._scaled_mm(left, right.t(), scale, columns, out_dtype=x.dtype, use_fast_accum=fast)


__all__ = ["codes_of", "rivals"]
