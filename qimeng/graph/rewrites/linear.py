"""The linear maps of a graph: convolutions and matrix products with weights, seen in one way.

Deals in operators whose result is linear in one operand, with the weights and the bias that make it. Knows nothing
about rewrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qimeng.graph.opgraph import Node, Value
from qimeng.graph.rewrites.base import Edit, NoRewrite

PACKETS = ("aten.convolution", "aten.linear", "aten.addmm", "aten.mm")


@dataclass(frozen=True)
class LinearMap:
    """One operator ``y = map(x, weight) + bias``.

    Attributes:
        node: the operator.
        x: what it is applied to.
        weight: its weights.
        bias: added along the features; None where there is none.
        channel: dimension of the result along the features.
        out: dimension of the weights along the features of the result.
    """

    node: Node
    x: Value
    weight: Value
    bias: Value | None
    channel: int
    out: int

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return self.node.packet == "aten.convolution" and bool(self.node.args[6])

    @property
    def groups(self) -> int:
        """Groups of a convolution; 1 for a product."""
        return int(self.node.args[8]) if self.node.packet == "aten.convolution" else 1

    def features(self, edit: Edit) -> int:
        """Number of features of the result."""
        return edit.meta(Value(self.node.name)).shape[self.channel]

    def with_weights(self, edit: Edit, weight: Value, bias: Value | None) -> Value:
        """The map with other weights, on the same operand."""
        node = self.node
        if node.packet == "aten.convolution":
            return edit.op(node.target, self.x, weight, bias, *node.args[3:])
        if node.packet == "aten.linear":
            return edit.op(node.target, self.x, weight, *([] if bias is None else [bias]))
        if bias is None:
            return edit.op("aten.mm.default", self.x, weight)
        return edit.op("aten.addmm.default", bias, self.x, weight)


def linear_map(edit: Edit, value: Any) -> LinearMap:
    """The map that yields `value`, with weights that depend on parameters alone.

    Raises:
        NoRewrite: `value` comes from another operator, or the weights depend on the inputs.
    """
    node = edit.maker(value)
    if node.packet not in PACKETS or node.kind != "op":
        raise NoRewrite("")
    shape = edit.meta(value).shape
    bias: Any = None
    if node.packet == "aten.convolution":
        x, weight, bias = node.args[:3]
        channel, out = len(shape) - len(edit.meta(weight).shape) + 1, 1 if node.args[6] else 0
    elif node.packet == "aten.linear":
        x, weight, bias = (*node.args, None)[:3]
        channel, out = len(shape) - 1, 0
    else:
        if node.packet == "aten.addmm":
            if any(v != 1 for v in (*node.args[3:], *(v for _, v in node.kwargs))):
                raise NoRewrite(f"{node.name} has factors of its own")
            bias, x, weight = node.args[:3]
        else:
            x, weight = node.args[:2]
        channel, out = 1, 1
    if not edit.is_state(weight) or not (bias is None or edit.is_state(bias)):
        raise NoRewrite(f"the weights of {node.name} depend on the inputs")
    if bias is not None and edit.meta(bias).shape != (shape[channel],):
        raise NoRewrite(f"the bias of {node.name} has the shape {edit.meta(bias).shape}, not ({shape[channel]},)")
    return LinearMap(node, x, weight, bias, channel, out)


def along(edit: Edit, vector: Value, rank: int, dim: int) -> Value:
    """`vector` as a view of `rank` dimensions that changes along `dim` only."""
    shape = [1] * rank
    shape[dim] = edit.meta(vector).shape[0]
    return vector if rank == 1 else edit.op("aten.view.default", vector, tuple(shape))


def as_vector(edit: Edit, operand: Any, shape: Sequence[int], channel: int) -> Value | float:
    """What `operand` adds to or multiplies a result of `shape` with: a number, or one value a feature.

    Raises:
        NoRewrite: it depends on the inputs, or changes along other dimensions.
    """
    if isinstance(operand, (bool, complex)) or not isinstance(operand, (int, float, Value)):
        raise NoRewrite("")
    if not isinstance(operand, Value):
        return float(operand)
    if edit.maker(operand).kind == "constant":
        number = edit.maker(operand).literal
        return float(number)
    if not edit.is_state(operand):
        raise NoRewrite(f"{operand.node} depends on the inputs")
    given = edit.meta(operand).shape
    full = (1,) * (len(shape) - len(given)) + tuple(given)
    if len(full) > len(shape) or any(n != 1 for d, n in enumerate(full) if d != channel):
        raise NoRewrite(
            f"{operand.node} has the shape {given}, which changes along more than the {shape[channel]} features"
        )
    flat = operand if given == (full[channel],) else edit.op("aten.reshape.default", operand, (full[channel],))
    if full[channel] == shape[channel]:
        return flat
    return edit.op("aten.expand.default", flat, (shape[channel],))


__all__ = ["PACKETS", "LinearMap", "along", "as_vector", "linear_map"]
