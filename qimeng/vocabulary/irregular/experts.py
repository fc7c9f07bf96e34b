"""Layers of experts, however they are written. Deals in graphs. Knows nothing about schedules or kernels."""

from __future__ import annotations

from qimeng.family import NotConcerned
from qimeng.graph.opgraph import Node, OpGraph
from qimeng.vocabulary.irregular.dense_experts import Layer, dense_layer
from qimeng.vocabulary.irregular.sorted_experts import sorted_layer


def experts_layer(graph: OpGraph, node: Node) -> Layer:
    """The layer whose results `node` adds up.

    Raises:
        NotConcerned: it adds up no weighted results of experts.
        Unsupported: it does, in a way that is not covered.
    """
    try:
        return dense_layer(graph, node)
    except NotConcerned:
        return sorted_layer(graph, node)


__all__ = ["experts_layer"]
