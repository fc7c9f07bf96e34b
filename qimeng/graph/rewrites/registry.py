"""Which rewrites there are, and applying them to a graph.

Deals in names of rules. Knows nothing about what any one of them does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from qimeng.errors import IllegalAction
from qimeng.graph.opgraph import Node, OpGraph
from qimeng.graph.rewrites.attention import TakeApart
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rewrite, Rule, sites
from qimeng.graph.rewrites.early import EarlyOverFeatures, EarlyOverPlaces, EarlyOverScale
from qimeng.graph.rewrites.fold import FoldNorm, FoldScale
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
        TakeApart(),
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
        graph = _applied(graph, rewrite)
    return graph


@lru_cache(1024)
def _applied(graph: OpGraph, rewrite: Rewrite) -> OpGraph:
    rule, node = RULES.get(rewrite.rule), graph.nodes.get(rewrite.node)
    if rule is None:
        raise IllegalAction(f"no rewrite is called {rewrite.rule!r}; known: {', '.join(RULES)}")
    if node is None:
        raise IllegalAction(f"the rewrite {rule.name} is for the operator {rewrite.node}, which the graph lacks")
    try:
        return _edited(graph, rule, node)
    except NoRewrite as error:
        raise IllegalAction(f"the rewrite {rule.name} does not apply to {node.name}: {error}") from None


def _edited(graph: OpGraph, rule: Rule, node: Node) -> OpGraph:
    edit = Edit(graph, node.name, rule.name)
    rule.rewrite(edit, node)
    return edit.done()


@lru_cache(256)
def find_rewrites(graph: OpGraph, option: str) -> tuple[tuple[Rewrite, ...], tuple[str, ...]]:
    """All rewrites of an option, one after the other until none is left; and why some that came close do not apply."""
    found: list[Rewrite] = []
    while len(found) < MOST:
        following, reasons = _next(graph, option)
        if following is None:
            return tuple(found), reasons
        graph = _applied(graph, following)
        found.append(following)
    return tuple(found), ()


def _next(graph: OpGraph, option: str) -> tuple[Rewrite | None, tuple[str, ...]]:
    reasons: dict[str, None] = {}
    for rule in RULES.values():
        for node in sites(graph, rule) if rule.option == option else ():
            rewrite = Rewrite(rule.name, node.name)
            try:
                _edited(graph, rule, node)
            except NoRewrite as error:
                if str(error):
                    reasons[str(error)] = None
                continue
            return rewrite, ()
    return None, tuple(reasons)


__all__ = ["MOST", "RULES", "find_rewrites", "options", "rewritten_graph"]
