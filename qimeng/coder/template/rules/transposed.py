"""Transposed convolutions as one matrix product: each phase of the stride is a small dense convolution.

Output position `o` of a dimension adds up x[i] w[k] over all i and k with ``stride * i = o + pad - dilation * k``. For
the positions of one phase, ``o = stride * q + r``, these are every so many elements of the window, the same for all q,
so that nothing is scattered and no zeros between inputs are read. Phases are a batch of the product: its rows are
images and positions q, its depth is channels and the elements of a phase's window. Where the stride does not divide
the output, the last q of some phases lie beyond it and are not stored (`Nest.limits`). Deals in definitions. Knows
nothing about schedules or kernel text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.reindex import at, index, integer, within
from qimeng.coder.template.rules.shapes import size_of
from qimeng.coder.template.rules.staged import staging_of
from qimeng.coder.template.rules.windows import Windows, is_load

Placing = tuple[list[int], list[int], list[int]]
"""Strides, paddings and dilations."""


@dataclass(frozen=True)
class _Phased:
    """One dimension by phases.

    Attributes:
        steps: axis of the positions of a phase.
        phases: axis of the phases.
        taps: axis of the elements of a phase's window.
        tap: number of an element in the whole window.
        has_tap: where there is such an element; None for always.
        place: the position that is read.
        least: its least value.
        most: its largest one.
        inside: where that is an element of the input, and the window has the other one.
    """

    steps: Dim
    phases: Dim
    taps: Dim
    tap: Expr
    has_tap: Expr | None
    place: Expr
    least: int
    most: int
    inside: Expr


def transposed_product(
    b: Builder, x: Expr, w: Expr, placing: Placing, counts: Sequence[int], groups: int, dtype: str
) -> Expr:
    r"""The sum without bias.

    Args:
        b: the builder.
        x: [N, C_in, \*lengths].
        w: [C_in, C_out / groups, \*window].
        placing: of each dimension.
        counts: lengths of the output.
        groups: groups of channels.
        dtype: of the result.
    """
    whole, x, w = x, b.own(x), b.own(w)
    depth, columns = size_of(b, x, 1) // groups, size_of(b, w, 1)
    lengths, sizes = ([size_of(b, e, 2 + i) for i in range(len(counts))] for e in (x, w))
    found = [
        _phased(b, *each, *(p[i] for p in placing)) for i, each in enumerate(zip(lengths, sizes, counts, strict=True))
    ]
    for i, p in enumerate(found):
        d = 2 + 3 * i
        x = at(b, x, d, [p.steps, p.phases, p.taps], p.place, p.inside)
        w = at(b, w, 2 + 2 * i, [p.phases, p.taps], p.tap, p.has_tap)
    if not is_load(x) or 1 in lengths:  # a dimension of one element is read without a guard
        for p in found:
            x = b.pw("where", p.inside, x, 0.0, dtype=x.dtype)
    if not is_load(w) or 1 in sizes:
        for p in found:
            w = w if p.has_tap is None else b.pw("where", p.has_tap, w, 0.0, dtype=w.dtype)
    group, channels, several = b.axes.new(groups), b.axes.new(depth), b.axes.new(columns)
    for given, here in ((x.dims[1], group + channels), (w.dims[0], group + channels), (w.dims[1], several)):
        if given:
            b.axes.unify(given, here)
    dims = (x.dims[0], *(p.phases for p in found), *(p.steps for p in found), group, several)
    taps = tuple(a for p in found for a in p.taps)
    places = [(p.place, p.least, p.most) for p in found]
    staging = staging_of(b, whole, x.dims[0], group + channels, places, [p.has_tap for p in found])
    total = b.nest.add(Expr("dot", (x, w), dims, dtype, reduced=taps + channels, staging=staging))
    for p, count in zip(found, counts, strict=True):
        if count % max(b.axes.extent(b.axes.resolve(p.phases)), 1):
            b.nest.limits.append((p.steps + p.phases, count))
    return b.redim(total, [x.dims[0], group + several, *(p.steps + p.phases for p in found)])


def _phased(b: Builder, length: int, size: int, count: int, stride: int, pad: int, spread: int) -> _Phased:
    """One dimension: input of `length`, window of `size`, output of `count`.

    With g = gcd(stride, dilation): phase r has elements only where g divides r + pad, and then those k with
    ``k = (r + pad) / g * (dilation / g)^-1`` modulo stride / g.
    """
    g = math.gcd(stride, spread)
    every, each = stride // g, spread // g
    steps, phases, taps = (b.axes.new(n) for n in (-(-count // stride), stride, -(-size // every)))
    inverse = pow(each, -1, every) if every > 1 else 0
    start = integer(b, "add", index(b, phases), pad)
    exists = integer(b, "eq", integer(b, "imod", start, g), 0, dtype="bool") if g > 1 else None
    start = integer(b, "idiv", start, g) if g > 1 else start
    first = integer(b, "imod", integer(b, "mul", start, inverse), every) if every > 1 else None
    ahead = start if first is None else integer(b, "sub", start, integer(b, "mul", first, each))
    ahead = integer(b, "idiv", ahead, every) if every > 1 else ahead
    tap = integer(b, "mul", index(b, taps), every)
    tap = tap if first is None else integer(b, "add", tap, first)
    has_tap = integer(b, "lt", tap, size, dtype="bool") if size % every else None
    if exists is not None:
        has_tap = exists if has_tap is None else integer(b, "and", exists, has_tap, dtype="bool")
    place = integer(b, "add", index(b, steps), ahead)
    place = integer(b, "sub", place, integer(b, "mul", index(b, taps), each))
    starts = [(r + pad) // g for r in range(stride)]
    aheads = [(t - t * inverse % every * each) // every for t in starts]
    least, most = min(aheads) - (-(-size // every) - 1) * each, max(aheads) + -(-count // stride) - 1
    inside = within(b, place, 0, length)
    if has_tap is not None:  # else an infinity would meet the zero in place of a weight
        inside = integer(b, "and", inside, has_tap, dtype="bool")
    return _Phased(steps, phases, taps, tap, has_tap, place, least, most, inside)


class Between(Windows):
    """The inputs that each output position adds up, for a sum in place of a product.

    Every element of the window is looked at, also where none of the inputs meets it.
    """

    def __init__(
        self,
        b: Builder,
        x: Expr,
        sizes: Sequence[int],
        steps: Sequence[int],
        pads: Sequence[int],
        spread: Sequence[int],
        counts: Sequence[int],
    ):
        self.guards, self.outer = [], []
        for i, size in enumerate(sizes):
            d = 2 + 2 * i
            length, output, inner = size_of(b, x, d), b.axes.new(counts[i]), b.axes.new(size)
            far = integer(b, "add", index(b, output), pads[i])
            far = integer(b, "sub", far, integer(b, "mul", index(b, inner), spread[i]))
            guard = within(b, far, 0, length * steps[i])
            if steps[i] > 1:
                meets = integer(b, "eq", integer(b, "imod", far, steps[i]), 0, dtype="bool")
                guard = integer(b, "and", guard, meets, dtype="bool")
            place = integer(b, "idiv", far, steps[i]) if steps[i] > 1 else far
            self.guards.append(guard)
            self.outer.append(output)
            x = at(b, x, d, [output, inner], place, guard)
        self.value = x
        self.inside = [3 + 2 * i for i in range(len(sizes))]


def outputs_first(b: Builder, w: Expr, groups: int) -> Expr:
    """Weights [C_in, C_out / groups, …] as [C_out, C_in / groups, …]."""
    group, channels = b.axes.new(groups), b.axes.new(size_of(b, w, 0) // groups)
    if w.dims[0]:
        b.axes.unify(w.dims[0], group + channels)
    return b.redim(w, [group + w.dims[1], channels, *w.dims[2:]])


__all__ = ["Between", "Placing", "outputs_first", "transposed_product"]
