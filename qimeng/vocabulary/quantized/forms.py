"""How activations are made codes of 8 bits and read again.

Deals in tensors: symmetric codes with a scale for each row, or one for all. Knows nothing about modules or kernels.
"""

from __future__ import annotations

import torch

from qimeng.errors import SpecError
from qimeng.spec.declared import ActivationForm
from qimeng.vocabulary.lowprecision.forms import FP8, INT8, LEAST, widened

WHOLE = "tensor"
"""What follows the colon where all activations of a layer share one scale."""


class Quantized(ActivationForm):
    """Codes of 8 bits with scales that make the largest magnitude of a row the largest code.

    Scales are found anew in each call, in fp32. Zeros stay zeros. Where a row has a NaN or an infinity, all of it
    becomes NaN. With one scale for all rows, that holds for all of them.

    Attributes:
        kind: ``"int8"`` (codes of -127 to 127) or ``"fp8"`` (e4m3, up to 448).
        whole: one scale for all rows.
    """

    def __init__(self, kind: str, whole: bool):
        self.kind, self.whole = kind, whole
        self.text = f"{kind}:{WHOLE}" if whole else kind

    def declared(self, x: torch.Tensor) -> torch.Tensor:
        """Round to the nearest code, ties to even, and back."""
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
    """The form of ``activations="fp8"``, or ``"fp8:tensor"`` for one scale.

    Raises:
        SpecError: something else follows the colon.
    """
    return _form("fp8", rest)


def _form(kind: str, rest: str) -> Quantized:
    if rest not in ("", WHOLE):
        text = f"activations='{kind}:{rest}'"
        raise SpecError(f"{text}: a scale is for each row ('{kind}') or for all rows ('{kind}:{WHOLE}')")
    return Quantized(kind, rest == WHOLE)


__all__ = ["WHOLE", "Quantized", "fp8", "int8"]
