"""Modules and inputs that no computation can be optimized with, refused in words.

Deals in what a tensor or a module is. Knows nothing about where it comes from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from qimeng.errors import SpecError


def refuse_input(x: Any, what: str) -> None:
    """Refuse an input that is no dense tensor with values, or of float8; what is no tensor is none of these.

    Raises:
        SpecError: `x` is one.
    """
    kind = _unusual(x)
    if kind:
        raise SpecError(f"{what} {kind}; give a dense tensor with values")
    refuse_float8(x, what)


def _unusual(x: Any) -> str:
    """Why `x` is no tensor whose elements lie in memory; empty where it is one, or no tensor at all."""
    if not isinstance(x, torch.Tensor):
        return ""
    if x.is_nested or x.is_quantized:
        return "is a nested tensor" if x.is_nested else f"is quantized ({x.dtype})"
    if x.layout is not torch.strided:
        return f"is sparse ({x.layout})"
    return "has no values (device meta)" if x.is_meta else ""


def refuse_torchscript(thing: Any) -> None:
    """Refuse what `torch.jit` made: it can be neither exported nor copied as a module of Python is.

    Args:
        thing: a module or function.

    Raises:
        SpecError: it is TorchScript.
    """
    if isinstance(thing, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        kind = "module" if isinstance(thing, torch.nn.Module) else "function"
        raise SpecError(f"a TorchScript {kind} cannot be optimized: give the Python {kind} that torch.jit was given")


def refuse_float8(x: Any, what: str) -> None:
    """Refuse a float8 tensor, on which PyTorch has no arithmetic, at the edge of a computation.

    Raises:
        SpecError: `x` is one.
    """
    if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype.itemsize == 1:
        name = str(x.dtype).removeprefix("torch.")
        raise SpecError(
            f"{what} is {name}, which a computation may use inside only: cast there (x.to(torch.{name})), or pass its "
            "bytes (x.view(torch.uint8))"
        )


def refuse_meta(module: torch.nn.Module) -> None:
    """Refuse a module without values.

    Raises:
        SpecError: a parameter or buffer is on the meta device.
    """
    for key, t in (*module.named_parameters(), *module.named_buffers()):
        if t.is_meta:
            raise SpecError(
                f"{type(module).__name__}: {key} is on the meta device and has no values: load the weights first, as "
                "by module.to_empty(device='cpu') and load_state_dict"
            )


def refuse_lazy(module: torch.nn.Module, name: str) -> None:
    """Refuse a module whose parameters have no shape yet.

    Raises:
        SpecError: it has such parameters.
    """
    unknown = [key for key, t in (*module.named_parameters(), *module.named_buffers()) if is_lazy(t)]
    if unknown:
        raise SpecError(
            f"{name}: {unknown[0]} has no shape before the first call (a lazy module): call the module once before it "
            "is given, or write the class that takes sizes (Linear(32, 8) for LazyLinear(8))"
        )


__all__ = ["refuse_float8", "refuse_input", "refuse_lazy", "refuse_meta", "refuse_torchscript"]
