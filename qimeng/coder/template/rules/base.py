"""What every rule is written with: the table it enters, the dtype it aims at, and operands in that dtype.

Deals in names and dtypes. Knows nothing about what any operator computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr, constant
from qimeng.coder.template.rules.builder import Builder, converted
from qimeng.family import Unsupported

Rule = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])
RULES: dict[str, Rule] = {}
"""Operator packet (``"aten.add"``) to its rule."""

SMALL = ("bool", "int8", "uint8", "int16")
"""Integers that reductions take as int32."""


def rule(*names: str) -> Callable[[F], F]:
    """Enter a function in `RULES` under each of `names`."""

    def enter(function: F) -> F:
        for name in names:
            RULES[f"aten.{name}"] = function
        return function

    return enter


def axis_of(x: Expr, dim: int) -> int:
    """The number of dimension `dim` of `x`, which may be given from the end.

    Raises:
        Unsupported: `x` has none; PyTorch takes it for one element there.
    """
    if not x.dims:
        raise Unsupported("a dimension of a tensor that has none")
    return dim % len(x.dims)


def out_dtype(node: Any) -> str:
    """The dtype of the operator's (first) result."""
    return str(node.metas[0].dtype)


def operand(b: Builder, x: Any, dtype: str) -> Any:
    """`x`, a tensor or a number, in the dtype that arithmetic towards `dtype` is done in.

    >>> operand(Builder(), 2, "float16"), operand(Builder(), 300, "uint8"), operand(Builder(), 2, "bool")
    (2.0, 44, True)
    """
    if isinstance(x, Expr):
        want = compute_dtype(dtype)
        return x if compute_dtype(x.dtype) == want else b.cast(x, want)
    return float(x) if is_float(dtype) else converted(x, dtype)


def in_dtype(b: Builder, x: Expr, dtype: str) -> Expr:
    """`x` as a tensor of `dtype`, rounded where that is a half type."""
    if dtype == x.dtype:
        return x
    rounds = dtype in ("float16", "bfloat16") and x.dtype not in ("bool", "int8", "uint8") and constant(x) is None
    return b.pw("round", operand(b, x, dtype), dtype=dtype) if rounds else b.cast(x, dtype)


def common_dtype(*operands: Any) -> str:
    """The dtype in which tensors and numbers are compared, to which a number is wrapped or rounded.

    A tensor without dimensions decides only where its kind of number is a wider one (`torch.result_type`).
    """
    tensors = [
        torch.empty([1] * len(x.dims), dtype=getattr(torch, x.dtype), device="meta")
        for x in operands
        if isinstance(x, Expr)
    ]
    dtype = torch.result_type(tensors[0], tensors[-1])
    for number in (x for x in operands if not isinstance(x, Expr)):
        if isinstance(number, float) and not dtype.is_floating_point:
            dtype = torch.float32
        elif type(number) is int and dtype is torch.bool:
            dtype = torch.int64
    return str(dtype).removeprefix("torch.")


def dims_of(dims: Any) -> list[int] | None:
    """A dimension or a list of them as a list; None stays."""
    if dims is None:
        return None
    return [dims] if isinstance(dims, int) else list(dims)


__all__ = ["RULES", "SMALL", "Rule", "axis_of", "common_dtype", "dims_of", "in_dtype", "operand", "out_dtype", "rule"]
