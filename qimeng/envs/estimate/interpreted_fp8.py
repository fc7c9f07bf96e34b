"""fp8 (e4m3) in Triton's interpreter, rounded as a GPU rounds; the interpreter's own rounding drops a carry and NaN.

Deals in conversions. Knows nothing about kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend_fp8() -> None:
    """Have the interpreter convert between fp32 and fp8 by PyTorch."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    convert = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.dtype.scalar.is_fp32() and target.scalar.is_fp8e4nv():
            return TensorHandle(bits_of(source.data), tl.float8e4nv)
        if source.dtype.scalar.is_fp8e4nv() and target.scalar.is_fp32():
            return TensorHandle(numbers_of(source.data), tl.float32)
        return convert(self, source, target, rounding)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def bits_of(numbers: Any) -> Any:
    """fp32 rounded to fp8, as bits: to nearest even, at most 448 (PTX ISA, ``cvt.rn.satfinite.e4m3x2.f32``)."""
    held = torch.from_numpy(np.ascontiguousarray(numbers)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return held.view(torch.uint8).numpy()


def numbers_of(bits: Any) -> Any:
    """The numbers in fp32 that the bits of fp8 stand for."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.float8_e4m3fn).float().numpy()


__all__ = ["bits_of", "mend_fp8", "numbers_of"]
