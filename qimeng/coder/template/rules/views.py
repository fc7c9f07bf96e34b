"""Views in the middle of a region, copies, and tensors made from nothing, as loop nests.

Deals in definitions, which follow the PyTorch documentation of each operator. Knows nothing about schedules or kernel
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import in_dtype, operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.family import Unsupported


@rule("clone", "alias", "detach", "lift_fresh_copy", "_to_copy")
def _copy(b: Builder, node: Any, x: Expr, **unused: Any) -> Expr:
    d = out_dtype(node)
    return b.redim(x, x.dims) if d == x.dtype else in_dtype(b, x, d)


@rule("copy")
def _overwritten(b: Builder, node: Any, x: Expr, source: Expr, non_blocking: bool = False) -> Expr:
    """`source` with the dtype and the shape of `x`."""
    return _expand(b, node, _copy(b, node, source), node.metas[0].shape)


@rule("full", "full_like", "zeros_like", "ones_like", "zeros", "ones", "fill")
def _full(b: Builder, node: Any, *args: Any, **unused: Any) -> Expr:
    value = {"zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1}.get(node.packet.removeprefix("aten."))
    value = args[1] if value is None else value
    if isinstance(value, Expr):
        raise Unsupported("full with a tensor value")
    return b.redim(b.const(value, out_dtype(node)), [b.axes.new(s) for s in node.metas[0].shape])


@rule("empty_permuted")
def _empty(b: Builder, node: Any, *unused: Any, **more: Any) -> Expr:
    """What nobody has written yet, which may be anything: zeros."""
    return b.redim(b.const(0, out_dtype(node)), [b.axes.new(s) for s in node.metas[0].shape])


@rule("arange")
def _arange(b: Builder, node: Any, *args: Any, **unused: Any) -> Expr:
    start, _, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    d = out_dtype(node)
    ramp = b.cast(b.index(b.axes.new(node.metas[0].numel)), d)
    ramp = ramp if step == 1 else b.pw("mul", ramp, operand(b, step, d), dtype=d)
    return ramp if start == 0 else b.pw("add", ramp, operand(b, start, d), dtype=d)


@rule("tril", "triu")
def _triangle(b: Builder, node: Any, x: Expr, diagonal: int = 0) -> Expr:
    rows, cols = b.index(x.dims[-2]), b.index(x.dims[-1])
    rows = b.redim(rows, [x.dims[-2], ()])
    offset = b.pw("sub", cols, rows, dtype="int32")
    keep = b.pw("ge" if node.packet == "aten.triu" else "le", offset, int(diagonal), dtype="bool")
    return b.pw("where", keep, x, 0.0 if is_float(x.dtype) else 0, dtype=out_dtype(node))


@rule("view", "_unsafe_view", "reshape")
def _view(b: Builder, node: Any, x: Expr, shape: Sequence[int]) -> Expr:
    return b.reshape(x, node.metas[0].shape)


@rule("permute")
def _permute(b: Builder, node: Any, x: Expr, order: Sequence[int]) -> Expr:
    return b.redim(x, [x.dims[i] for i in order])


@rule("transpose")
def _transpose(b: Builder, node: Any, x: Expr, i: int, j: int) -> Expr:
    dims = list(x.dims)
    dims[i], dims[j] = dims[j], dims[i]
    return b.redim(x, dims)


@rule("t")
def _t(b: Builder, node: Any, x: Expr) -> Expr:
    return b.redim(x, x.dims[::-1])


@rule("unsqueeze")
def _unsqueeze(b: Builder, node: Any, x: Expr, dim: int) -> Expr:
    at = dim % (len(x.dims) + 1)
    return b.redim(x, [*x.dims[:at], (), *x.dims[at:]])


@rule("squeeze")
def _squeeze(b: Builder, node: Any, x: Expr, dim: Any = None) -> Expr:
    rank = len(x.dims)
    drop = set(range(rank)) if dim is None else {d % rank for d in ((dim,) if isinstance(dim, int) else dim)}
    return b.redim(x, [d for i, d in enumerate(x.dims) if i not in drop or d])


@rule("repeat")
def _repeat(b: Builder, node: Any, x: Expr, times: Sequence[int]) -> Expr:
    dims = [()] * (len(times) - len(x.dims)) + list(x.dims)
    return b.redim(x, [b.axes.new(n) + d for n, d in zip(times, dims, strict=True)])


@rule("expand")
def _expand(b: Builder, node: Any, x: Expr, shape: Sequence[int], implicit: bool = False) -> Expr:
    sizes = node.metas[0].shape
    dims = [()] * (len(sizes) - len(x.dims)) + list(x.dims)
    return b.redim(x, [d or b.axes.new(s) for d, s in zip(dims, sizes, strict=True)])
