"""Finds the smallest form from which a value that is computed once can be made element by element.

Deals in operators and bytes. Knows nothing about regions or kernels.
"""

from __future__ import annotations

import networkx as nx

from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.ops import VIEWS, category

JOINS = ("aten.cat", "aten.stack")
"""Operators that put elements side by side without computing on them."""


def narrowest(graph: OpGraph, goal: Value) -> tuple[set[Value], set[str]]:
    """The values of fewest bytes that `goal` can be computed from element by element, and the operators that do it.

    A minimum cut through the operators before it; of several the one nearest to it, and never at a view.
    """
    flow, waiting, seen = nx.DiGraph(), [goal], {goal}
    while waiting:
        value = waiting.pop()
        node = graph.nodes[value.node]
        free = node.packet in VIEWS
        flow.add_edge((value, "made"), (value, "read"), **({} if free else {"capacity": graph.meta(value).bytes}))
        if node.kind == "op" and (free or category(node) == "pointwise" or node.packet in JOINS):
            for before in (v for v in node.operands() if graph.nodes[v.node].kind != "constant"):
                flow.add_edge((before, "read"), (value, "made"))
                waiting += [] if before in seen else [before]
                seen.add(before)
        else:
            flow.add_edge("memory", (value, "made"))
    _, (_, near) = nx.minimum_cut(flow, "memory", (goal, "read"))
    read = {v for v in seen if (v, "read") in near and (v, "made") not in near}
    return read, {v.node for v in seen if (v, "made") in near}


__all__ = ["JOINS", "narrowest"]
