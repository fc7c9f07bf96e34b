"""Cumulative operators as loop nests.

Deals in definitions, which follow the PyTorch documentation of each operator. Half types are summed in fp32 and
rounded once. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from typing import Any

from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.nest.scans import Scan
from qimeng.coder.template.rules.base import SMALL, operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder


@rule("cumsum", "cumprod")
def _cumulative(b: Builder, node: Any, x: Expr, dim: int, dtype: Any = None) -> Expr:
    d = out_dtype(node)
    values = operand(b, x, d)
    if not _has_order(values, dim):
        return b.redim(values, values.dims)
    wide = operand(b, values, "int32") if d in SMALL else values  # wrapped to `d` at the end, as each step would be
    kind = node.packet.removeprefix("aten.cum")
    if kind == "prod" and compute_dtype(wide.dtype) == "float32":
        return b.cast(b.scan(Scan("product"), [wide, b.redim(b.const(0, "int32"), wide.dims)], dim, d), d)
    found = b.scan(Scan(kind), [wide], dim, wide.dtype if d in SMALL else d)
    if kind == "sum" and is_float(d):
        return b.pw("add", found, 0.0, dtype=d)  # a sum begins with +0, so that it is never -0
    return b.cast(found, d)


@rule("cummax", "cummin")
def _running_best(b: Builder, node: Any, x: Expr, dim: int) -> tuple[Expr, Expr]:
    """Values and positions; a position is the last one of the best so far, as in PyTorch."""
    kind = node.packet.removeprefix("aten.cum")
    if not _has_order(x, dim):
        return b.redim(x, x.dims), b.redim(b.const(0, "int64"), x.dims)
    wide = operand(b, x, "int32") if x.dtype in SMALL else x
    d = dim % len(x.dims)
    along = b.redim(b.index(x.dims[d]), [a if i == d else () for i, a in enumerate(x.dims)])
    pair = b.scan(Scan(f"arg{kind}"), [wide, b.cast(along, "int64")], dim, wide.dtype)
    return b.cast(b.part(pair, "best"), x.dtype), b.part(pair, "at", "int64")


@rule("logcumsumexp")
def _logcumsumexp(b: Builder, node: Any, x: Expr, dim: int) -> Expr:
    """The running maximum m and the sum of exp(x - m), so that nothing overflows."""
    d = out_dtype(node)
    x = operand(b, x, d)
    if not _has_order(x, dim):
        return b.redim(x, x.dims)
    pair = b.scan(Scan("sumexp"), [x, b.redim(b.const(1.0, x.dtype), x.dims)], dim, x.dtype)
    return b.pw("add", b.part(pair, "max"), b.pw("log", b.part(pair, "sum")), dtype=d)


def _has_order(x: Expr, dim: int) -> bool:
    """Whether `x` has more than one element along `dim`."""
    return bool(x.dims) and bool(x.dims[dim])
