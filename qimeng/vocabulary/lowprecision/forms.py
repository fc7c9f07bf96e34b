"""How weights are stored in 8 and 4 bits, and read again.

Deals in tensors: symmetric codes and their scales. Weights must be finite. Knows nothing about modules or kernels.
"""

from __future__ import annotations

import torch

from qimeng.errors import SpecError
from qimeng.spec.declared import Maker, WeightForm

LEAST = 1e-30
"""Magnitude below which a row or group of weights counts as zeros: its scale stays a normal number."""

INT8, INT4, FP8 = 127, 7, 448
"""Largest code; the smallest is its negative."""

GROUP = 128
"""Weights along the contracted axis that share a scale of int4, where the declaration does not say it."""

GROUPS = (16, 32, 64, 128, 256, 512, 1024)
"""Sizes that a group may have."""


SIDES = (32, 64, 128, 256)
"""Sizes that a side of a block may have."""


def scaled(weight: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` in fp32 over the scale of its last axis, and the scales, which make the largest magnitude `most`.

    A tensor over a number is rounded otherwise on a GPU than on a CPU; times a number, and over a tensor, it is not.
    """
    values = weight.to(torch.float32)
    scale = values.abs().amax(-1, keepdim=True).clamp_min(LEAST) * (1 / most)
    return values / scale, scale


def widened(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that codes with scales stand for, rounded once to `dtype`."""
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    return (codes.to(exact) * scale.to(exact)).to(dtype)


class Int8(WeightForm):
    """Codes of -127 to 127, one fp32 scale for each output channel."""

    text = "int8"

    def declared(self, weight: torch.Tensor) -> torch.Tensor:
        """Round to the nearest code, ties to even, and back."""
        codes, scale = scaled(weight, INT8)
        return widened(codes.round().to(torch.int8), scale, weight.dtype)


class Fp8(WeightForm):
    """Numbers of 8 bits (e4m3) up to 448, one fp32 scale for each output channel."""

    text = "fp8"

    def declared(self, weight: torch.Tensor) -> torch.Tensor:
        """Round to the nearest such number, ties to even, and back."""
        codes, scale = scaled(weight, FP8)
        return widened(codes.to(torch.float8_e4m3fn), scale, weight.dtype)


class Fp8Blocks(WeightForm):
    """Numbers of 8 bits (e4m3) up to 448, one fp32 scale for each block of outputs and neighbours along the depth.

    As DeepSeek-V3 stores its weights, in blocks of 128 x 128 (arXiv 2412.19437, 3.3.1).

    Attributes:
        rows: outputs of a block.
        depth: neighbours along the contracted axis of a block; what overhangs the weight is filled up with zeros.
    """

    def __init__(self, rows: int, depth: int):
        self.rows, self.depth, self.text = rows, depth, f"fp8:{rows}x{depth}"

    def declared(self, weight: torch.Tensor) -> torch.Tensor:
        """Round to the nearest such number of each block, ties to even, and back."""
        rows, depth = weight.shape
        filled = torch.nn.functional.pad(weight, (0, -depth % self.depth, 0, -rows % self.rows))
        blocks = filled.view(-(-rows // self.rows), self.rows, -1, self.depth).to(torch.float32)
        scale = blocks.abs().amax((1, 3), keepdim=True).clamp_min(LEAST) * (1 / FP8)
        found = widened((blocks / scale).to(torch.float8_e4m3fn), scale, weight.dtype)
        return found.view(filled.shape)[:rows, :depth].contiguous()


class Int4(WeightForm):
    """Codes of -7 to 7, two to a byte, one fp32 scale for each group of neighbours along the contracted axis.

    Attributes:
        group: codes that share a scale; the last group of a row is filled up with zeros.
    """

    def __init__(self, group: int = GROUP):
        self.group, self.text = group, f"int4:{group}"

    def declared(self, weight: torch.Tensor) -> torch.Tensor:
        """Round each group to the nearest codes, ties to even, pack them, and back."""
        rows, depth = weight.shape
        groups = -(-depth // self.group)
        filled = torch.nn.functional.pad(weight, (0, groups * self.group - depth))
        codes, scale = scaled(filled.view(rows, groups, self.group), INT4)
        codes = unpacked(packed(codes.round().to(torch.int8).view(rows, -1))).view(rows, groups, self.group)
        return widened(codes, scale, weight.dtype).view(rows, -1)[:, :depth].contiguous()


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two neighbouring codes of -8 to 7 to a byte, the first in its low half."""
    pairs = codes.view(codes.shape[0], -1, 2)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """The codes that `packed` packed."""
    return torch.stack([(pairs << 4) >> 4, pairs >> 4], -1).view(pairs.shape[0], -1)


def by_channel(form: WeightForm) -> Maker:
    """What makes `form`, which has a scale for each output channel; it raises `SpecError` where a colon follows."""

    def make(rest: str) -> WeightForm:
        if rest:
            text = f"weights='{form.text}:{rest}'"
            raise SpecError(f"{text}: {form.text} has a scale for each output channel and takes no group size")
        return form

    return make


def fp8(rest: str) -> WeightForm:
    """The form of ``weights="fp8"``, or ``"fp8:128x128"`` for a scale of each block.

    Raises:
        SpecError: what follows the colon is no block of two of `SIDES`.
    """
    if not rest:
        return Fp8()
    sides = rest.split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) in SIDES for side in sides):
        sizes = ", ".join(map(str, SIDES))
        raise SpecError(f"weights='fp8:{rest}': a block is outputs x depth, such as 128x128, each one of {sizes}")
    return Fp8Blocks(*map(int, sides))


def int4(rest: str) -> Int4:
    """The form of ``weights="int4"``, or ``"int4:64"`` for groups of 64.

    Raises:
        SpecError: what follows the colon is not one of `GROUPS`.
    """
    if rest and not (rest.isdecimal() and int(rest) in GROUPS):
        sizes = ", ".join(map(str, GROUPS))
        raise SpecError(f"weights='int4:{rest}': the group size must be one of {sizes} (without one: {GROUP})")
    return Int4(int(rest) if rest else GROUP)


__all__ = [
    "FP8", "GROUP", "GROUPS", "INT4", "INT8", "LEAST", "SIDES", "Fp8", "Fp8Blocks", "Int4", "Int8", "by_channel", "fp8",
    "int4", "packed", "scaled", "unpacked", "widened",
]  # fmt: skip
