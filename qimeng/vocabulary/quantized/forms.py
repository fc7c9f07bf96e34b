"""How activations are made codes of 8 bits and read again.

Deals in tensors: symmetric codes with a scale for each row, for each group of a row, or one for all. Knows nothing
about modules or kernels.
"""

from __future__ import annotations

import torch

from qimeng.errors import SpecError
from qimeng.spec.declared import ActivationForm
from qimeng.vocabulary.lowprecision.forms import FP8, INT8, LEAST, SIDES, widened

WHOLE = "tensor"
"""What follows the colon where all activations of a layer share one scale."""


class Quantized(ActivationForm):
    """Codes of 8 bits with scales that make the largest magnitude of a row the largest code.

    Scales are found anew in each call, in fp32. Zeros stay zeros. Where a row has a NaN or an infinity, all of it
    becomes NaN. With one scale for all rows, that holds for all of them; with one for each group, for the group.

    Attributes:
        kind: ``"int8"`` (codes of -127 to 127) or ``"fp8"`` (e4m3, up to 448).
        whole: one scale for all rows.
        group: neighbours of a row that share a scale, the last ones filled up with zeros; 0 for the whole row.
    """

    def __init__(self, kind: str, whole: bool, group: int = 0):
        self.kind, self.whole, self.group = kind, whole, group
        self.text = f"{kind}:{WHOLE}" if whole else f"{kind}:1x{group}" if group else kind

    def declared(self, x: torch.Tensor) -> torch.Tensor:
        """Round to the nearest code, ties to even, and back."""
        if not self.group:
            return self.read(x)
        depth = x.shape[-1]
        filled = torch.nn.functional.pad(x, (0, -depth % self.group)) if depth % self.group else x
        found = self.read(filled.reshape(*filled.shape[:-1], -1, self.group)).view(filled.shape)
        return found[..., :depth].contiguous() if depth % self.group else found

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """The same, with a scale for each row of `x` or for all."""
        values = x.to(torch.float32)
        over = list(range(values.dim())) if self.whole else [-1]
        largest = values.abs().amax(over, keepdim=True)
        most = FP8 if self.kind == "fp8" else INT8
        scale = largest.clamp_min(LEAST) * (1 / most) + largest * 0.0  # an infinity makes it NaN: int8 has neither
        exact = values / scale
        codes = exact.to(torch.float8_e4m3fn) if self.kind == "fp8" else exact.round().to(torch.int8)
        return widened(codes, scale, x.dtype)


def int8(rest: str) -> Quantized:
    """The form of ``activations="int8"``, or ``"int8:tensor"`` for one scale.

    Raises:
        SpecError: something else follows the colon.
    """
    return _form("int8", rest)


def fp8(rest: str) -> Quantized:
    """The form of ``activations="fp8"``, ``"fp8:tensor"`` for one scale, or ``"fp8:1x128"`` for one a group of a row.

    Raises:
        SpecError: something else follows the colon.
    """
    group = rest.removeprefix("1x")
    if group != rest and group.isdecimal() and int(group) in SIDES:
        return Quantized("fp8", False, int(group))
    return _form("fp8", rest)


def _form(kind: str, rest: str) -> Quantized:
    if rest not in ("", WHOLE):
        text = f"activations='{kind}:{rest}'"
        groups = f", or for groups of a row ('fp8:1x128'; {', '.join(map(str, SIDES))})" if kind == "fp8" else ""
        raise SpecError(f"{text}: a scale is for each row ('{kind}') or for all rows ('{kind}:{WHOLE}'){groups}")
    return Quantized(kind, rest == WHOLE)


__all__ = ["WHOLE", "Quantized", "fp8", "int8"]
