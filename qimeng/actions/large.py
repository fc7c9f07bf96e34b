"""Large programs: a budget is tens of steps, so that steps are about many regions at once.

Deals in numbers of operators, and in regions that are equal. Knows nothing about any one kind.
"""

from __future__ import annotations

from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region
from qimeng.graph.state import settled_nodes
from qimeng.program.program import Program

MANY = 32
"""Operators from which on a program is large; a fusion of two takes one step."""


def is_large(program: Program) -> bool:
    """Whether a program has `MANY` operators or more; stays true as it is fused."""
    return operators(program) >= MANY


def operators(program: Program) -> int:
    """Operators that a call computes, views not counted."""
    known = program.graph.memo
    if "operators" not in known:
        settled = settled_nodes(program.graph)
        known["operators"] = sum(n.packet not in VIEWS and n.name not in settled for n in program.graph.ops())
    return int(known["operators"])


def unlike(program: Program) -> tuple[Region, ...]:
    """The first of each set of equal regions that every call computes: they share one implementation."""
    found: dict[str, Region] = {}
    for region in program.called:
        found.setdefault(region.signature, region)
    return tuple(found.values())


__all__ = ["MANY", "is_large", "operators", "unlike"]
