"""Nodes of an exported graph (torch.fx) some of whose sizes are the number of rows that were selected.

Deals in shapes. Knows nothing about what is computed.
"""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from qimeng.graph.parts import SYMBOLS


class NotCovered(Exception):
    """Rows are selected in a way that has no form of fixed size here; the message says which."""


def is_node(item: Any) -> bool:
    """Whether it is a node, not a number."""
    return isinstance(item, torch.fx.Node)


def packet(target: Any) -> str:
    """An operator's name without its overload, such as ``"aten.mul"``."""
    return str(target).rpartition(".")[0]


def size(node: Any) -> tuple[Any, ...]:
    """The shape of its value."""
    return tuple(node.meta["val"].shape)


def is_open(size: Any) -> bool:
    """Whether a size is the number of selected rows.

    Raises:
        NotCovered: it is computed from that number.
    """
    if isinstance(size, torch.SymInt) and not isinstance(size.node.expr, sympy.Symbol):
        raise NotCovered(f"an expert's values have the size {size}")
    return isinstance(size, torch.SymInt)


def is_dynamic(node: Any) -> bool:
    """Whether its value, or a size of it, is known at run time only."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(s, SYMBOLS) for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,)))


def row_of(node: Any) -> int:
    """The dimension of the selected rows."""
    found = [d for d, s in enumerate(size(node)) if is_open(s)]
    if len(found) != 1:
        raise NotCovered("an expert's values have the number of its rows in two dimensions, or in none")
    return found[0]


def elements_before(node: Any) -> int:
    """Elements of the dimensions before the rows."""
    return math.prod(size(node)[: row_of(node)])


def made_node(graph: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """A new node, with the fake value that it yields."""
    node = graph.call_function(target, args, kwargs)
    mode = next(n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
    values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with unset_fake_temporarily(), mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node


__all__ = ["NotCovered", "elements_before", "is_dynamic", "is_node", "is_open", "made_node", "packet", "row_of", "size"]
