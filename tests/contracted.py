"""Triton's interpreter with the multiply-adds that a compiler makes of products and sums.

A GPU's compiler leaves out the rounding of a product that is only added to something or subtracted from it, even where
the product is used elsewhere as well. Only in processes that interpret (`tests.interpreted`).
"""

from __future__ import annotations

from typing import Any

import numpy as np


def contract() -> None:
    """Contract fp32 products from now on, as LLVM does for NVIDIA's GPUs; a choice between two numbers keeps both."""
    from triton.runtime.interpreter import InterpreterBuilder

    multiply, plus, minus = (getattr(InterpreterBuilder, f"create_f{name}") for name in ("mul", "add", "sub"))

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        found = multiply(self, a, b)
        if found.data.dtype == np.float32:
            found.factors = (a.data, b.data)
        return found

    def create_fadd(self: Any, a: Any, b: Any) -> Any:
        found, first = plus(self, a, b), a if hasattr(a, "factors") else b
        if hasattr(first, "factors"):
            other = b if first is a else a
            found.data = _fma(first.factors, other.data)
            found.terms = (first.factors, getattr(other, "factors", None))
        return found

    def create_fsub(self: Any, a: Any, b: Any) -> Any:
        found = minus(self, a, b)
        if hasattr(a, "factors"):
            found.data = _fma(a.factors, -b.data)
        elif hasattr(b, "factors"):
            found.data = _fma((-b.factors[0], b.factors[1]), a.data)
        elif getattr(a, "terms", (None, None))[1] is not None:
            found.data = _fma(a.terms[0], _fma(a.terms[1], -b.data))
        return found

    InterpreterBuilder.create_fmul = create_fmul
    InterpreterBuilder.create_fadd = create_fadd
    InterpreterBuilder.create_fsub = create_fsub


def _fma(factors: tuple[Any, Any], more: Any) -> Any:
    with np.errstate(all="ignore"):
        return (np.multiply(*factors, dtype=np.float64) + more).astype(np.float32)


__all__ = ["contract"]
