"""Writes at a few computed positions, as loop nests: each element asks which of them mean it, so that nothing races.

Deals in definitions, which follow the PyTorch documentation of each operator; of equal positions the last one counts,
as on the CPU (PyTorch leaves it open). Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import axis_of, operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.pointwise import binary
from qimeng.coder.template.rules.reindex import at
from qimeng.coder.template.rules.shapes import size_of
from qimeng.family import Unsupported

MOST_POSITIONS = 8
"""Positions along a dimension that every element of it is compared with."""


@rule("scatter", "scatter_add")
def _scatter(b: Builder, node: Any, x: Expr, dim: int, where: Expr, source: Any, reduce: Any = None) -> Expr:
    if reduce is not None:
        raise Unsupported("a scatter that reduces")
    d = axis_of(x, dim)
    for other in (where, source) if isinstance(source, Expr) else (where,):
        if any(size_of(b, x, i) != size_of(b, other, i) for i in range(len(x.dims)) if i != d):
            raise Unsupported("a scatter into a part of the rows")
    return _written(b, node, x, d, where, source, node.packet == "aten.scatter_add")


@rule("index_put")
def _index_put(b: Builder, node: Any, x: Expr, indices: Sequence[Any], source: Expr, accumulate: bool = False) -> Expr:
    """`x` with `source` at rows by number."""
    chosen = [(d, i) for d, i in enumerate(indices) if i is not None]
    lists = [i for _, i in chosen if i.dims]
    if (lists and len(chosen) > 1) or any(len(i.dims) > 1 or i.dtype in ("bool", "uint8") for _, i in chosen):
        raise Unsupported("an index_put by other than a list of rows")
    if not lists:
        return _at_one_place(b, node, x, chosen, source, accumulate)
    (d, where), rank = chosen[0], len(x.dims)
    where = b.redim(_from_zero(b, x, d, where), [where.dims[0] if i == d else () for i in range(rank)])
    source = b.redim(source, [*[()] * (rank - len(source.dims)), *source.dims])
    return _written(b, node, x, d, where, source, accumulate)


def _at_one_place(b: Builder, node: Any, x: Expr, chosen: Sequence[tuple[int, Expr]], source: Expr, adds: bool) -> Expr:
    """`x` with `source`, which has no dimension for each of those chosen, where each position is the one number."""
    numbers, dtype = dict(chosen), out_dtype(node)
    others = [d for d in range(len(x.dims)) if d not in numbers]
    given = dict(zip(reversed(others), reversed(source.dims), strict=False))
    source = operand(b, b.redim(source, [given.get(d, ()) for d in range(len(x.dims))]), dtype)
    found = operand(b, x, dtype)
    new = binary("add", b, found, source, dtype) if adds else source
    for d, number in chosen:
        hit = b.pw("eq", _position(b, x, d), _from_zero(b, x, d, number), dtype="bool")
        new = b.pw("where", hit, new, found, dtype=dtype)
    made: Expr = new
    return made


def _from_zero(b: Builder, x: Expr, dim: int, where: Expr) -> Expr:
    """Positions along `dim` of which a negative one counts from the end."""
    turned = b.pw("add", where, size_of(b, x, dim), dtype=where.dtype)
    return b.pw("where", b.pw("lt", where, 0, dtype="bool"), turned, where, dtype=where.dtype)


def _position(b: Builder, x: Expr, dim: int) -> Expr:
    """The position along `dim`, over the dimensions of `x`."""
    return b.redim(b.index(x.dims[dim]), [x.dims[dim] if i == dim else () for i in range(len(x.dims))])


def _written(b: Builder, node: Any, x: Expr, dim: int, where: Expr, source: Any, adds: bool) -> Expr:
    """`x` with `source[…, k, …]` put, or added, where the position along `dim` is `where[…, k, …]`."""
    count, dtype = size_of(b, where, dim), out_dtype(node)
    if count > MOST_POSITIONS:
        raise Unsupported(f"a scatter to more than {MOST_POSITIONS} positions of a row")
    position = _position(b, x, dim)
    found: Expr = operand(b, x, dtype)
    for k in range(count):
        hit = b.pw("eq", position, _one(b, where, dim, k), dtype="bool")
        value = operand(b, _one(b, source, dim, k) if isinstance(source, Expr) else source, dtype)
        new = binary("add", b, found, value, dtype) if adds else value
        found = b.pw("where", hit, new, found, dtype=dtype)
    return found


def _one(b: Builder, x: Expr, dim: int, k: int) -> Expr:
    """The part of `x` with number `k` along `dim`, which stays as a dimension of one element."""
    return at(b, x, dim, [()], b.const(k, "int32")) if x.dims[dim] else x
