"""Finds the values of a graph that a later operator decides on, so that one ulp can change the result.

Deals in operators and their readers. Knows nothing about regions or kernels.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.ops import JUMPS, category

COMPARISONS = frozenset("aten.eq aten.ne aten.lt aten.le aten.gt aten.ge".split())

CHOICES = frozenset(
    "aten.argmax aten.argmin aten.topk aten.sort aten.argsort aten.kthvalue aten.searchsorted aten.bucketize".split()
)
"""Operators that yield positions."""

SIGNS = frozenset("aten.sign aten.sgn aten.threshold aten.heaviside".split())
"""Operators among `JUMPS` that jump only at 0, which rounding does not reach, or are continuous there."""

PASSES = frozenset("aten.amax aten.amin aten.max aten.min aten.cummax aten.cummin".split())
"""Reductions and scans that return one of their operands, so the values before them decide."""


_found: WeakKeyDictionary[OpGraph, frozenset[Value]] = WeakKeyDictionary()


def deciding_values(graph: OpGraph) -> frozenset[Value]:
    """Values that a jump, a comparison, a choice or a conversion to integers takes; worked out once for each graph.

    And those that they are computed from by pointwise operators: sums and products further up round on their own.
    """
    if graph.around is not None:
        return graph.around.decides
    if graph not in _found:
        _found[graph] = _deciding(graph)
    return _found[graph]


def _deciding(graph: OpGraph) -> frozenset[Value]:
    found: set[Value] = set()
    for node in reversed(graph.nodes.values()):
        reached = any(Value(node.name, port) in found for port in range(len(node.metas)))
        if node.kind == "op" and (_decides(graph, node) or (reached and _passes(node))):
            found.update(v for v in node.operands() if _is_floating(graph, v))
    return frozenset(found)


def _passes(node: Node) -> bool:
    return category(node) in ("pointwise", "view") or node.packet in PASSES


def _decides(graph: OpGraph, node: Node) -> bool:
    if node.packet in COMPARISONS:
        return 0 not in [a for a in node.args if isinstance(a, (int, float))]  # an ulp does not change a sign
    if node.packet == "aten.div":
        return any(k == "rounding_mode" and v is not None for k, v in node.kwargs)
    if node.packet in ("aten.max", "aten.min", "aten.cummax", "aten.cummin"):
        return len(node.metas) > 1  # with positions
    if node.packet == "aten._to_copy":
        made = node.metas[0]
        return made is not None and ("float" not in made.dtype or made.dtype.startswith("float8"))
    return node.packet in CHOICES or (node.packet in JUMPS and node.packet not in SIGNS)


def _is_floating(graph: OpGraph, value: Value) -> bool:
    metas = graph.nodes[value.node].metas
    meta = metas[value.port] if value.port < len(metas) else None
    return meta is not None and "float" in meta.dtype


__all__ = ["deciding_values"]
