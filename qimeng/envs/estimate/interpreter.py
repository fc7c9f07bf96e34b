"""The process in which candidates run where there is no GPU: the worker, with kernels run by Triton's interpreter.

Corrects and completes Triton's interpreter so that results match a GPU's: rounding to bf16, products of bf16 operands,
operands that tensor cores cut to TF32, approximate units, scans (`interpreted_folds`), fp8 (`interpreted_fp8`),
autotuned kernels. Knows nothing about specifications or verdicts. Must be started with ``TRITON_INTERPRET=1`` in the
environment, in a process that has not imported Triton.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np

from qimeng.envs.estimate.interpreted_folds import mend_folds
from qimeng.envs.estimate.interpreted_fp8 import mend_fp8, numbers_of
from qimeng.envs.estimate.interpreter_speed import quicken
from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.worker import main as work
from qimeng.envs.workers.worker_setup import Setup

ENVIRONMENT = {"TRITON_INTERPRET": "1"}
"""Environment variables with which `main` has to be started."""

LACKS = ("NotImplementedError", "active drivers", "Unsupported data type", "unsupported data type", "libdevice")
"""Words in the error of a kernel that uses what the interpreter lacks; such a kernel may be right."""

_TF32_BITS = np.uint32(0xFFFFE000)
"""What a tensor core sees of an fp32 operand: the hardware drops the low 13 bits."""


def ready() -> None:
    """Import Triton as an interpreter, once, in a server of interpreting processes; before it forks."""
    os.environ.update(ENVIRONMENT)
    import triton.language  # noqa: F401


def main(channel: Channel, setup: Setup) -> None:
    """Patch the interpreter, then answer the judge like any worker."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("the interpreting worker needs TRITON_INTERPRET=1 before Triton is imported")
    mend()
    work(channel, setup)


@cache
def mend() -> None:
    """Round to bf16, multiply bf16 and TF32 operands, and round `fma` once, as a GPU does.

    Autotuners take their first choice. A kernel need not wait for the one before it. A truth that is broadcast stays
    one; the interpreter would make a number of it. Another call changes nothing.
    """
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    spread = InterpreterBuilder.create_splat
    tune = Autotuner.run

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if d.data.dtype == np.int32:  # float64 holds such sums, and numpy multiplies its matrices quickly
            wide = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return type(d)(wide.astype(np.int32) + d.data, d.dtype.scalar)
        tf32 = str(precision).rsplit(".", 1)[-1].upper() == "TF32"
        return multiply(self, _as_seen(a, tf32), _as_seen(b, tf32), d, precision, imprecise)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar.is_fp32() and target.scalar.is_bf16():
            return _rounded(source)
        if source.dtype.scalar.is_bf16() and target.scalar.is_fp32():
            return _as_seen(source, False)
        if source.dtype.scalar.is_int() and target.scalar.is_bf16():  # else their bits would be taken for a bf16's
            return _rounded(TensorHandle(source.data.astype(np.float32), tl.float32))
        return cast(self, source, target)

    def create_splat(self: Any, result: Any, one: Any) -> Any:
        if one.data.dtype == np.bool_:
            return TensorHandle(np.full(result.shape, one.data.reshape(-1)[0]), tl.int1)
        return spread(self, result, one)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        with np.errstate(all="ignore"):
            exact = np.multiply(x.data, y.data, dtype=np.result_type(x.data, np.float64)) + z.data
            return type(z)(exact.astype(z.data.dtype), z.dtype.scalar)

    def first_only(self: Any, *args: Any, **options: Any) -> Any:
        self.configs = self.configs[:1]
        return tune(self, *args, **options)

    def create_inline_asm(self: Any, text: str, constraints: str, values: list[Any], *unused: Any) -> Any:
        return _Units.run(text, values)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    InterpreterBuilder.create_inline_asm, InterpreterBuilder.create_fma = create_inline_asm, create_fma
    InterpreterBuilder.create_splat = create_splat
    InterpreterBuilder.rounds_to_bfloat16 = True  # programs ask for it (`qimeng.program.emit`)
    Autotuner.run = first_only
    for name in ("gdc_wait", "gdc_launch_dependents"):  # one kernel runs after the other here
        setattr(tl.extra.cuda, name, _nothing)
    mend_folds()
    mend_fp8()
    quicken()


