"""A matrix product of which a buffer says what is wanted: ``(a @ b) * mask``, or `where` under a mask.

Deals in plans of the gemm family. Knows nothing about kernel text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qimeng.coder.template.families.attention.bounds import all_of
from qimeng.coder.template.families.gemm.plan import GemmPlan, plan_gemm
from qimeng.coder.template.nest.expr import Expr, reach
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.region import Region
from qimeng.vocabulary.sparse.masked import held, is_known, reads

SEEN, HIDDEN, FACTOR = "seen", "hidden", "factor"
"""How a gate is read: the product counts where it is true, where it is false, or where it is not zero."""

FINITE = ("identity", "cast", "round", "neg", "add", "sub", "mul", "div", "relu", "tanh", "sigmoid")
"""Operators whose result is finite where their operands are, whatever the product is: a factor of zero then gives the
same as of a product of 0. `div` only where the product is what is divided."""


@dataclass(frozen=True, eq=False)
class Gate:
    """What a product passes on its way to the output, and one of the words above."""

    value: Expr
    kind: str


@dataclass(frozen=True, eq=False)
class SampledPlan:
    """A product and its gates; where one is shut, the result does not depend on the product.

    Attributes:
        gemm: the product.
        gates: all that buffers hold.
    """

    gemm: GemmPlan
    gates: tuple[Gate, ...]

    @property
    def multiplies(self) -> bool:
        """Whether a gate is a factor: zero times a product that is not finite is NaN, which PyTorch stores."""
        return any(g.kind == FACTOR for g in self.gates)


def plan_sampled(region: Region) -> SampledPlan:
    """The plan of a product with a gate that a buffer holds.

    Raises:
        NotConcerned: there is no such gate.
        Unsupported: the product is not covered, or is needed elsewhere as well.
    """
    if not any(region.graph.nodes[v.node].kind == "buffer" for v in region.inputs):
        raise NotConcerned("no mask in a buffer")
    gemm = plan_gemm(region)
    if gemm.reductions or len(gemm.nest.outputs) != 1:
        raise NotConcerned("a product that is reduced, or has several results")
    state, axes = held(gemm.region, gemm.loads), {*gemm.m, *gemm.n}
    found = tuple(
        g
        for g in _gates(gemm.nest.outputs[0][0], gemm.dot)
        if is_known(g.value, state) and reads(g.value) and g.value.depends and g.value.depends <= axes
    )
    if not found:
        raise NotConcerned("no mask in a buffer")
    plan = SampledPlan(gemm, found)
    if plan.multiplies and gemm.batch:
        raise Unsupported("batches of products times a mask: whether any is infinite is looked up for one alone")
    return plan


def _gates(e: Expr, dot: Expr) -> Iterator[Gate]:
    """What is passed on the way from the output `e` down to the product, as long as there is one way."""
    while e is not dot:
        inner = [a for a in e.operands() if _has(a, dot)]
        if len(inner) != 1:
            return
        if e.op == "where" and inner[0] is not e.args[0]:
            seen = inner[0] is e.args[1]
            yield from (Gate(c, SEEN if seen else HIDDEN) for c in all_of(e.args[0], seen))
        elif e.op == "mul" and _is_finite(inner[0], dot):
            yield from (Gate(a, FACTOR) for a in e.operands() if a is not inner[0])
        e = inner[0]


def _is_finite(e: Expr, dot: Expr) -> bool:
    """Whether `e` is made of the product, once, by operators of `FINITE`."""
    while e is not dot:
        inner = [a for a in e.operands() if _has(a, dot)]
        if len(inner) != 1 or e.op not in FINITE or (e.op == "div" and inner[0] is not e.args[0]):
            return False
        e = inner[0]
    return True


def _has(e: Expr, dot: Expr) -> bool:
    return any(x is dot for x in reach([e], lambda x: x is dot))


__all__ = ["FACTOR", "HIDDEN", "SEEN", "Gate", "SampledPlan", "plan_sampled"]
