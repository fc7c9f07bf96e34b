"""Matrix and vector products as loop nests.

Deals in definitions, which follow the PyTorch documentation of each operator. Knows nothing about schedules or kernel
text.
"""

from __future__ import annotations

from typing import Any

from qimeng.coder.template.nest.dtypes import compute_dtype
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder


@rule("mm", "bmm", "matmul")
def _mm(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    return b.dot(x, y, out_dtype(node))


@rule("linear")
def _linear(b: Builder, node: Any, x: Expr, w: Expr, bias: Any = None) -> Expr:
    shape = node.metas[0].shape
    flat = x if len(x.dims) == 2 else b.redim(x, [tuple(a for d in x.dims[:-1] for a in d), x.dims[-1]])
    y = b.dot(flat, b.redim(w, w.dims[::-1]), out_dtype(node))
    y = y if bias is None else b.pw("add", y, bias, dtype=out_dtype(node))
    return y if len(x.dims) == 2 else b.reshape(y, shape)


@rule("addmm", "baddbmm", "addmv")
def _addmm(b: Builder, node: Any, c: Expr, x: Expr, y: Expr, beta: Any = 1, alpha: Any = 1) -> Expr:
    d = out_dtype(node)
    product = _mv(b, node, x, y) if node.packet == "aten.addmv" else b.dot(x, y, d)
    product = product if alpha == 1 else b.pw("mul", product, operand(b, alpha, d))
    if beta == 0:
        return product
    return b.pw("add", product, c if beta == 1 else b.pw("mul", c, operand(b, beta, d)), dtype=d)


@rule("mv")
def _mv(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    return _summed(b, node, x, y, [1])


@rule("dot")
def _dot(b: Builder, node: Any, x: Expr, y: Expr) -> Expr:
    return _summed(b, node, x, y, None)


def _summed(b: Builder, node: Any, x: Expr, y: Expr, dims: Any) -> Expr:
    d = out_dtype(node)
    return b.reduce("sum", b.pw("mul", x, y, dtype=compute_dtype(d)), dims, dtype=d)
