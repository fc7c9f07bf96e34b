"""Pooling and resizing as loop nests: reductions over windows.

A window is two axes in place of one, its position a sum of both; what lies in the padding is not read. Deals in
definitions, which follow the PyTorch documentation of each operator. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.rules.base import operand, out_dtype, rule
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.reductions import extreme, position
from qimeng.coder.template.rules.reindex import at, index, integer, within
from qimeng.coder.template.rules.shapes import size_of
from qimeng.family import Unsupported


def is_load(x: Expr) -> bool:
    """Whether `x` is a tensor as it is."""
    while x.op == "identity":
        x = x.args[0]
    return x.op == "load"


def several(value: Any, count: int, default: Sequence[int]) -> list[int]:
    """An argument given once for all dimensions, or for each; `default` where it is empty."""
    if isinstance(value, int):
        return [value] * count
    found = list(value) or list(default)
    return found * count if len(found) == 1 else found


Place = tuple[Expr, int, int]
"""A position, its least and its largest value."""


class Windows:
    """The last dimensions of a tensor cut into windows.

    Args:
        b: the builder.
        x: the tensor.
        sizes: of a window.
        steps: from one window to the next.
        pads: positions before the first element where windows begin.
        spread: from one element of a window to the next (dilation).
        counts: windows along each dimension.
        straight: leave a dimension as it is where each window is one element.

    Attributes:
        value: `x` with two dimensions in place of each: windows, and positions inside.
        guards: where those positions are elements of the tensor.
        inside: numbers of the dimensions that are positions inside windows.
        outer: the axes of the windows.
        places: of each dimension, the position that is read, its least and its largest value.
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
        straight: bool = False,
    ):
        self.guards: list[Expr] = []
        self._unguarded = False  # whether a guard is in no read: a dimension of one element has no positions
        self.places: list[Place] = []
        self.outer: list[Dim] = []
        lead = len(x.dims) - len(sizes)
        for number, size in enumerate(sizes):
            d = lead + 2 * number
            length = size_of(b, x, d)
            if straight and size == steps[number] == 1 and not pads[number]:
                self.outer.append(x.dims[d])
                self.places.append((index(b, x.dims[d]), 0, length - 1))
                x = b.redim(x, [*x.dims[: d + 1], (), *x.dims[d + 1 :]])
                continue
            window, inner = b.axes.new(counts[number]), b.axes.new(size)
            begin = integer(b, "mul", index(b, window), steps[number])
            place = integer(b, "add", begin, integer(b, "mul", index(b, inner), spread[number]))
            place = integer(b, "sub", place, pads[number])
            reach = (counts[number] - 1) * steps[number] + (size - 1) * spread[number] - pads[number]
            guard = within(b, place, 0, length) if pads[number] or reach >= length else None
            self.guards += [] if guard is None else [guard]
            self._unguarded |= guard is not None and length == 1
            self.places.append((place, -pads[number], reach))
            x = at(b, x, d, [window, inner], place, guard)
            self.outer.append(window)
        self.value = x
        self.inside = [lead + 2 * number + 1 for number in range(len(sizes))]

    @property
    def is_load(self) -> bool:
        """True where the value is a tensor as it is, whose guarded reads give 0 outside."""
        return is_load(self.value) and not self._unguarded

    def filled(self, b: Builder, value: float | int) -> Expr:
        """The windows, with `value` where there is no element."""
        x = self.value
        for guard in self.guards:
            x = b.pw("where", guard, x, value, dtype=x.dtype)
        return x


