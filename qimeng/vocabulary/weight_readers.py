"""Kinds of action that have a product compute its weight itself, from what a declaration stores of it.

Deals in regions. Knows nothing about how weights are stored or about kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

from qimeng.graph.region import Region
from qimeng.graph.state import settled_nodes
from qimeng.program.program import Program
from qimeng.vocabulary.taking_over import TakingOver


class WeightReader(TakingOver):
    """Has a product, and those equal to it, compute its weight from what is stored of it."""

    def candidates(self, program: Program) -> Iterable[Region]:
        """Where weights are computed once, since a spec declares them."""
        return program.called if settled_nodes(program.graph) else ()


__all__ = ["WeightReader"]
