"""Actions as texts.

Deals in words. Knows nothing about legality.
"""

from __future__ import annotations

from qimeng.interfaces import Action
from qimeng.program.program import Program


def action_text(action: Action, program: Program) -> str:
    """The action as a planner reads it: kind, choice, and what the regions compute.

    Regions are named by what they are, not by id, so that a text means the same in every program.
    """
    parts = []
    for region_id in action.regions:
        region = program.region(region_id)
        shapes = ", ".join("x".join(map(str, program.graph.meta(v).shape)) or "scalar" for v in region.outputs)
        parts.append(f"{region_id} {region.label()} [{shapes}]")
    head = f"{action.kind} {action.param}".strip()
    return f"{head}: {' with '.join(parts)}" if parts else head


__all__ = ["action_text"]
