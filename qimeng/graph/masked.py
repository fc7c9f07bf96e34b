"""Elements that a mask selects, computed and put back where they were, as a choice between two tensors.

``out[mask] = f(x[mask])`` has a size that depends on data. Where f treats each element alone it is
``torch.where(mask, f(x), out)``. Deals in exported graphs (torch.fx). Knows nothing about what reads the result.
"""

from __future__ import annotations

from typing import Any

import torch

from qimeng.graph.experts.nodes import NotCovered, is_dynamic, is_node, made_node, packet, row_of, size
from qimeng.graph.experts.selected import ADDS, ROWWISE
from qimeng.graph.parts import IGNORED, SYMBOLS

aten = torch.ops.aten
RAISES = ("aten.div", "aten.floor_divide", "aten.remainder", "aten.fmod", "aten.pow")
"""What may raise an error for whole numbers, and would do so for elements that the mask does not select."""


def choose_by_masks(exported: Any) -> None:
    """Rewrite a decomposed `torch.export.ExportedProgram` in place; writes of another kind stay as they are."""
    graph = exported.graph
    puts = [n for n in graph.nodes if n.target is ADDS and is_dynamic(n.args[2])]
    if not [put for put in puts if _is_rewritten(put)]:
        return
    for node in [n for n in graph.nodes if str(n.target) in IGNORED]:
        graph.erase_node(node)
    graph.eliminate_dead_code()
    exported.graph_module.recompile()


def _is_rewritten(put: Any) -> bool:
    try:
        _Write(put).rewrite()
    except NotCovered:
        return False
    return True


class _Write:
    """One write of selected elements.

    Attributes:
        put: the operator.
        place: of the mask in the list of indices.
        mask: which elements are meant, along one dimension or several.
        behind: how many dimensions follow those of the mask.
    """

    def __init__(self, put: Any):
        self.put, (self.place, self.mask) = put, _mask(put)
        self.behind = len(size(put)) - self.place - len(size(self.mask))
        self.known: dict[Any, Any] = {}
        self.seen: set[Any] = set()
        if is_dynamic(put.args[0]):
            raise NotCovered("what is written to has a size that depends on data")

    def rewrite(self) -> None:
        """Make the write a choice."""
        put, (into, _, values) = self.put, self.put.args[:3]
        self._check(values)
        with put.graph.inserting_before(put):
            values, mask = self._all(values), self.mask
            if put.args[3:] == (True,) or put.kwargs.get("accumulate"):
                values = made_node(put.graph, aten.add.Tensor, into, values)
            for _ in range(self.behind):
                mask = made_node(put.graph, aten.unsqueeze.default, mask, -1)
            made = made_node(put.graph, aten.where.self, mask, values, into)
        if (size(made), made.meta["val"].dtype) != (size(put), put.meta["val"].dtype):
            raise NotCovered("values of another shape")
        put.target, put.args, put.kwargs, put.meta["val"] = made.target, made.args, {}, made.meta["val"]

    def _check(self, node: Any) -> None:
        """Raise `NotCovered` before anything is made, so that nothing has to be taken back."""
        if not is_dynamic(node) or node in self.seen:
            return
        self.seen.add(node)
        if not isinstance(node.meta["val"], torch.Tensor) or len(size(node)) - row_of(node) != self.behind + 1:
            raise NotCovered("a computation with how many elements are selected")
        name = packet(node.target)
        if node.target is aten.index.Tensor:
            source = node.args[0]
            place, mask = _mask(node)
            if is_dynamic(source) or place != self.place or not _same(mask, self.mask):
                raise NotCovered("elements that another mask selects")
            if len(size(source)) != len(size(self.put)):
                raise NotCovered("elements of a tensor of other dimensions")
            return
        if name not in ROWWISE or name in RAISES and not node.meta["val"].dtype.is_floating_point:
            raise NotCovered(f"{name} of selected elements")
        for item in torch.utils._pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(item, SYMBOLS):
                raise NotCovered("a computation with how many elements are selected")
            if is_node(item) and is_dynamic(item):
                self._check(item)
            elif is_node(item) and len(size(item)) > self.behind and set(size(item)[: -self.behind or None]) != {1}:
                raise NotCovered("selected elements meet others")

    def _all(self, node: Any) -> Any:
        """A node that computes of all elements what `node` does of those selected."""
        if not is_node(node) or not is_dynamic(node):
            return node
        if node.target is aten.index.Tensor:
            return node.args[0]
        if node not in self.known:
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._all)
            self.known[node] = made_node(self.put.graph, node.target, *args, **kwargs)
        return self.known[node]


def _mask(node: Any) -> tuple[int, Any]:
    """The place and the mask of an operator that indexes by a single one."""
    found = [(d, i) for d, i in enumerate(node.args[1]) if i is not None]
    if len(found) != 1 or found[0][1].meta["val"].dtype != torch.bool:
        raise NotCovered("an index other than a mask")
    return found[0]


def _same(a: Any, b: Any) -> bool:
    """Whether two operands are one node, or the same operators of the same nodes."""
    if not is_node(a) or not is_node(b) or a is b or a.target is not b.target or a.op != "call_function":
        return type(a) is type(b) and a == b
    mine, other = (torch.utils._pytree.tree_flatten((n.args, dict(n.kwargs))) for n in (a, b))
    drawn = torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ())
    return not drawn and mine[1] == other[1] and all(map(_same, mine[0], other[0]))


__all__ = ["choose_by_masks"]
