"""Several graphs as one: none reads another's values.

Deals in names. Knows nothing about programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qimeng.graph.opgraph import Node, OpGraph, Value


def side_by_side(graphs: Sequence[OpGraph]) -> OpGraph:
    """The graph with the inputs of all, in order, and the outputs of all.

    Names of nodes and keys of parameters begin with the number of their graph. It is a graph to plan on: it does not
    say how its inputs and outputs are put together.

    Args:
        graphs: at least one.
    """
    nodes: dict[str, Node] = {}
    outputs: list[Any] = []
    mutations: list[tuple[str, Value]] = []
    scalars: dict[int, Any] = {}
    first = 0
    for number, graph in enumerate(graphs):
        prefix = f"g{number}_"
        for node in graph.nodes.values():
            target = _target(node, first, prefix)
            args, kwargs = _renamed(node.args, prefix), _renamed(node.kwargs, prefix)
            nodes[prefix + node.name] = replace(node, name=prefix + node.name, target=target, args=args, kwargs=kwargs)
        outputs += [_renamed(out, prefix) for out in graph.outputs]
        mutations += [(prefix + key, _renamed(value, prefix)) for key, value in graph.mutations]
        scalars |= {place + first: value for place, value in graph.scalars.items()}
        first += graph.n_inputs
    return OpGraph(
        nodes,
        tuple(outputs),
        tuple(mutations),
        scalars=scalars,
        n_inputs=first,
        settles=any(graph.settles for graph in graphs),
        deterministic=any(graph.deterministic for graph in graphs),
        shares={f"g{n}_{name}": shares for n, graph in enumerate(graphs) for name, shares in graph.shares.items()},
    )


def _target(node: Node, first: int, prefix: str) -> str:
    if node.kind in ("input", "scalar"):
        return str(int(node.target) + first)
    return prefix + node.target if node.kind in ("parameter", "buffer") else node.target


def _renamed(tree: Any, prefix: str) -> Any:
    if isinstance(tree, Value):
        return Value(prefix + tree.node, tree.port)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_renamed(item, prefix) for item in tree)
    return tree


__all__ = ["side_by_side"]
