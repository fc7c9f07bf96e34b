"""What a case of the differential test is: a call of one operator, and how far its result may be from eager's.

Knows nothing about kernels, or about which operators there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ELEMENTWISE, HEAVY = 8.0, 32.0
"""Ulp that a result may be away from eager's or from float64's: of one operator, and of sums and compositions."""

EITHER_ZERO = frozenset(
    "relu relu6 clamp clamp_min clamp_max hardtanh hardswish hardsigmoid maximum minimum amax amin max min fmax fmin "
    "aminmax threshold softplus softshrink lerp native_layer_norm native_group_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training".split()
)
"""Operators by which a zero may have either sign: PyTorch's own kernels for the CPU and for GPUs differ in which of two
equal numbers is the larger (the second operand; +0), in whether a mean is subtracted before or after scaling, and
PyTorch takes softshrink apart into a product with 0."""

WAVES = frozenset("sin cos tan sinc".split())


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        operator: the ATen operator that it is a case of; for a composition what it is about.
        label: what is special about it; empty for the plain call.
        call: a function of tensors.
        takes: a letter a tensor (`experiments.trust.special_values.operands`).
        ulps: how far finite results may be from eager's or from float64's.
        scale: what those ulp are of, as a function of the same tensors in float64; None for the result itself.
        composed: no single operator has to be found in the graph.
    """

    operator: str
    label: str
    call: Callable[..., Any]
    takes: str = "x"
    ulps: float = ELEMENTWISE
    scale: Callable[..., Tensor] | None = None
    composed: bool = False

    @property
    def zeros(self) -> bool:
        """Whether the sign of a zero has to be PyTorch's."""
        return self.operator not in EITHER_ZERO

    def size_when_fast(self, *tensors: Tensor) -> Tensor | None:
        """What the ulp are of where special functions take few instructions.

        Waves are absolutely right up to 1e6, and so is the erf of half types (`qimeng.coder.template.triton.special`).
        An exponential is 2^(x log2(e)), whose product rounds by half an ulp: the error grows with |x|.
        """
        if self.operator == "erf" and torch.finfo(tensors[0].dtype).bits == 16:
            return torch.full((), 2.0**-18, dtype=torch.float64, device=tensors[0].device)  # absolutely right
        x = tensors[0].double().nan_to_num(0.0, 0.0, 0.0)
        if self.operator in ("sinh", "cosh"):
            return (torch.sinh(x).abs() if self.operator == "sinh" else torch.cosh(x)) * (1 + x.abs() / 32)
        if self.operator not in WAVES:
            return self.scale(*(t.double() for t in tensors)) if self.scale else None
        slope = 1 + torch.tan(x) ** 2 if self.operator == "tan" else torch.ones_like(x)
        return torch.where(x.abs() < 1e6, slope, 1e300)

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.operator}, {self.label}" if self.label else self.operator


__all__ = ["ELEMENTWISE", "HEAVY", "Case"]
