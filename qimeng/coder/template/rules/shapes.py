"""Slices, joins, padding and gathers as loop nests: values read at other positions.

Deals in definitions, which follow the PyTorch documentation of each operator. Knows nothing about schedules or kernel
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qimeng.coder.template.nest.dtypes import is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import axis_of, operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.reindex import at, index, integer, within
from qimeng.family import Unsupported


def size_of(b: Builder, x: Expr, dim: int) -> int:
    """Elements along dimension `dim` of `x`."""
    return b.axes.extent(b.axes.resolve(b.whole(x.dims[dim])))


@rule("slice")
def _slice(b: Builder, node: Any, x: Expr, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Expr:
    d = dim % len(x.dims)
    before, after = size_of(b, x, d), node.metas[0].shape[d]
    first = 0 if start is None else min(max(start + before if start < 0 else start, 0), before)
    if after == before:
        return b.redim(x, x.dims)
    axis = b.axes.new(after)
    return at(b, x, d, [axis], _line(b, axis, step, first))


@rule("slice_scatter")
def _slice_scatter(
    b: Builder, node: Any, x: Expr, source: Expr, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Expr:
    """`x` with `source` in place of its slice."""
    d = axis_of(x, dim)
    size, count = size_of(b, x, d), size_of(b, source, d)
    first = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    axis = b.axes.new(size)
    place = index(b, axis)
    guard = within(b, place, first, first + (count - 1) * step + 1)
    from_first = integer(b, "sub", place, first)
    if step > 1:
        on_step = integer(b, "eq", integer(b, "imod", from_first, step), 0, dtype="bool")
        guard = integer(b, "and", guard, on_step, dtype="bool")
        from_first = integer(b, "idiv", from_first, step)
    inside = at(b, source, d, [axis], from_first, guard)
    return b.pw("where", guard, inside, at(b, x, d, [axis], place), dtype=x.dtype)


@rule("select")
def _select(b: Builder, node: Any, x: Expr, dim: int, position: int) -> Expr:
    d = dim % len(x.dims)
    return at(b, x, d, [], b.const(position % size_of(b, x, d), "int32"))


@rule("flip")
def _flip(b: Builder, node: Any, x: Expr, dims: Sequence[int]) -> Expr:
    for dim in dims:
        d = axis_of(x, dim)
        size = size_of(b, x, d)
        if size > 1:
            axis = b.axes.new(size)
            x = at(b, x, d, [axis], integer(b, "sub", size - 1, index(b, axis)))
    return x


@rule("unfold")
def _unfold(b: Builder, node: Any, x: Expr, dim: int, size: int, step: int) -> Expr:
    d = axis_of(x, dim)
    window, inside = b.axes.new(node.metas[0].shape[d]), b.axes.new(size)
    place = integer(b, "add", _line(b, window, step, 0), index(b, inside))
    y = at(b, x, d, [window, inside], place)
    return b.redim(y, [*y.dims[: d + 1], *y.dims[d + 2 :], inside])


@rule("cat")
def _cat(b: Builder, node: Any, tensors: Sequence[Expr], dim: int = 0) -> Expr:
    dtype, shape = out_dtype(node), node.metas[0].shape
    parts = [operand(b, x, dtype) for x in tensors if len(x.dims) == len(shape)]  # one of no elements has no say
    d = dim % len(shape)
    axis = b.axes.new(shape[d])
    place, begin, joined = index(b, axis), shape[d], None
    for x in reversed(parts):
        size = size_of(b, x, d)
        begin, end = begin - size, begin
        guard = within(b, place, begin, end) if len(parts) > 1 else None
        here = at(b, x, d, [axis], integer(b, "sub", place, begin), guard)
        below = integer(b, "lt", place, end, dtype="bool")
        joined = here if joined is None else b.pw("where", below, here, joined, dtype=here.dtype)
    if joined is None:
        raise Unsupported("a concatenation of nothing")
    return b.cast(joined, dtype) if joined.dtype != dtype and not is_float(dtype) else joined


@rule("constant_pad_nd")
def _pad(b: Builder, node: Any, x: Expr, pad: Sequence[int], value: Any = 0) -> Expr:
    dtype, guards = out_dtype(node), []
    for number in range(len(pad) // 2):
        d, low, high = len(x.dims) - 1 - number, pad[2 * number], pad[2 * number + 1]
        if not low and not high:
            continue
        size, axis = size_of(b, x, d), b.axes.new(node.metas[0].shape[d])
        place = _line(b, axis, 1, -low)
        guard = within(b, place, 0, size) if low > 0 or high > 0 else None
        guards += [] if guard is None else [guard]
        x = at(b, x, d, [axis], place, guard)
    for guard in guards:
        x = b.pw("where", guard, x, operand(b, value, dtype), dtype=x.dtype)
    return x


@rule("index_select")
def _index_select(b: Builder, node: Any, x: Expr, dim: int, where: Expr) -> Expr:
    d = axis_of(x, dim)
    place = where if len(where.dims) == 1 else b.redim(where, [()])
    return at(b, x, d, [place.dims[0]], place, within(b, place, 0, size_of(b, x, d)))


@rule("embedding")
def _embedding(b: Builder, node: Any, table: Expr, where: Expr, *unused: Any) -> Expr:
    return at(b, table, 0, where.dims, where, within(b, where, 0, size_of(b, table, 0)))


@rule("index")
def _index(b: Builder, node: Any, x: Expr, indices: Sequence[Any]) -> Expr:
    """`x[i, j, …]` with index tensors that broadcast with each other; None keeps a dimension."""
    chosen = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(i.dtype in ("bool", "uint8") for _, i in chosen):
        raise Unsupported("a mask as an index")
    shape = b.broadcast([i.dims for _, i in chosen])
    numbers = [d for d, _ in chosen]
    together = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    for count, (d, i) in enumerate(reversed(chosen)):
        size, last = size_of(b, x, d), count == len(chosen) - 1
        below = integer(b, "lt", i, 0, dtype="bool")
        place = integer(b, "where", below, integer(b, "add", i, size, dtype=i.dtype), i, dtype=i.dtype)
        x = at(b, x, d, shape if last else [], place, within(b, place, 0, size))
    first, rank = numbers[0], len(shape)
    dims = x.dims
    return x if together else b.redim(x, [*dims[first : first + rank], *dims[:first], *dims[first + rank :]])


def gathered(b: Builder, x: Expr, dim: int, where: Expr) -> Expr:
    """`x[i, where[i, j]]`: what `torch.gather` takes along `dim`."""
    for d in range(len(x.dims)):
        if d == dim:
            continue
        if size_of(b, x, d) == size_of(b, where, d):
            if x.dims[d]:
                b.axes.unify(where.dims[d], x.dims[d])
        else:
            x = at(b, x, d, [where.dims[d]], index(b, where.dims[d]))
    return at(b, x, dim, [where.dims[dim]], where, within(b, where, 0, size_of(b, x, dim)))


def _line(b: Builder, axis: tuple[int, ...], step: int, first: int) -> Expr:
    """`step * position + first`."""
    return integer(b, "add", integer(b, "mul", index(b, axis), step), first)


__all__ = ["gathered", "size_of"]
