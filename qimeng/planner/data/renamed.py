"""Trees of another version: their programs under the names that this version gives them.

Deals in digests. A program is called by the hash of its source, and how a source is laid out changes between versions,
what was tried and what came of it does not. Every patch is in the tree, so the programs can be made again from the
start program, and named anew. Knows nothing about files.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from qimeng.envs.replay import subject_of
from qimeng.errors import ReplayError
from qimeng.store import StoredStep, evaluation_key

if TYPE_CHECKING:
    from qimeng.planner.data.tree import Tree
    from qimeng.program.program import Program


def renamed(tree: Tree, start: Program) -> Tree:
    """`tree` with today's digests, its edges applied one after another from `start`.

    A tree whose programs are all called so already is returned as it is. Of another, what can no longer be applied is
    left out, and so are programs that no edge leads to: final verifications, which have a subject of their own, and
    those of a tree that begins with another program. The start program may have its old name while others have not.

    Args:
        tree: what was explored.
        start: the start program as this version captures it.
    """
    first = _first(tree, start)
    if first is None:
        return tree
    subjects, programs = {first: start.digest}, {first: start}
    leading: dict[str, list[StoredStep]] = {}
    for edge in tree.edges:
        leading.setdefault(edge.parent, []).append(edge)
    judged = {evaluation_key(tree.conditions, s, p): (s, e.chosen) for p, s, e in tree.evaluations}
    waiting, kept = deque([first]), dict[StoredStep, StoredStep]()
    while waiting:
        here = waiting.popleft()
        for edge in leading.get(here, ()):
            made = _follow(tree, edge, programs[here], judged, subjects)
            if made is None:
                continue
            new, child = made
            kept[edge] = new
            if edge.child is not None and child is not None and edge.child not in programs:
                programs[edge.child], subjects[edge.child] = child, child.digest
                waiting.append(edge.child)
    if all(old == new for old, new in kept.items()) and start.digest in tree.explored:
        return tree
    evaluations = tuple((p, subjects[s], e) for p, s, e in tree.evaluations if s in subjects)
    return replace(tree, evaluations=evaluations, edges=tuple(kept[e] for e in tree.edges if e in kept))


def _first(tree: Tree, start: Program) -> str | None:
    """The old name of the start program: today's, or else it has the same regions, and none of them is generated."""
    regions, parents = {r.id for r in start.regions}, {e.parent for e in tree.edges}
    if start.digest in parents:
        return start.digest
    for _, subject, evaluation in tree.evaluations:
        if subject in parents and not evaluation.generated_share and set(evaluation.region_ms) == regions:
            return subject
    return None


def _follow(
    tree: Tree, edge: StoredStep, parent: Program, judged: dict[str, tuple[str, int]], subjects: dict[str, str]
) -> tuple[StoredStep, Program | None] | None:
    """The edge under today's names, and the program it leads to; None where it can no longer be applied."""
    subject, chosen = judged.get(edge.evaluation or "", (None, 0))
    evaluation, child = None, None
    if edge.patch is not None:
        record = tree.patches.get(edge.patch)
        try:
            if record is None:
                return None
            patch = record.patch(parent.graph)
            child = patch.apply(parent, chosen) if edge.accepted else None
            if subject is not None:
                subjects[subject] = subject_of(parent, patch)
                evaluation = evaluation_key(tree.conditions, subjects[subject])
        except (ReplayError, KeyError, IndexError):
            return None
    new = replace(edge, parent=parent.digest, evaluation=evaluation, child=child.digest if child else None)
    return new, child


__all__ = ["renamed"]
