"""What the structure of a graph makes superfluous: products with diagonal matrices, reductions of one element, repeats.

Deals in operators whose operands have a form that the graph itself shows. Knows nothing about values.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.ops import VIEWS, category
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule


class Diagonal(Rule):
    """``diag(a) @ b`` as ``a[:, None] * b``, and ``b @ diag(a)`` as ``b * a``.

    An element that is not finite makes its whole column (or row) NaN, as zeros meet it in the product.
    """

    name = "diagonal"
    option = "structure"
    packets = ("aten.mm",)

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for a matrix that is zero off the diagonal whatever its values are."""
        for number, (mine, other) in enumerate((node.args[:2], node.args[1::-1])):
            vector = _diagonal_of(edit, mine)
            if vector is None:
                continue
            if _diagonal_of(edit, other) is not None:
                raise NoRewrite(f"{node.name} is a product of two diagonal matrices")
            column = number == 0
            size = edit.meta(vector).shape[0]
            scale = edit.op("aten.reshape.default", vector, (size, 1) if column else (1, size))
            zero = edit.op("aten.mul.Tensor", other, 0.0)
            zero = edit.op("aten.sum.dim_IntList", zero, (0,) if column else (1,), True)
            y = edit.op("aten.mul.Tensor", scale, other)
            edit.instead(Value(node.name), edit.op("aten.add.Tensor", y, zero))
            return
        raise NoRewrite("")


def _diagonal_of(edit: Edit, value: Any) -> Value | None:
    """The vector on the diagonal of a matrix that ``torch.diag`` made; None for another matrix."""
    node = _through_views(edit, value)
    shape = edit.meta(value).shape
    if node.packet != "aten.where" or len(shape) != 2 or shape[0] != shape[1]:
        return None
    test, kept, zero = node.args
    off = edit.maker(zero)
    if off.kind != "constant" or off.literal != 0:
        return None
    compared = _through_views(edit, test)
    if compared.packet != "aten.eq" or edit.meta(Value(compared.name)).shape != shape:
        return None
    sides = [_counted_along(edit, v, shape[0]) for v in compared.args]
    if sorted(str(s) for s in sides) != ["0", "1"]:
        return None
    given = edit.meta(kept).shape
    if given not in ((1, shape[0]), (shape[0],), (shape[0], 1)):
        return None
    return kept if len(given) == 1 else edit.op("aten.reshape.default", kept, (shape[0],))


def _counted_along(edit: Edit, value: Any, size: int) -> int | None:
    """The dimension of two along which `value` counts from 0; None where it does something else."""
    node = _through_views(edit, value)
    if node.packet != "aten.arange" or edit.meta(Value(node.name)).shape != (size,):
        return None
    if node.target.endswith("start_step") and (node.args[0] != 0 or (*node.args, 1)[2] != 1):
        return None
    shape = edit.meta(value).shape
    if shape in ((size,), (1, size)):
        return 1
    return 0 if shape == (size, 1) else None


def _through_views(edit: Edit, value: Any) -> Node:
    node = edit.maker(value)
    while node.kind == "op" and node.packet in VIEWS and node.packet != "aten.expand":
        node = edit.maker(node.operands()[0])
    return node


class Single(Rule):
    """A reduction over dimensions of one element is a view."""

    name = "single"
    option = "structure"
    packets = ("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.logsumexp")

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal where every reduced dimension has one element; the dtype stays."""
        x, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
        meta = edit.meta(x)
        rank = len(meta.shape)
        chosen = [d % rank for d in dims] if dims and rank else range(rank)
        result = Value(node.name)
        if any(meta.shape[d] != 1 for d in chosen) or edit.meta(result).dtype != meta.dtype or not meta.shape:
            raise NoRewrite("")
        edit.instead(result, edit.op("aten.view.default", x, edit.meta(result).shape))


class Repeat(Rule):
    """An operator that computes the same as an earlier one, on the same operands."""

    name = "repeat"
    option = "structure"
    packets = ()

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for operators without random numbers; a result keeps memory of its own."""
        first = _first(edit.graph).get(_key(node))
        if first is None or first == node.name:
            raise NoRewrite("")
        for port, meta in enumerate(node.metas):
            if meta is not None:
                edit.instead(Value(node.name, port), Value(first, port))


_known: WeakKeyDictionary[OpGraph, dict[Any, str]] = WeakKeyDictionary()


def _first(graph: OpGraph) -> dict[Any, str]:
    """What is computed to the first operator that does; views are left out, which are free."""
    if graph not in _known:
        found: dict[Any, str] = {}
        for node in graph.ops():
            if node.literal is None and category(node) not in ("random", "view"):
                found.setdefault(_key(node), node.name)
        _known[graph] = found
    return _known[graph]


def _key(node: Node) -> Any:
    return node.target, repr(node.args), repr(node.kwargs)


__all__ = ["Diagonal", "Repeat", "Single"]
