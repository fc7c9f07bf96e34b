"""The copy that a convolution may read instead of its input: channels last, with the padding that windows reach.

Deals in expressions. Knows nothing about when the copy pays, or about kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.expr import Access, Expr, Staging
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.reindex import at, index, integer, within
from qimeng.coder.template.rules.shapes import size_of
from qimeng.coder.template.rules.windows import Place


def staging_of(
    b: Builder, x: Expr, images: Dim, channels: Dim, places: Sequence[Place], tests: Sequence[Expr | None] = ()
) -> Staging:
    r"""The copy of `x` and how windows read it.

    Args:
        b: the builder.
        x: the input, [N, C, \*lengths].
        images: the axes that windows have in place of N.
        channels: those in place of C.
        places: of each further dimension, the position that windows read, its least and its largest value.
        tests: where windows have an element at all; None for everywhere.
    """
    fill, sizes, guards = b.own(x), [], []
    for i, (_, low, high) in enumerate(places):
        d, length = 2 + i, size_of(b, x, 2 + i)
        axis = b.axes.new(high - low + 1)
        place = integer(b, "add", index(b, axis), low)
        guards.append(within(b, place, 0, length) if low < 0 or high >= length else None)
        fill = at(b, fill, d, [axis], place, guards[-1])
        sizes.append(high - low + 1)
    for guard in guards:
        if guard is not None:
            fill = b.pw("where", guard, fill, 0.0, dtype=fill.dtype)
    step, steps = size_of(b, x, 1), []
    for size in reversed(sizes):
        steps.append(step)
        step *= size
    positions = tuple(integer(b, "sub", place, low) for place, low, _ in places)
    exists: Expr | None = None
    for test in (t for t in tests if t is not None):
        exists = test if exists is None else integer(b, "and", exists, test, dtype="bool")
    access = Access(((images, step), (channels, 1)), tuple(reversed(steps)), exists is not None)
    args = positions if exists is None else (*positions, exists)
    read = b.nest.add(Expr("load", args, (), x.dtype, access=access))
    return Staging(fill, (fill.dims[0], *fill.dims[2:], fill.dims[1]), read)


__all__ = ["staging_of"]
