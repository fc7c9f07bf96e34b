"""Rebuilds the programs of a stored tree from its patches.

Deals in digests and patches. A tree stores the steps from the start program, not the resulting programs.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from qimeng.errors import QimengError
from qimeng.store import StoredStep

if TYPE_CHECKING:
    from qimeng.planner.data.tree import Tree
    from qimeng.program.program import Program


def programs_of(tree: Tree, start: Program) -> dict[str, Program]:
    """Digest to program, of all that can be made again.

    Args:
        tree: what was explored, with the names of today's programs (`Tree.today`).
        start: its start program.
    """
    chosen = {key: e.chosen for key, e in tree.keyed.items()}
    leading: dict[str, list[StoredStep]] = {}
    for edge in tree.edges:
        if edge.accepted and edge.child is not None and edge.patch is not None:
            leading.setdefault(edge.parent, []).append(edge)
    found, waiting = {start.digest: start}, deque([start])
    while waiting:
        here = waiting.popleft()
        for edge in leading.get(here.digest, ()):
            if edge.child in found:
                continue
            with suppress(QimengError, KeyError, IndexError):
                patch = tree.patches[edge.patch or ""].patch(here.graph)
                child = patch.apply(here, chosen.get(edge.evaluation or "", 0))
                if child.digest == edge.child:
                    found[child.digest] = child
                    waiting.append(child)
    return found


__all__ = ["programs_of"]