def reached(sizes: Sequence[int], lengths: Sequence[int], pads: Sequence[int], spread: Sequence[int]) -> list[int]:
    """Sizes of windows without the positions that lie beyond the tensor in every window (with `ceil_mode`, say).

    >>> reached([1280, 3], [7, 7], [0, 1], [1, 1])
    [7, 3]
    """
    each = zip(sizes, lengths, pads, spread, strict=True)
    return [min(size, -(-(length + pad) // far)) for size, length, pad, far in each]


@rule("avg_pool2d", "avg_pool3d")
def _avg_pool(
    b: Builder,
    node: Any,
    x: Expr,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Expr:
    count, dtype = int(node.packet[-2]), out_dtype(node)
    if not is_float(dtype):
        raise Unsupported("an average of integers, which PyTorch has on the CPU alone")
    sizes = several(kernel, count, ())
    steps, pads = several(stride, count, sizes), several(padding, count, ())
    lengths = [size_of(b, x, d) for d in range(len(x.dims) - count, len(x.dims))]
    once = [1] * count
    inside = reached(sizes, lengths, pads, once)
    windows = Windows(b, operand(b, x, dtype), inside, steps, pads, once, node.metas[0].shape[-count:])
    total = b.reduce("sum", windows.filled(b, 0.0), windows.inside, dtype=dtype)
    if divisor_override is not None:
        return b.pw("div", total, float(divisor_override), dtype=dtype)
    plain = not ceil_mode and (count_include_pad or not any(pads))
    if plain:
        return b.pw("div", total, float(np.prod(sizes)), dtype=dtype)
    elements = None
    for axis, size, step, pad, length in zip(windows.outer, sizes, steps, pads, lengths, strict=True):
        begin = integer(b, "sub", integer(b, "mul", index(b, axis), step), pad)
        end = integer(b, "iminimum", integer(b, "add", begin, size), length + (pad if count_include_pad else 0))
        begin = begin if count_include_pad else integer(b, "imaximum", begin, 0)
        here = integer(b, "sub", end, begin)
        elements = here if elements is None else integer(b, "mul", elements, here)
    assert elements is not None
    return b.pw("div", total, b.cast(elements, compute_dtype(dtype)), dtype=dtype)


@rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(
    b: Builder,
    node: Any,
    x: Expr,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Expr, Expr]:
    """The largest of each window, and its position in the plane, row by row."""
    count = int(node.packet.removeprefix("aten.max_pool")[0])
    sizes = several(kernel, count, ())
    steps, pads = several(stride, count, sizes), several(padding, count, ())
    spread, lengths = several(dilation, count, ()), [size_of(b, x, d) for d in range(len(x.dims) - count, len(x.dims))]
    sizes = reached(sizes, lengths, pads, spread)
    windows = Windows(b, x, sizes, steps, pads, spread, node.metas[0].shape[-count:])
    filled = windows.filled(b, _least(x.dtype))
    begins = [
        integer(b, "sub", integer(b, "mul", index(b, axis), step), pad)
        for axis, step, pad in zip(windows.outer, steps, pads, strict=True)
    ]
    inside = _position_inside(b, filled, windows.inside, sizes)
    places = [
        b.pw("add", b.pw("mul", here, far), begin) for begin, here, far in zip(begins, inside, spread, strict=True)
    ]
    return extreme(b, "max", filled, windows.inside, False), _position_in_plane(b, places, lengths, spread)


def _position_inside(b: Builder, x: Expr, inside: Sequence[int], sizes: Sequence[int]) -> list[Expr]:
    """Where in its window the largest element is, dimension by dimension; the last NaN, if there is one."""
    flat = b.cast(position(b, "argmax", x, list(inside), False), "int32")
    if is_float(x.dtype):
        here = b.const(0, "int32")
        for d, size in zip(inside, sizes, strict=True):
            along = b.redim(index(b, x.dims[d]), [x.dims[d], *[()] * (len(x.dims) - 1 - d)])
            here = b.pw("add", b.pw("mul", here, size), along)
        nan = b.pw("isnan", b.cast(x, compute_dtype(x.dtype)), dtype="bool")
        last = b.reduce("max", b.pw("where", nan, here, -1, dtype="int32"), list(inside), False)
        flat = b.pw("where", b.pw("ge", last, 0, dtype="bool"), last, flat, dtype="int32")
    found: list[Expr] = []
    for size in reversed(sizes):
        found.insert(0, b.pw("imod", flat, size))
        flat = b.pw("idiv", flat, size)
    return found


def _position_in_plane(b: Builder, places: Sequence[Expr], lengths: Sequence[int], spread: Sequence[int]) -> Expr:
    """The number of an element of a plane; a window of nothing but least values has its first element.

    Such a window may begin in the padding. Its first element is the first of its positions that is not.
    """
    flat = b.const(0, "int32")
    for place, length, far in zip(places, lengths, spread, strict=True):
        if far == 1:
            place = b.pw("imaximum", place, 0)
        else:  # below 0 and a multiple of `far` before the first element
            before = b.pw("imod", b.pw("add", place, far * length), far)
            place = b.pw("where", b.pw("lt", place, 0, dtype="bool"), before, place, dtype="int32")
        place = b.pw("iminimum", place, length - 1)
        flat = b.pw("add", b.pw("mul", flat, length), place)
    return b.cast(flat, "int64")


def _least(dtype: str) -> float | int:
    return float("-inf") if is_float(dtype) else int(np.iinfo(dtype).min)


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_avg_pool(b: Builder, node: Any, x: Expr, size: Any) -> Expr:
    count, dtype = int(node.packet[-2]), out_dtype(node)
    windows = Adaptive(b, operand(b, x, dtype), node.metas[0].shape[-count:])
    total, elements = b.reduce("sum", windows.filled(b, 0.0), windows.inside, dtype=dtype), windows.lengths[0]
    for length in windows.lengths[1:]:
        elements = integer(b, "mul", elements, length)
    return b.pw("div", total, b.cast(elements, compute_dtype(dtype)), dtype=dtype)


@rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(b: Builder, node: Any, x: Expr, size: Any) -> tuple[Expr, Expr]:
    """The largest of each window, and its position in the plane, row by row."""
    count = int(node.packet[-2])
    planes = [size_of(b, x, d) for d in range(len(x.dims) - count, len(x.dims))]
    windows = Adaptive(b, x, node.metas[0].shape[-count:])
    filled = windows.filled(b, _least(x.dtype))
    inside = _position_inside(b, filled, windows.inside, windows.sizes)
    places = [b.pw("add", here, begin) for begin, here in zip(windows.begins, inside, strict=True)]
    where = _position_in_plane(b, places, planes, [1] * count)
    return extreme(b, "max", filled, windows.inside, False), where


class Adaptive:
    """The last dimensions of a tensor cut into windows from floor(i L / n) to ceil((i + 1) L / n).

    Args:
        b: the builder.
        x: the tensor.
        counts: windows along each dimension.

    Attributes:
        value: `x` with two dimensions in place of each: windows, and positions inside.
        guards: where those positions are elements of the window.
        inside: numbers of the dimensions that are positions inside windows.
        sizes: positions inside, of the longest window.
        begins: the first element of each window.
        lengths: its number of elements.
    """

    def __init__(self, b: Builder, x: Expr, counts: Sequence[int]):
        self.guards: list[Expr] = []
        self.sizes: list[int] = []
        self.begins: list[Expr] = []
        self.lengths: list[Expr] = []
        lead = len(x.dims) - len(counts)
        for number, count in enumerate(counts):
            d = lead + 2 * number
            length = size_of(b, x, d)
            longest = max(-(-(i + 1) * length // count) - i * length // count for i in range(count))
            window, inner = b.axes.new(count), b.axes.new(longest)
            scaled = integer(b, "mul", index(b, window), length)
            begin = integer(b, "idiv", scaled, count)
            end = integer(b, "idiv", integer(b, "add", scaled, length + count - 1), count)
            place = integer(b, "add", begin, index(b, inner))
            even = length % count == 0
            guard = None if even else integer(b, "lt", place, end, dtype="bool")
            self.guards += [] if guard is None else [guard]
            self.sizes.append(longest)
            self.begins.append(begin)
            self.lengths.append(integer(b, "sub", end, begin))
            x = at(b, x, d, [window, inner], place, guard)
        self.value = x
        self.inside = [lead + 2 * number + 1 for number in range(len(counts))]

    def filled(self, b: Builder, value: float | int) -> Expr:
        """The windows, with `value` where there is no element."""
        x = self.value
        for guard in self.guards:
            x = b.pw("where", guard, x, value, dtype=x.dtype)
        return x


@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def _linear(b: Builder, node: Any, x: Expr, size: Any, corners: bool, scales: Any = None, *more: Any) -> Expr:
    """Two elements of each dimension, weighted by how near they are (UpSample.cuh).

    Positions are in the arithmetic's dtype. Both are multiplied: a difference would lose the smaller of them.
    """
    dtype, shape = out_dtype(node), node.metas[0].shape
    if not is_float(dtype):
        raise Unsupported(f"linear resizing of {dtype}: PyTorch has whole-number arithmetic of its own for it")
    rank = len(shape) - 2
    each = list(scales) if isinstance(scales, list | tuple) else [scales, *more] if more else [scales] * rank
    x = operand(b, x, dtype)
    for d, given in zip(range(len(shape) - 1, 1, -1), reversed(each), strict=True):
        axis = b.axes.new(shape[d])
        place, part = _between(b, axis, size_of(b, x, d), shape[d], corners, given, x.dtype)
        after = integer(b, "iminimum", integer(b, "add", place, 1), size_of(b, x, d) - 1)
        part = b.redim(part, [axis, *[()] * (len(shape) - 1 - d)])
        first, second = at(b, x, d, [axis], place), at(b, x, d, [axis], after)
        x = b.pw("add", b.pw("mul", b.pw("sub", 1.0, part), first), b.pw("mul", part, second))
    return b.cast(x, dtype)


def _between(
    b: Builder, axis: Dim, before: int, after: int, corners: bool, given: float | None, dtype: str
) -> tuple[Expr, Expr]:
    """The element before a position of the resized dimension, and how far behind it that position lies (0 to 1)."""
    number = b.cast(index(b, axis), dtype)
    if corners:
        exact = b.pw("mul", number, (before - 1) / (after - 1) if after > 1 else 0.0)
    else:
        scale = 1.0 / given if given else before / after
        exact = b.pw("sub", b.pw("mul", b.pw("add", number, 0.5), scale), 0.5)
        exact = b.pw("maximum", exact, 0.0)
    floor = b.pw("minimum", b.pw("floor", exact), float(before - 1))
    return b.cast(floor, "int32"), b.pw("minimum", b.pw("sub", exact, floor), 1.0)


@rule("upsample_nearest2d")
def _nearest(b: Builder, node: Any, x: Expr, size: Any, scales: Any = None) -> Expr:
    for number in range(2):
        d = len(x.dims) - 2 + number
        before, after, given = size_of(b, x, d), node.metas[0].shape[d], scales[number] if scales else None
        if before != after or given not in (None, 1.0):
            axis = b.axes.new(after)
            x = at(b, x, d, [axis], _nearest_position(b, axis, before, after, given))
    return x


def _nearest_position(b: Builder, axis: Dim, before: int, after: int, given: float | None) -> Expr:
    """Floor of position times scale in fp32, as PyTorch's kernels have it (UpSample.cuh)."""
    scale = np.float32(1.0 / given) if given else np.float32(before) / np.float32(after)
    found = np.minimum(np.floor(np.arange(after, dtype=np.float32) * scale).astype(np.int64), before - 1)
    if after % before == 0 and bool((found == np.arange(after) // (after // before)).all()):
        return integer(b, "idiv", index(b, axis), after // before)
    scaled = b.nest.add(Expr("mul", (b.cast(index(b, axis), "float32"), float(scale)), (), "float32"))
    exact = integer(b, "floor", scaled, dtype="float32")
    return integer(b, "iminimum", b.cast(exact, "int32"), before - 1)


__all__ = ["Adaptive", "Place", "Windows", "is_load", "reached", "several"]
