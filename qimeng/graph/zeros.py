"""Whether the sign of a zero is part of what a computation computes.

Deals in operators whose zeros have the sign that IEEE 754 gives them, however the operator is written: changes of sign,
products, quotients, roundings to integers, roots, choices and copies. Of these, PyTorch's eager mode and float64 agree
on every pair of special values. Others are free: the maximum of two zeros is either, a sum that cancels may be fused,
and in half types ``0 ** 0.5``, batch norms and log-sigmoids have zeros of either sign in PyTorch itself. Knows nothing
about how results are compared.
"""

from __future__ import annotations

from qimeng.graph.opgraph import OpGraph
from qimeng.graph.ops import VIEWS

SIGNED = VIEWS | frozenset(
    ("aten." + name)
    for name in (
        "neg abs mul div copysign floor ceil round trunc sqrt where masked_fill clone _to_copy scalar_tensor full "
        "full_like zeros_like ones_like eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan isinf "
        "signbit index_select gather embedding cat stack flip index"
    ).split()
)
"""Operators whose zeros have one sign."""


def zeros_are_signed(graph: OpGraph) -> bool:
    """True where every operator of `graph` is one of `SIGNED`."""
    return all(node.packet in SIGNED for node in graph.ops())


__all__ = ["SIGNED", "zeros_are_signed"]
