"""Loops over experts on the way from a module to a graph: all rows, then stacked weights, or the loop as it was.

Deals in the order of the two steps. Knows nothing about either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from qimeng.graph.convert import CaptureError
from qimeng.graph.experts.nodes import NotCovered
from qimeng.graph.experts.selected import with_all_rows
from qimeng.graph.experts.skipped import skips_nothing
from qimeng.graph.experts.visits import Visits
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.rewrites.base import Edit, NoRewrite
from qimeng.graph.rewrites.experts import StackExperts

MOST = 1 << 30
"""Elements of what all experts compute of all rows, in one tensor: 2 GiB of a half type."""


class LoopStays(Exception):
    """A loop over experts has no form of fixed size: the module is to be exported without this."""


def all_rows(exported: Any, visits: Visits, export: Callable[[Visits], Any]) -> tuple[str, ...]:
    """Have all experts compute all rows in a decomposed `torch.export.ExportedProgram`, in place.

    Args:
        exported: the program.
        visits: what it was exported in.
        export: exports the module again.

    Returns:
        Names of the nodes that add the results up.

    Raises:
        CaptureError: a turn without rows does something.
        LoopStays: not every loop can be written so.
    """
    if visits.assumed and not skips_nothing(exported, export):
        raise CaptureError("a turn without rows does something")
    if visits.kept:
        if visits.used:
            raise CaptureError("experts are chosen in a way that is not known")
        return ()
    try:
        found = with_all_rows(exported)
    except NotCovered as error:
        raise LoopStays(str(error)) from error
    if visits.used and (visits.unsure or not found) or visits.assumed and not found:
        raise LoopStays("experts are chosen in a way that is not known")
    return found


def stacked(graph: OpGraph, sums: Iterable[str]) -> OpGraph:
    """`graph`, in which the experts whose results the operators `sums` add up are batches of products.

    Raises:
        LoopStays: their weights cannot be stacked.
    """
    rule, reason = StackExperts(), ""  # the action `dispatch` then computes only the experts that count
    for name in reversed(tuple(sums)):
        if name in graph.nodes:
            edit = Edit(graph, name, rule.name)
            try:
                rule.rewrite(edit, graph.nodes[name])
                graph = edit.done()
            except NoRewrite as error:
                reason = str(error) or reason
    if any(name in graph.nodes for name in sums):
        raise LoopStays(reason)
    made = [m for n in graph.ops() if f"__{rule.name}" in n.name for m in n.metas if m is not None]
    if any(m.numel > MOST for m in made):
        raise LoopStays("results of all experts for all rows are too large to be held before `dispatch`")
    return graph


__all__ = ["LoopStays", "all_rows", "stacked"]
