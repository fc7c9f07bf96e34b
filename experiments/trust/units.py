"""Triton's interpreter with the errors that a GPU's units may have, so that a CPU shows what they would.

The interpreter computes functions exactly and rounds once. On a GPU, Triton's ``/`` is off by up to 2 ulp
(``div.full``), `tl.exp` and `tl.exp2` take an approximate unit (PTX ISA 8.7, 9.7.3), and libdevice's sine, cosine and
erf are compiled to drop numbers below 2^-126. Deals in numpy functions of fp32. Knows nothing about kernels. Call it
in a process that runs the interpreter, after `qimeng.envs.estimate.interpreter.mend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

TINY = np.finfo(np.float32).tiny
LOG2E = np.float32(1.4426950408889634)
ULP = 2.0**-23

Exact = Callable[[Any], Any]


def approximate() -> None:
    """Let the interpreter's functions of fp32 err as far as their specification allows."""
    _replace("exp", lambda x: np.exp2((x * LOG2E).astype(np.float64)), 2 * ULP)
    _replace("exp2", np.exp2, 2 * ULP, flushes=True)
    _replace("log", np.log, ULP)
    _replace("log2", np.log2, ULP)
    for name, exact in (
        ("sin", np.sin),
        ("cos", np.cos),
        ("erf", np.vectorize(math.erf, otypes=[float])),
        ("sqrt", np.sqrt),
    ):
        _replace(name, exact, ULP, flushes=True)
    _replace("rsqrt", lambda x: 1 / np.sqrt(x), 1.1 * ULP, flushes=True)
    _divide()


def _replace(name: str, exact: Exact, error: float, flushes: bool = False) -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    before = getattr(InterpreterBuilder, f"create_{name}")

    def create(self: Any, handle: Any) -> Any:
        if not handle.dtype.scalar.is_fp32():
            return before(self, handle)
        x = np.asarray(handle.data, np.float32)
        with np.errstate(all="ignore"):
            y = exact(_flushed(x) if flushes else x if name == "exp" else x.astype(np.float64))
            y = np.where(np.frexp(y)[0] == 0.5, y, _off(y, x, error)).astype(np.float32)  # powers of 2 are met
            return TensorHandle(_flushed(y).astype(np.float32) if flushes else y, handle.dtype.scalar)

    setattr(InterpreterBuilder, f"create_{name}", create)


def _divide() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    before = InterpreterBuilder.create_fdiv

    def create(self: Any, left: Any, right: Any) -> Any:
        if not left.dtype.scalar.is_fp32():
            return before(self, left, right)
        x, y = np.asarray(left.data, np.float32), np.asarray(right.data, np.float32)
        with np.errstate(all="ignore"):
            quotient = x.astype(np.float64) / y
            quotient = _off(quotient, np.broadcast_to(y, quotient.shape), 1.5 * ULP)
            return TensorHandle(quotient.astype(np.float32), left.dtype.scalar)

    InterpreterBuilder.create_fdiv = create


def _off(exact: Any, x: Any, error: float) -> Any:
    """`exact` up or down by a relative `error`, as the last bit of `x` says; 1 is met by every unit."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).reshape(np.shape(x))
    return np.where(np.abs(exact) == 1, exact, exact * (1 + np.where(bits & 1, error, -error)))


def _flushed(x: Any) -> Any:
    x = np.asarray(x, np.float64)
    return np.where(np.abs(x) < TINY, np.copysign(0.0, x), x)


__all__ = ["approximate"]
