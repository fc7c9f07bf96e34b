"""Linear layers that read the same values as one, such as the queries, keys and values of an attention.

Deals in products with weights of parameters alone. One product of all their features keeps more of a GPU busy and reads
the values once; each reader gets a slice. Knows nothing about who reads it.
"""

from __future__ import annotations

from qimeng.graph.opgraph import Node, Value
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule
from qimeng.graph.rewrites.linear import LinearMap, linear_map


class Together(Rule):
    """``linear(x, v); linear(x, w)`` as slices of ``linear(x, cat(v, w))``."""

    name = "together"
    option = "together"
    packets = ("aten.linear",)

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for two layers or more that all have a bias, or all have none."""
        group = [m for n in edit.graph.ops() if (m := _layer(edit, n)) is not None and m.x == node.args[0]]
        if len(group) < 2 or group[0].node is not node:
            raise NoRewrite("")
        if len({m.bias is None for m in group}) > 1:
            raise NoRewrite(f"some of the {len(group)} layers on {group[0].x.node} have a bias, others none")
        weight = edit.op("aten.cat.default", tuple(m.weight for m in group), 0)
        biases = tuple(m.bias for m in group if m.bias is not None)
        y = group[0].with_weights(edit, weight, edit.op("aten.cat.default", biases, 0) if biases else None)
        begin = 0
        for m in group:
            end = begin + m.features(edit)
            edit.view_instead(Value(m.node.name), edit.op("aten.slice.Tensor", y, m.channel, begin, end))
            begin = end


def _layer(edit: Edit, node: Node) -> LinearMap | None:
    """The linear layer that `node` is; None where it is something else, or its weights depend on the inputs."""
    if node.packet != "aten.linear":
        return None
    try:
        return linear_map(edit, Value(node.name))
    except NoRewrite:
        return None


__all__ = ["Together"]
