"""Which rewrites there are, and applying them to a graph.

Deals in names of rules. Knows nothing about what any one of them does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from qimeng.errors import IllegalAction
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.rewrites.attention import TakeApart
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rewrite, Rule, sites
from qimeng.graph.rewrites.channels_last import ChannelsLast
from qimeng.graph.rewrites.early import EarlyOverFeatures, EarlyOverPlaces, EarlyOverScale
from qimeng.graph.rewrites.experts import StackExperts
from qimeng.graph.rewrites.fold import FoldNorm, FoldScale
from qimeng.graph.rewrites.hoist import Hoist
from qimeng.graph.rewrites.layers import Layers, Wavefront
from qimeng.graph.rewrites.structure import Diagonal, Repeat, Single
from qimeng.graph.rewrites.together import Together

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        FoldNorm(),
        FoldScale(),
        EarlyOverScale(),
        EarlyOverFeatures(),
        EarlyOverPlaces(),
        Diagonal(),
        Single(),
        Repeat(),
        Together(),
        StackExperts(),
        TakeApart(),
        Wavefront(),
        Layers(),
        Hoist(),
        ChannelsLast(),
    )
}
"""Every rule by name, in the order in which they are tried."""

MOST = 512
"""Rewrites of one action."""


def options() -> tuple[str, ...]:
    """The options of the action `algebra`, each once."""
    return tuple(dict.fromkeys(rule.option for rule in RULES.values()))


def rewritten_graph(graph: OpGraph, rewrites: Iterable[Rewrite]) -> OpGraph:
    """`graph` after `rewrites`, one after the other.

    Raises:
        IllegalAction: one does not apply; the message says why.
    """
    for rewrite in rewrites:
        if rewrite.rule not in RULES:
            raise IllegalAction(f"no rewrite is called {rewrite.rule!r}; known: {', '.join(RULES)}")
        if rewrite.node not in graph.nodes:
            raise IllegalAction(f"the rewrite {rewrite.rule} is for the operator {rewrite.node}, which the graph lacks")
        try:
            graph = _applied(graph, rewrite)
        except NoRewrite as error:
            raise IllegalAction(f"the rewrite {rewrite.rule} does not apply to {rewrite.node}: {error}") from None
    return graph


@lru_cache(1024)
def _applied(graph: OpGraph, rewrite: Rewrite) -> OpGraph:
    """`graph` after one rewrite; asked again, the same object.

    Raises:
        NoRewrite: it does not apply.
    """
    edit = Edit(graph, rewrite.node, rewrite.rule)
    RULES[rewrite.rule].rewrite(edit, graph.nodes[rewrite.node])
    return edit.done()


@lru_cache(256)
def find_rewrites(graph: OpGraph, option: str) -> tuple[tuple[Rewrite, ...], tuple[str, ...]]:
    """All rewrites of an option, one after the other until none is left; and why some that came close do not apply."""
    found: list[Rewrite] = []
    while True:
        more, reasons = _once_over(graph, option)
        found += more
        if not more or len(found) >= MOST:
            return tuple(found), tuple(reasons)
        graph = rewritten_graph(graph, more)


def _once_over(graph: OpGraph, option: str) -> tuple[list[Rewrite], list[str]]:
    """The rewrites of an option in one pass over the graph, each rule in turn; and why others do not apply."""
    found: list[Rewrite] = []
    reasons: dict[str, None] = {}
    for rule in RULES.values():
        for name in [n.name for n in sites(graph, rule)] if rule.option == option else ():
            if name not in graph.nodes:  # an earlier rewrite took it away
                continue
            try:
                graph = _applied(graph, Rewrite(rule.name, name))
            except NoRewrite as error:
                if str(error):
                    reasons[str(error)] = None
                continue
            found.append(Rewrite(rule.name, name))
    return found, list(reasons)


__all__ = ["MOST", "RULES", "find_rewrites", "options", "rewritten_graph"]
