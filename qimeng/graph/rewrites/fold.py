"""Folds what is done to each feature of a linear map into its weights: batch norms in evaluation mode, scales, shifts.

Deals in ``map(x, w) * s + t`` with `s` and `t` of parameters alone, which is ``map(x, w * s) + (b * s + t)``. Knows
nothing about the use of the result.
"""

from __future__ import annotations

import math

from qimeng.graph.opgraph import Node, Value
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule
from qimeng.graph.rewrites.linear import LinearMap, along, as_vector, linear_map
from qimeng.graph.rewrites.scaled import is_map, narrow, wide


class FoldNorm(Rule):
    """``batch_norm(map(x, w) + b)`` in evaluation mode as one map (S. Ioffe, C. Szegedy, Batch Normalization, 2015)."""

    name = "norm"
    option = "fold"
    packets = ("aten._native_batch_norm_legit_no_training",)

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for a positive eps: the variance of a channel may be 0."""
        x, weight, bias, mean, variance, _, eps = node.args
        found = linear_map(edit, x)
        edit.alone(x, node.name)
        if found.channel != 1:
            raise NoRewrite(f"{node.name} scales dimension 1, the features of {found.node.name} are {found.channel}")
        if not eps > 0:
            raise NoRewrite(f"eps is {eps:g}, so that a variance of 0 would give weights that are not finite")
        if not all(edit.is_state(v) for v in (weight, bias, mean, variance) if v is not None):
            raise NoRewrite(f"the statistics of {node.name} are updated by the call")
        scale = edit.op("aten.rsqrt.default", edit.op("aten.add.Tensor", wide(edit, variance), eps))
        if weight is not None:
            scale = edit.op("aten.mul.Tensor", scale, wide(edit, weight))
        shift = edit.op("aten.neg.default", edit.op("aten.mul.Tensor", wide(edit, mean), scale))
        if bias is not None:
            shift = edit.op("aten.add.Tensor", shift, wide(edit, bias))
        edit.instead(Value(node.name), _scaled(edit, found, scale, shift))


class FoldScale(Rule):
    """``map(x, w) * s``, ``map(x, w) / 2`` or ``map(x, w) + t`` as one map."""

    name = "scale"
    option = "fold"
    packets = ("aten.mul", "aten.div", "aten.add", "aten.sub", "aten.neg")

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for finite numbers, and for values of parameters that change along the features only."""
        first, second = (*node.args, None)[:2]
        if node.packet == "aten.neg":
            second = -1
        if node.packet in ("aten.mul", "aten.add") and not is_map(edit, first):
            first, second = second, first
        found = linear_map(edit, first)
        edit.alone(first, node.name)
        if any(v not in (1, None) for _, v in node.kwargs):
            raise NoRewrite(f"{node.name} has a factor or a rounding mode of its own")
        meta = edit.meta(first)
        if edit.meta(Value(node.name)).shape != meta.shape:
            raise NoRewrite(f"{node.name} widens the result to {edit.meta(Value(node.name)).shape}")
        by = as_vector(edit, second, meta.shape, found.channel)
        if isinstance(by, float) and not math.isfinite(by):
            raise NoRewrite(f"{by} is not finite")
        if node.packet == "aten.div":
            if not isinstance(by, float):
                raise NoRewrite(f"{node.name} divides by a parameter, which may be 0")
            if by == 0 or abs(by) < 1e-30:
                raise NoRewrite(f"{node.name} divides by {by:g}")
            by = 1.0 / by
        value = by if isinstance(by, float) else wide(edit, by)
        if node.packet in ("aten.mul", "aten.div", "aten.neg"):
            edit.instead(Value(node.name), _scaled(edit, found, value, None))
            return
        shift = edit.op("aten.neg.default", value) if node.packet == "aten.sub" and isinstance(value, Value) else value
        if node.packet == "aten.sub" and isinstance(shift, float):
            shift = -shift
        edit.instead(Value(node.name), _scaled(edit, found, None, shift))


def _scaled(edit: Edit, found: LinearMap, scale: Value | float | None, shift: Value | float | None) -> Value:
    """The map with its features times `scale` plus `shift`."""
    weight, bias, dtype = found.weight, found.bias, edit.meta(found.weight).dtype
    if scale is not None:
        factor = _along_weights(edit, found, scale) if isinstance(scale, Value) else scale
        weight = narrow(edit, edit.op("aten.mul.Tensor", wide(edit, weight), factor), dtype)
        if bias is not None:
            bias = edit.op("aten.mul.Tensor", wide(edit, bias), scale)
    if shift is not None:
        if bias is not None:
            bias = edit.op("aten.add.Tensor", wide(edit, bias), shift)
        elif isinstance(shift, Value):
            bias = shift
        else:
            raise NoRewrite(f"{found.node.name} has no bias that the number {shift:g} could be added to")
    return found.with_weights(edit, weight, None if bias is None else narrow(edit, bias, dtype))


def _along_weights(edit: Edit, found: LinearMap, vector: Value) -> Value:
    """One value a feature of the result, as a view along the weights."""
    rank = len(edit.meta(found.weight).shape)
    if found.transposed and found.groups > 1:
        raise NoRewrite(f"{found.node.name} is a transposed convolution of {found.groups} groups")
    return along(edit, vector, rank, found.out)


__all__ = ["FoldNorm", "FoldScale"]
