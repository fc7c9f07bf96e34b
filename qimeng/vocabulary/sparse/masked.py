"""Attention under a mask that buffers hold, so that the blocks which it hides can be listed once.

Which queries see which keys is then known before a call: a mask, documents that rows belong to, and positions beside
them. Deals in plans of the attention family. Knows nothing about kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qimeng.coder.template.families.attention.bounds import Bounds, all_of, choices_of
from qimeng.coder.template.families.attention.plan import AttentionPlan, plan_attention
from qimeng.coder.template.nest.expr import Expr, reach
from qimeng.coder.template.nest.loads import Loads
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.region import Region
from qimeng.graph.state import is_state

Condition = tuple[Expr, bool]
"""What is read for each query and key, and its value where the key is seen."""


@dataclass(frozen=True, eq=False)
class ListedBounds(Bounds):
    """Bounds by lists of blocks; `masks` are those that hide nothing of a block which is listed as whole.

    Attributes:
        listed: conditions of buffers and positions alone.
    """

    listed: tuple[Condition, ...] = ()

    def __bool__(self) -> bool:
        return True

    @property
    def read_along(self) -> frozenset[int]:
        """The axes that the conditions change along."""
        return frozenset(a for c, _ in self.listed for a in c.depends)


def plan_masked(region: Region) -> AttentionPlan:
    """The plan of an attention under a mask of buffers, with `ListedBounds`.

    Raises:
        NotConcerned: it has no such mask.
        Unsupported: it is none that the attention family covers, or sums weights besides.
    """
    if not any(region.graph.nodes[v.node].kind == "buffer" for v in region.inputs):
        raise NotConcerned("no mask in a buffer")
    plan = plan_attention(region)
    state = held(plan.region, plan.loads)
    masks, listed = [], list[Condition]()
    for choice, condition, inner, seen in choices_of(plan.weights.tile()[0], plan.weights.scores is not None):
        parts = all_of(condition, seen)
        known = [c for c in parts if is_known(c, state)]
        listed += [(c, seen) for c in known]
        if len(known) == len(parts):
            masks.append((choice, inner))
    if not any(reads(c) for c, _ in listed):
        raise NotConcerned("no mask in a buffer")
    if plan.weights.sums:
        raise Unsupported("sums of weights beside a mask: hidden keys count in them")
    return replace(plan, bounds=ListedBounds(masks=tuple(masks), listed=tuple(listed)))


def held(region: Region, loads: Loads) -> frozenset[int]:
    """Numbers of a nest's sources that are views of parameters or buffers."""
    return frozenset(s.number for v, s in loads.values.items() if not s.scalar and is_state(region.graph, v))


def is_known(condition: Expr, state: frozenset[int]) -> bool:
    """Whether a condition is made of positions and of what `state` loads."""
    below = _below(condition)
    return all(e.op not in ("dot", "reduce", "part") and (e.op != "load" or e.param in state) for e in below)


def reads(condition: Expr) -> bool:
    """Whether a condition reads anything."""
    return any(e.op == "load" for e in _below(condition))


def _below(condition: Expr) -> list[Expr]:
    return reach([condition], lambda e: False)


__all__ = ["ListedBounds", "held", "is_known", "plan_masked", "reads"]
