"""Moves sums and means before what they sum: scales, shifts and linear maps, where that leaves less to compute.

Deals in ``sum(map(x, w) + b)``, which is ``map(x, sum(w)) + sum(b)``, and in ``sum(x * c)``, which is ``sum(x) * c``.
An infinite input makes the sum NaN where infinities of both signs meet in it; a product with zeros keeps that. Knows
nothing about other reductions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qimeng.graph.opgraph import Node, Value
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule
from qimeng.graph.rewrites.linear import LinearMap, linear_map
from qimeng.graph.rewrites.scaled import is_map, narrow, wide

FEWEST = 4
"""Features of a map from which on two of them are less work."""


@dataclass(frozen=True)
class Reduction:
    """A sum or a mean.

    Attributes:
        node: the operator.
        x: what is reduced.
        shape: of `x`.
        dims: the dimensions that are reduced, from 0.
        mean: whether it is a mean.
    """

    node: Node
    x: Value
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    mean: bool

    @property
    def target(self) -> str:
        """The operator over given dimensions, also where this one reduces all without naming them."""
        return "aten.mean.dim" if self.mean else "aten.sum.dim_IntList"

    @property
    def count(self) -> int:
        """Elements that make one."""
        return math.prod(self.shape[d] for d in self.dims)

    def of(self, edit: Edit, x: Value, dims: Sequence[int]) -> Value:
        """The same kind of reduction of another tensor; the dimensions stay, with one element."""
        return edit.op(self.target, x, tuple(dims), True) if dims else x

    def finish(self, edit: Edit, found: Value) -> None:
        """Put `found`, whose reduced dimensions have one element or are gone, in the place of the reduction."""
        wanted = edit.meta(Value(self.node.name)).shape
        if edit.meta(found).shape != wanted:
            found = edit.op("aten.reshape.default", found, wanted)
        edit.instead(Value(self.node.name), found)


def reduction(edit: Edit, node: Node) -> Reduction:
    """The reduction that `node` is.

    Raises:
        NoRewrite: it has another dtype than its operand, or reduces nothing.
    """
    x, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
    meta = edit.meta(x)
    if edit.meta(Value(node.name)).dtype != meta.dtype or "float" not in meta.dtype:
        raise NoRewrite("")
    rank = len(meta.shape)
    chosen = tuple(sorted(d % rank for d in dims)) if dims and rank else tuple(range(rank))
    found = Reduction(node, x, meta.shape, chosen, node.packet == "aten.mean")
    if found.count < 2:
        raise NoRewrite("")
    return found


class EarlyOverScale(Rule):
    """``sum(x * c)`` as ``sum(x) * c``, ``sum(x + c)`` as ``sum(x) + n * c``."""

    name = "sum_scale"
    option = "early"
    packets = ("aten.sum", "aten.mean")

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for finite numbers, and for values of parameters: factors only along dimensions that stay."""
        found = reduction(edit, node)
        source = edit.maker(found.x)
        if source.packet not in SCALES:
            raise NoRewrite("")
        first, second = (*source.args, None)[:2]
        if source.packet in ("aten.mul", "aten.add") and (not isinstance(first, Value) or edit.is_state(first)):
            first, second = second, first
        if not isinstance(first, Value) or edit.meta(first).shape != found.shape or edit.is_state(first):
            raise NoRewrite("")
        if not _reaches_map(edit, first):
            raise NoRewrite("")  # nothing would be saved but one operation an element
        edit.alone(found.x, node.name)
        if any(v not in (1, None) for _, v in source.kwargs):
            raise NoRewrite(f"{source.name} has a factor or a rounding mode of its own")
        reduced = found.of(edit, first, found.dims)
        if source.packet == "aten.neg":
            found.finish(edit, edit.op("aten.neg.default", reduced))
        elif isinstance(second, Value):
            found.finish(edit, self._by_tensor(edit, found, source, reduced, second))
        else:
            found.finish(edit, self._by_number(edit, found, source, reduced, second))

    def _by_number(self, edit: Edit, found: Reduction, source: Node, reduced: Value, number: Any) -> Value:
        if isinstance(number, (bool, complex)) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise NoRewrite(f"{source.name} has {number}, which is not finite")
        if source.packet == "aten.div" and number == 0:
            raise NoRewrite(f"{source.name} divides by 0")
        if source.packet in ("aten.add", "aten.sub") and not found.mean:
            number = number * found.count
        return edit.op(source.target, reduced, number)

    def _by_tensor(self, edit: Edit, found: Reduction, source: Node, reduced: Value, other: Value) -> Value:
        if not edit.is_state(other):
            raise NoRewrite(f"{other.node} depends on the inputs")
        given = edit.meta(other).shape
        full = (1,) * (len(found.shape) - len(given)) + tuple(given)
        if len(full) != len(found.shape):
            raise NoRewrite("")
        other = other if full == given else edit.op("aten.reshape.default", other, full)
        if source.packet in ("aten.mul", "aten.div"):
            moving = [d for d in found.dims if full[d] != 1]
            if moving or source.packet == "aten.div":
                raise NoRewrite(f"{source.name} has a factor that changes along dimension {(moving or found.dims)[0]}")
            return edit.op(source.target, reduced, other)
        wide_ = tuple(found.shape[d] if d in found.dims else full[d] for d in range(len(full)))
        other = other if wide_ == full else edit.op("aten.expand.default", other, wide_)
        return edit.op(source.target, reduced, found.of(edit, other, found.dims))


