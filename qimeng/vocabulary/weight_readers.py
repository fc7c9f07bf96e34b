"""Kinds of action that have a product compute its weight itself, from what a declaration stores of it.

Deals in regions. Knows nothing about how weights are stored or about kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

from qimeng.actions import Context
from qimeng.errors import IllegalAction
from qimeng.graph.region import Region
from qimeng.graph.state import settled_nodes
from qimeng.interfaces import Action
from qimeng.program.program import Program
from qimeng.vocabulary.taking_over import TakingOver


class WeightReader(TakingOver):
    """Has a product, and those equal to it, compute its weight from what is stored of it."""

    def candidates(self, program: Program) -> Iterable[Region]:
        """Where weights are computed once, since a spec declares them."""
        return program.called if settled_nodes(program.graph) else ()

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal as for every `TakingOver`, and where the device reads fp8 if that is what is stored."""
        reading, device = self.target(program, action), context.device
        small = any(program.graph.meta(v).dtype.startswith("float8") for v in reading.inputs)
        if small and not device.has("fp8"):
            raise IllegalAction(f"{reading.label()} reads fp8, which {device.name} ({device.target}) does not have")
        super().check(program, action, context)


__all__ = ["WeightReader"]
