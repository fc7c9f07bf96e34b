"""Convolutions as loop nests: a matrix product over windows, or a sum where each channel stands alone.

A dense convolution is one product (implicit GEMM): rows are images and output positions, columns are output channels,
the depth is input channels and positions inside a window, groups are a batch. Windows are reads at computed positions,
so that no copy of them is made. Deals in definitions, which follow the PyTorch documentation. Knows nothing about
schedules or kernel text.
"""

from __future__ import annotations

import math
from typing import Any

from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.shapes import size_of
from qimeng.coder.template.rules.staged import staging_of
from qimeng.coder.template.rules.transposed import Between, Placing, outputs_first, transposed_product
from qimeng.coder.template.rules.windows import Windows, several
from qimeng.family import Unsupported

FEW_COLUMNS = 8
"""Output channels below which a convolution of one input channel is a sum: tensor cores take at least 8 columns."""


@rule("convolution")
def _convolution(
    b: Builder,
    node: Any,
    x: Expr,
    w: Expr,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Expr:
    count, dtype = len(w.dims) - 2, out_dtype(node)
    if len(x.dims) != count + 2:
        raise Unsupported("a convolution of an input without a batch")
    steps, pads, spread = (several(v, count, ()) for v in (stride, padding, dilation))
    counts, placing = node.metas[0].shape[2:], (steps, pads, spread)
    rows = size_of(b, x, 0) * math.prod(counts)
    if transposed:
        depth, columns = size_of(b, x, 1) // groups, size_of(b, w, 1)
    else:
        depth, columns = size_of(b, w, 1), size_of(b, w, 0) // groups
    alone = depth == 1 and (groups > 1 or columns < FEW_COLUMNS)
    sizes = [size_of(b, w, 2 + i) for i in range(count)]
    if not (alone or rows == 1 or columns == 1):
        multiply = transposed_product if transposed else _multiplied
        total = multiply(b, x, w, placing, counts, groups, dtype)
    elif transposed:
        windows = Between(b, operand(b, x, compute_dtype(dtype)), sizes, *placing, counts)
        total = _summed(b, windows, outputs_first(b, w, groups), groups, dtype)
    else:
        total = _summed(b, Windows(b, operand(b, x, compute_dtype(dtype)), sizes, *placing, counts), w, groups, dtype)
    if bias is None:
        return total
    return b.pw("add", total, b.redim(bias, [bias.dims[0], *[()] * count]), dtype=dtype)


def _multiplied(b: Builder, x: Expr, w: Expr, placing: Placing, counts: Any, groups: int, dtype: str) -> Expr:
    """One product, over axes of its own."""
    x, w = b.own(x), b.own(w)
    sizes = [size_of(b, w, 2 + i) for i in range(len(counts))]
    windows = Windows(b, x, sizes, *placing, counts, straight=True)
    value = windows.value if windows.is_load else windows.filled(b, 0.0)
    channels, group, columns, inner = _shared_axes(b, value, w, windows, groups)
    value = b.redim(value, [value.dims[0], group, channels, *value.dims[2:]])
    weights = b.redim(w, [group, columns, channels, *w.dims[2:]])
    outer = [d for i, d in enumerate(value.dims) if i > 2 and i - 1 not in windows.inside]
    dims = (value.dims[0], *outer, group, columns)
    depth = channels + tuple(a for d in inner for a in d)
    staging = staging_of(b, x, value.dims[0], group + channels, windows.places)
    total = b.nest.add(Expr("dot", (value, weights), dims, dtype, reduced=depth, staging=staging))
    return b.redim(total, [dims[0], group + columns, *outer])


def _summed(b: Builder, windows: Windows, w: Expr, groups: int, dtype: str) -> Expr:
    """A product and a sum: depthwise, or of one column or row."""
    work = compute_dtype(dtype)
    value = windows.filled(b, 0.0 if is_float(work) else 0)
    channels, group, columns, _ = _shared_axes(b, value, w, windows, groups, False)
    weights = operand(b, w, work)
    inner = [d for pair in zip([()] * len(windows.inside), weights.dims[2:], strict=True) for d in pair]
    weights = b.redim(weights, [(), group, columns, channels, *inner])
    value = b.redim(value, [value.dims[0], group, (), channels, *value.dims[2:]])
    dims = [3, *(d + 2 for d in windows.inside)]
    total = b.reduce("sum", b.pw("mul", value, weights, dtype=work), dims, dtype=dtype)
    return b.redim(total, [total.dims[0], group + columns, *total.dims[3:]])


def _shared_axes(
    b: Builder, value: Expr, w: Expr, windows: Windows, groups: int, inside: bool = True
) -> tuple[Dim, Dim, Dim, list[Dim]]:
    """Axes of channels, groups, columns and positions inside windows, the same for input and weights."""
    group, channels = b.axes.new(groups), b.axes.new(size_of(b, w, 1))
    columns = b.axes.new(size_of(b, w, 0) // groups)
    for given, here in ((value.dims[1], group + channels), (w.dims[0], group + columns), (w.dims[1], channels)):
        if given:
            b.axes.unify(given, here)
    inner = [value.dims[d] for d in windows.inside]
    for given, here in zip(w.dims[2:], inner, strict=True):
        if given and inside:
            b.axes.unify(given, here)
    return channels, group, columns, inner