class EarlyOverFeatures(Rule):
    """The sum over the features of a linear map as a map to one feature."""

    name = "sum_features"
    option = "early"
    packets = ("aten.sum", "aten.mean")

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for maps of `FEWEST` features or more that nothing else reads."""
        found = reduction(edit, node)
        map_ = linear_map(edit, found.x)
        edit.alone(found.x, node.name)
        if map_.channel not in found.dims:
            raise NoRewrite("")
        if (features := found.shape[map_.channel]) < FEWEST:
            raise NoRewrite(f"{map_.node.name} has {features} features, fewer than {FEWEST}")
        rest = tuple(d for d in found.dims if d != map_.channel)
        if map_.node.packet == "aten.convolution":
            one = self._convolution(edit, found, map_)
        else:
            one = self._product(edit, found, map_)
        found.finish(edit, found.of(edit, one, rest))

    def _convolution(self, edit: Edit, found: Reduction, map_: LinearMap) -> Value:
        """A convolution to two features, the sum and one of zeros, which are then added."""
        weight, dtype = wide(edit, map_.weight), edit.meta(map_.weight).dtype
        shape = edit.meta(weight).shape
        if map_.transposed:
            w = found.of(edit, weight, (1,))
            w = self._over_groups(edit, found, map_, w)
        else:
            groups = map_.groups
            parts = edit.op("aten.reshape.default", weight, (groups, shape[0] // groups, *shape[1:]))
            w = edit.op("aten.reshape.default", found.of(edit, parts, (1,)), (1, groups * shape[1], *shape[2:]))
            w = self._over_groups(edit, found, map_, w)
        out = map_.out
        w = narrow(edit, edit.op("aten.cat.default", (w, edit.op("aten.mul.Tensor", w, 0.0)), out), dtype)
        bias = None
        if map_.bias is not None:
            b = found.of(edit, wide(edit, map_.bias), (0,))
            bias = narrow(edit, edit.op("aten.cat.default", (b, edit.op("aten.mul.Tensor", b, 0.0)), 0), dtype)
        y = edit.op(map_.node.target, map_.x, w, bias, *map_.node.args[3:8], 1)
        return edit.op("aten.sum.dim_IntList", y, (map_.channel,), True)

    def _over_groups(self, edit: Edit, found: Reduction, map_: LinearMap, w: Value) -> Value:
        """A mean over the features of one group is divided by the number of groups as well."""
        return edit.op("aten.div.Tensor", w, map_.groups) if found.mean and map_.groups > 1 else w

    def _product(self, edit: Edit, found: Reduction, map_: LinearMap) -> Value:
        """A product with a vector, of the operand as a matrix."""
        dtype, x = edit.meta(map_.weight).dtype, map_.x
        meta = edit.meta(x)
        if len(meta.shape) != 2:
            if not meta.is_contiguous:
                raise NoRewrite(f"{x.node} has strides {meta.stride}")
            x = edit.op("aten.view.default", x, (math.prod(meta.shape[:-1]), meta.shape[-1]))
        w = edit.op(found.target, wide(edit, map_.weight), (map_.out,))
        w, zero = narrow(edit, w, dtype), narrow(edit, edit.op("aten.mul.Tensor", w, 0.0), dtype)
        y = edit.op("aten.add.Tensor", edit.op("aten.mv.default", x, w), edit.op("aten.mv.default", x, zero))
        if map_.bias is not None:
            b = narrow(edit, edit.op(found.target, wide(edit, map_.bias), (0,)), dtype)
            y = edit.op("aten.add.Tensor", y, b)
        return edit.op("aten.view.default", y, (*found.shape[:-1], 1))


class EarlyOverPlaces(Rule):
    """The sum over all places of a convolution that loses none, as a product with the sum over all places before."""

    name = "sum_places"
    option = "early"
    packets = ("aten.sum", "aten.mean")

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for transposed convolutions without padding, and for convolutions of one place."""
        found = reduction(edit, node)
        map_ = linear_map(edit, found.x)
        if map_.node.packet != "aten.convolution" or map_.channel != 1:
            raise NoRewrite("")
        places = tuple(range(2, len(found.shape)))
        if not set(places) <= set(found.dims) or 1 in found.dims:
            raise NoRewrite("")
        edit.alone(found.x, node.name)
        stride, padding, _, transposed, _, groups = map_.node.args[3:]
        kernel = edit.meta(map_.weight).shape[2:]
        if groups != 1:
            raise NoRewrite(f"{map_.node.name} has {groups} groups")
        if any(p != 0 for p in padding):
            raise NoRewrite(f"{map_.node.name} has the padding {padding}, which loses places at the edge")
        if not transposed and (any(k != 1 for k in kernel) or any(s != 1 for s in stride)):
            raise NoRewrite(
                f"{map_.node.name} reads windows of {kernel}, which count places a different number of times"
            )
        dtype, count = edit.meta(map_.weight).dtype, math.prod(found.shape[d] for d in places)
        s = edit.op("aten.sum.dim_IntList", map_.x, places)
        w = edit.op("aten.sum.dim_IntList", wide(edit, map_.weight), places)
        w = w if transposed else edit.op("aten.permute.default", w, (1, 0))
        if found.mean:
            w = edit.op("aten.div.Tensor", w, count)
        y = edit.op("aten.mm.default", s, narrow(edit, w, dtype))
        if any(k != 1 for k in kernel):  # weights of both signs for each place; otherwise an infinity stays one
            zero = edit.op("aten.mul.Tensor", edit.op("aten.sum.dim_IntList", w, (1,)), 0.0)
            nothing = edit.op("aten.mv.default", s, narrow(edit, zero, dtype))
            y = edit.op("aten.add.Tensor", y, edit.op("aten.unsqueeze.default", nothing, 1))
        if map_.bias is not None:
            b = map_.bias if found.mean else edit.op("aten.mul.Tensor", map_.bias, float(count))
            y = edit.op("aten.add.Tensor", y, b)
        shape = (*found.shape[:2], *(1 for _ in places))
        y = edit.op("aten.view.default", y, shape)
        found.finish(edit, found.of(edit, y, tuple(d for d in found.dims if d not in places)))


SCALES = ("aten.mul", "aten.div", "aten.add", "aten.sub", "aten.neg")


def _reaches_map(edit: Edit, value: Value) -> bool:
    """Whether a linear map yields `value`, or does so but for scales and shifts."""
    node = edit.maker(value)
    while node.packet in SCALES:
        operands = [v for v in node.operands() if not edit.is_state(v)]
        if len(operands) != 1:
            return False
        value, node = operands[0], edit.maker(operands[0])
    return is_map(edit, value)


__all__ = ["EarlyOverFeatures", "EarlyOverPlaces", "EarlyOverScale", "Reduction", "reduction"]
