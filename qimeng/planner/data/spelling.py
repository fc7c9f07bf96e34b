"""One form for what is written in several ways: ``x / 2`` and ``x * 0.5``, ``silu(x)`` and ``x * sigmoid(x)``.

Deals in single operators. Numbers do not count, but for those that leave a value as it is. Knows nothing about graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, Union

from qimeng.graph.opgraph import Node, Value

COMMUTATIVE = frozenset(
    "aten.add aten.mul aten.maximum aten.minimum aten.eq aten.ne aten.logical_and aten.logical_or aten.bitwise_and "
    "aten.bitwise_or".split()
)
"""Operators whose operands may change places."""

Term: TypeAlias = Union[Value, "Call"]


@dataclass(frozen=True)
class Call:
    """An operator's name, what it reads, and whether its operands may change places."""

    label: str
    operands: tuple[Term, ...]
    commutes: bool


def call(label: str, *operands: Term) -> Call:
    """An operator of PyTorch's."""
    return Call(label, operands, label in COMMUTATIVE)


NOTHING = {"aten.add": 0, "aten.sub": 0, "aten.mul": 1, "aten.div": 1, "aten.pow": 1}
"""The second operand with which an operator returns the first."""

ALIKE = {"aten.sub": "aten.add", "aten.div": "aten.mul"}
"""With a number for the second operand, the same as another operator with another number."""


def _clamp(node: Node, *read: Value) -> Term | None:
    low, high = (*node.args[1:], None, None)[:2]
    return call("aten.relu", *read) if low == 0 and high is None and not node.kwargs else None


def _linear(node: Node, x: Value, weight: Value, *bias: Value) -> Term:
    product = call("aten.mm", x, weight)
    return call("aten.add", product, *bias) if bias else product


def _added(label: str) -> Callable[..., Term]:
    return lambda node, c, x, y: call("aten.add", call(label, x, y), c)


SPELLED: Mapping[str, Callable[..., Term | None]] = {
    "aten.clamp": _clamp,
    "aten.silu": lambda node, x: call("aten.mul", x, call("aten.sigmoid", x)),
    "aten.linear": _linear,
    "aten.addmm": _added("aten.mm"),
    "aten.baddbmm": _added("aten.bmm"),
}
"""How operators are written by others; None where one is not."""


def spelled(node: Node) -> Term:
    """What `node` computes, in the one form; a value where it is one that the node reads."""
    read = node.operands()
    if node.packet == "aten.cat" and len(set(read)) == 1:
        return read[0]
    if node.packet in NOTHING and len(read) == 1 and node.args[0] == read[0]:
        if node.args[1] == NOTHING[node.packet]:
            return read[0]
        return call(ALIKE.get(node.packet, node.packet), *read)
    other = SPELLED[node.packet](node, *read) if node.packet in SPELLED else None
    return other or call(node.packet if node.kind == "op" else node.kind, *read)


__all__ = ["COMMUTATIVE", "Call", "Term", "call", "spelled"]
