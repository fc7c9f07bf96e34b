"""What numbers a loop nest computes with.

Deals in names of PyTorch's dtypes. Knows nothing about a language's.
"""

from __future__ import annotations

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""What a nest may hold."""

CONVERTED = ("float8_e4m3fn",)
"""What a nest may read, and converts at once; or write, where it computes no further with it."""


def compute_dtype(dtype: str) -> str:
    """The dtype that arithmetic on values of `dtype` is done in."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def is_float(dtype: str) -> bool:
    """True for floating dtypes."""
    return dtype.startswith(("float", "bfloat"))


__all__ = ["CONVERTED", "DTYPES", "compute_dtype", "is_float"]