def _nothing(**unused: Any) -> None:
    """A kernel's wait for the one before it, or its leave for the next one to start."""


class _Units:
    """The units that the templates call by instruction; the approximate ones with the largest error they may have.

    PTX ISA: lg2.approx has an absolute error of 2^-22 in (0.5, 2) and a relative one of 2^-22 elsewhere. The relative
    error of tanh.approx is 2^-11, of ex2.approx.ftz 2^-22, of rsqrt.approx 2^-22.9, of rcp.approx.ftz and sqrt.approx
    2^-23. It is up or down by the operand's last bit, which no other computation of the element shares.
    """

    def __init__(self, *handles: Any):
        self.handles = handles

    def get_result(self, number: int) -> Any:
        return self.handles[number]

    @classmethod
    def run(cls, text: str, values: list[Any]) -> _Units:
        from triton.runtime.interpreter import TensorHandle

        if text.startswith("// nibbles of "):
            return cls(*_nibbles(values[0].data, text.split()[3]))
        (operand,), name = values, text.split()[0]
        x = np.asarray(operand.data, dtype=np.float32)
        away = np.where(np.ascontiguousarray(x).view(np.uint32) & np.uint32(1), 1.0, -1.0).reshape(x.shape)
        with np.errstate(all="ignore"):
            if name == "lg2.approx.f32":
                exact = np.log2(x.astype(np.float64))
                size = np.where((x > 0.5) & (x < 2), 1.0, np.abs(exact))
                exact = exact + away * 2.0**-22 * np.where(np.isfinite(exact), size, 0.0)
            elif name == "tanh.approx.f32":
                exact = np.tanh(x.astype(np.float64)) * (1 + away * 2.0**-11)
            elif name in ("sqrt.approx.f32", "rsqrt.approx.f32"):
                root = np.sqrt(x.astype(np.float64))
                exact, share = (root, 2.0**-23) if name.startswith("sqrt") else (1 / root, 2.0**-22.9)
                exact = exact * (1 + away * share)
            elif name in ("ex2.approx.ftz.f32", "rcp.approx.ftz.f32"):
                wide = x.astype(np.float64)
                exact, share = (np.exp2(wide), 2.0**-22) if name.startswith("ex2") else (1 / wide, 2.0**-23)
                exact = exact * (1 + away * share)
                exact = np.where(np.abs(exact) < np.finfo(np.float32).tiny, 0.0, exact)
            else:
                raise NotImplementedError(f"inline assembly {text!r}")
            return cls(TensorHandle(exact.astype(np.float32), operand.dtype))


def _nibbles(pairs: Any, name: str) -> tuple[Any, Any]:
    """The signed low and high halves of bytes as numbers of the half type that PTX calls `name`."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    codes = (((pairs.view(np.int8) << 4).astype(np.int8) >> 4), pairs.view(np.int8) >> 4)
    numbers = [TensorHandle(c.astype(np.float32), tl.float32) for c in codes]
    if name == "bf16":
        return _rounded(numbers[0]), _rounded(numbers[1])
    return tuple(TensorHandle(n.data.astype(np.float16), tl.float16) for n in numbers)


def _as_seen(handle: Any, tf32: bool) -> Any:
    """A tensor as the tensor core sees it, in a form that numpy multiplies."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    dtype = handle.dtype.scalar
    if dtype.is_bf16():
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    if dtype.is_fp8e4nv():
        return TensorHandle(numbers_of(handle.data), tl.float32)
    if tf32 and dtype.is_fp32():
        bits = np.ascontiguousarray(handle.data).view(np.uint32) & _TF32_BITS
        return TensorHandle(bits.view(np.float32), tl.float32)
    return handle


def _rounded(handle: Any) -> Any:
    """fp32 as bf16, to nearest even as a GPU rounds; the interpreter truncates."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    bits = np.ascontiguousarray(handle.data).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded = np.where(np.isnan(handle.data), np.uint32(0x7FC0), rounded)
    return TensorHandle(rounded.astype(np.uint16), tl.bfloat16)


__all__ = ["ENVIRONMENT", "LACKS", "main", "mend", "ready"]
