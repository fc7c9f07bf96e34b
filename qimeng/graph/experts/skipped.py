"""Whether a turn of a loop over experts that has no rows leaves everything as it is.

``if rows.numel() == 0: continue`` depends on values. The loop is exported as if each turn had rows (`Assumed`). That is
right if a turn without rows does nothing, which is checked here: exported again with every other turn skipped, the
program must compute the same but for what those turns add. Deals in exported graphs (torch.fx). Knows nothing about
what a turn computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qimeng.graph.experts.assumed import Assumed
from qimeng.graph.experts.nodes import is_dynamic
from qimeng.graph.experts.selected import ADDS
from qimeng.graph.experts.visits import Visits

PARITIES = (0, 1)


def skips_nothing(exported: Any, export: Callable[[Visits], Any]) -> bool:
    """Whether turns without rows do nothing.

    Both halves are tried, so that what a turn does may not depend on whether the one before it had rows.

    Args:
        exported: the decomposed `torch.export.ExportedProgram` in which every turn has rows.
        export: exports the module again.
    """
    known: dict[Any, int] = {}
    return all(
        _results(exported.graph, known, left_out=parity) == _results(export(Visits(Assumed(empty=parity))).graph, known)
        for parity in PARITIES
    )


def _results(graph: Any, known: dict[Any, int], left_out: int | None = None) -> Any:
    """What `graph` returns, each value as a number: the same for the same operators of the same values.

    Args:
        graph: the graph.
        known: the numbers so far.
        left_out: whether even turns (0) or odd ones (1) do not add; None where all do.
    """
    number: dict[Any, int] = {}
    turns = 0
    for node in graph.nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
        if node.op == "output":
            return args
        name = node.name if node.op == "placeholder" else ""
        number[node] = known.setdefault((node.op, str(node.target), name, repr(args), repr(kwargs)), len(known))
        if node.target is ADDS and any(is_dynamic(i) for i in node.args[1] if i is not None):
            if turns % len(PARITIES) == left_out:
                number[node] = number[node.args[0]]
            turns += 1
    raise AssertionError("a graph without output")


__all__ = ["skips_nothing"]
