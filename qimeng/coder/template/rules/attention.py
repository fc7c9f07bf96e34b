"""Scaled dot-product attention as a loop nest: a product, masks, softmax, a second product.

Follows the documentation of `torch.nn.functional.scaled_dot_product_attention`. A row whose keys are all masked gives
0, as PyTorch does since version 2.5 (`_safe_softmax`). Between the products numbers stay in fp32; the weights are
rounded to the operands' dtype before the second one. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

import math
from typing import Any

from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.family import Unsupported


@rule("scaled_dot_product_attention")
def _attention(
    b: Builder,
    node: Any,
    q: Expr,
    k: Expr,
    v: Expr,
    attn_mask: Expr | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Expr:
    if dropout_p:
        raise Unsupported(f"attention with dropout {dropout_p}")
    if enable_gqa:
        k, v = _each_group(b, k, q), _each_group(b, v, q)
    factor = 1 / math.sqrt(_extent(b, q, -1)) if scale is None else float(scale)
    scores = b.dot(q, b.redim(k, [*k.dims[:-2], k.dims[-1], k.dims[-2]]), "float32", always=True)
    scores = b.pw("mul", scores, factor)
    if is_causal:
        scores = b.pw("where", _causal(b, scores), scores, -math.inf)
    if attn_mask is not None and attn_mask.dtype == "bool":
        scores = b.pw("where", attn_mask, scores, -math.inf, dtype="float32")
    elif attn_mask is not None:
        scores = b.pw("add", scores, operand(b, attn_mask, "float32"), dtype="float32")
    dtype = out_dtype(node)
    weights = _safe_softmax(b, scores)
    return b.dot(weights if dtype == "float32" else b.pw("round", weights, dtype=dtype), v, dtype, always=True)


def _extent(b: Builder, x: Expr, dim: int) -> int:
    return b.axes.extent(b.axes.resolve(x.dims[dim]))


def _each_group(b: Builder, x: Expr, q: Expr) -> Expr:
    """Each head of `x` as often as several heads of `q` share it; nothing is copied."""
    groups = _extent(b, q, -3) // _extent(b, x, -3)
    return b.redim(x, [*x.dims[:-3], x.dims[-3] + b.axes.new(groups), *x.dims[-2:]])


def _causal(b: Builder, scores: Expr) -> Expr:
    """Where the position of the key is at most that of the query, both counted from the first."""
    rows, columns = b.index(scores.dims[-2]), b.index(scores.dims[-1])
    rows = b.redim(rows, [scores.dims[-2], ()])
    return b.pw("le", b.pw("sub", columns, rows, dtype="int32"), 0, dtype="bool")


def _safe_softmax(b: Builder, x: Expr) -> Expr:
    """Softmax over the last dimension, 0 in rows of -inf."""
    top = b.reduce("max", x, [-1], True)
    e = b.pw("exp", b.pw("sub", x, top))
    weights = b.pw("div", e, b.reduce("sum", e, [-1], True))
    return b.pw("where", b.pw("eq", top, -math.inf, dtype="bool"), 0.0, weights, dtype="float32")
