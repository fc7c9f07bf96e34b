"""Rows that a mask selects for each expert and that are added back where they came from, as all rows times a weight.

``rows = torch.where(mask[e])``; ``out.index_add_(0, rows, f(x[rows]) * w[rows, place])`` has a size that depends on
data. Where the experts of a row are all different, as `topk` chooses them, it is ``out + f(x) * r[:, e]``, with the
weights r scattered into zeros: where f treats each row alone. Deals in exported graphs (torch.fx). Knows nothing about
what f is, and nothing about batches of experts (`qimeng.graph.rewrites.experts`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from qimeng.graph.experts.nodes import (
    NotCovered,
    elements_before,
    is_dynamic,
    is_node,
    is_open,
    made_node,
    packet,
    row_of,
    size,
)
from qimeng.graph.ops import POINTWISE
from qimeng.graph.parts import IGNORED, SYMBOLS

aten = torch.ops.aten
SELECTS, ADDS = aten.nonzero.default, aten.index_put.default
KEEPS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
ALONG = (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.select.int)
ROWWISE = POINTWISE - {f"aten.{name}" for name in ("tril", "triu", "arange", "glu", "native_dropout", "full")}
PRODUCTS = (aten.linear.default, aten.mm.default)
FLAT = (aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim)


def with_all_rows(exported: Any) -> tuple[str, ...]:
    """Rewrite every loop over experts of a decomposed `torch.export.ExportedProgram`, in place.

    Returns:
        Names of the nodes that add up, one for each expert of each loop; empty where there is no loop.

    Raises:
        NotCovered: a turn of one computes something else. The program is then of no use any more.
    """
    graph = exported.graph
    puts = [n for n in graph.nodes if n.target is ADDS and any(is_dynamic(i) for i in n.args[1] if i is not None)]
    if not puts:
        return ()
    turns = [_Turn(put) for put in puts]
    experts = {turn.routing: 1 + max(t.number for t in turns if t.routing == turn.routing) for turn in turns}
    scattered: dict[Any, Any] = {}
    for turn in turns:
        key = (turn.routing, turn.weights)
        if key not in scattered:
            scattered[key] = _scattered(graph, turn, experts[turn.routing])
        turn.rewrite(scattered[key])
    for node in [n for n in graph.nodes if str(n.target) in IGNORED]:
        graph.erase_node(node)
    graph.eliminate_dead_code()
    if any(is_dynamic(n) for n in graph.nodes):
        raise NotCovered("other sizes depend on data as well")
    exported.graph_module.recompile()
    return tuple(put.name for put in puts)


class _Turn:
    """One turn of a loop: the rows of one expert.

    Attributes:
        put: the operator that adds.
        number: of the expert.
        routing: the experts of each row, [T, best].
        weights: of these experts, [T, best].
        result: what the weight of each row is multiplied with.
    """

    def __init__(self, put: Any):
        self.put, self.graph = put, put.graph
        into, index, rows, *adds = put.args
        if len(index) != 1 or (index := index[0]) is None:
            raise NotCovered("rows are added along another dimension than the first")
        self.select, row = _column(index)
        self.routing, self.number, self.row = _mask(self.select.args[0])
        self.of = self.routing, self.number
        if row != self.row:
            raise NotCovered("rows are added to other rows than those they were selected from")
        self.count = size(into)[0]
        self.into, self.rows = into, rows if adds == [True] else self._added(into, rows)
        self.known: dict[Any, Any] = {}
        self.result, self.weights = self._times(self.rows)
        while self.weights.target in FLAT:
            self.weights = self.weights.args[0]
        if is_dynamic(self.weights) or size(self.routing)[0] != self.count:
            raise NotCovered("weights or experts of other rows")

    def _added(self, into: Any, rows: Any) -> Any:
        """What ``out[rows] += y`` adds: y."""
        sides = list(rows.args[:2]) if rows.target is aten.add.Tensor and not rows.kwargs else []
        for mine, other in (sides, sides[::-1]) if sides else ():
            if is_node(mine) and mine.target is aten.index.Tensor and mine.args[0] is into and self._rows_of(mine) == 0:
                return other
        raise NotCovered("rows are not added to what was there")

    def _times(self, rows: Any) -> tuple[Any, Any]:
        """What is multiplied with the weight of each row, and the weights that are looked up."""
        node = rows
        while is_node(node) and node.target is aten._to_copy.default:
            node = node.args[0]
        sides = node.args if is_node(node) and node.target is aten.mul.Tensor else ()
        for mine, other in (sides, sides[::-1]) if sides else ():
            column = mine
            while is_node(column) and (column.target in FLAT or column.target is aten._to_copy.default):
                column = column.args[0]
            if not (is_node(column) and column.target is aten.index.Tensor and is_node(other)):
                continue
            weights = column.args[0] if self._is_pair(column) else self._masked(column)
            if weights is not None:
                return other, weights
        raise NotCovered("what is added has no weight of the row and its expert")

    def _is_pair(self, node: Any) -> bool:
        """Whether it looks up ``w[row, place]`` in the order of the turn's rows."""
        if len(node.args[1]) != 2 or None in node.args[1]:
            return False
        (select, row), (other, place) = (_column(i) for i in node.args[1])
        if select is not other or row == place:
            return False
        return select is self.select or row == self.row == 0 and self._is_mask(select.args[0])

    def _masked(self, node: Any) -> Any:
        """The weights w of ``(w * mask).sum(-1)[row]``, or of the same with `torch.where`; None where it is another."""
        total = node.args[0]
        while total.target in FLAT:
            total = total.args[0]
        if self._rows_of(node) != 0 or total.target is not aten.sum.dim_IntList or total.args[1] not in ([-1], [1]):
            return None
        node = total.args[0]
        if node.target is aten.mul.Tensor:
            return next((w for w, m in (node.args, node.args[::-1]) if is_node(w) and self._is_mask(m)), None)
        is_where = node.target is aten.where.self and _is_zero(node.args[2]) and self._is_mask(node.args[0])
        return node.args[1] if is_where else None

    def _is_mask(self, node: Any) -> bool:
        """Whether it tells which of a row's experts, [T, best], is the turn's."""
        try:
            return is_node(node) and len(size(node)) == len(size(self.routing)) and _mask(node)[:2] == self.of
        except NotCovered:
            return False

    def _rows_of(self, node: Any) -> int | None:
        """The dimension along which it looks up the turn's rows, and nothing else; None where it does not."""
        found = [(d, _column(i)) for d, i in enumerate(node.args[1]) if i is not None]
        return found[0][0] if [c for _, c in found] == [(self.select, self.row)] else None

    def rewrite(self, scattered: Any) -> None:
        """Have the operator add all rows, those of other experts times zero.

        Args:
            scattered: weights [T, experts], in the dtype of what they multiply.
        """
        value = self.put.meta["val"]
        with self.graph.inserting_before(self.put):
            y = self.all_rows(self.result)
            weight = self._made(aten.slice.Tensor, scattered, 1, self.number, self.number + 1)
            if weight.meta["val"].dtype != y.meta["val"].dtype:
                weight = self._made(aten._to_copy.default, weight, dtype=y.meta["val"].dtype)
            made = self._made(aten.mul.Tensor, y, weight)
            if made.meta["val"].dtype != value.dtype:
                made = self._made(aten._to_copy.default, made, dtype=value.dtype)
        if tuple(made.meta["val"].shape) != tuple(value.shape):
            raise NotCovered("what is added does not have a row for each that was selected")
        self.put.target, self.put.args, self.put.kwargs = aten.add.Tensor, (self.into, made), {}

    def all_rows(self, node: Any) -> Any:
        """A node that computes for all rows what `node` does for those selected."""
        if not is_node(node) or not is_dynamic(node):
            return node
        if node not in self.known:
            self.known[node] = self._for_all(node)
        return self.known[node]

    def _for_all(self, node: Any) -> Any:
        target, name = node.target, packet(node.target)
        if target is operator.getitem:
            made = self._made(target, self.all_rows(node.args[0]), node.args[1])
        elif target is aten.index.Tensor and is_node(node.args[0]):
            dim, source = self._rows_of(node), node.args[0]
            if (
                dim is None
                or is_dynamic(source)
                or size(source)[dim] != self.count
                or math.prod(size(source)[:dim]) != 1
            ):
                raise NotCovered("an expert reads other rows than its own")
            return source
        elif target in KEEPS:
            (source,) = node.all_input_nodes[:1]
            if elements_before(node) != elements_before(source):
                raise NotCovered("an expert reshapes its rows")
            made = self._made(target, self.all_rows(source), [self.count if is_open(s) else s for s in size(node)])
        elif target in (*ALONG, *FLAT, *PRODUCTS) or name in ROWWISE:
            dims = node.args[1] if target in FLAT else node.args[1:2] if target is aten.slice.Tensor else ()
            self._check(node, dims)
            args = [[self._plain(a) for a in x] if isinstance(x, (list, tuple)) else self._plain(x) for x in node.args]
            made = self._made(target, *args, **node.kwargs)
        else:
            raise NotCovered(f"an expert computes {name}, which may mix rows")
        if isinstance(node.meta["val"], torch.Tensor):
            wanted = tuple(self.count if is_open(s) else s for s in size(node))
            if tuple(made.meta["val"].shape) != wanted:
                raise NotCovered(f"{name} of all rows has another shape")
        return made

    def _check(self, node: Any, dims: Any) -> None:
        """Raise `NotCovered` where an operator acts along the rows, or meets as many of another tensor."""
        first = node.args[0]
        if node.target in ALONG:
            given = {"aten.slice": 1, "aten.select": 1}.get(packet(node.target), 2)
            dim = node.args[given] if len(node.args) > given else node.kwargs.get("dim", 0)
            if dim % len(size(first)) == row_of(first):
                raise NotCovered("an expert cuts its rows")
        if node.target in PRODUCTS and any(is_dynamic(x) for x in node.args[1:] if is_node(x)):
            raise NotCovered("an expert multiplies by its own rows")
        if packet(node.target) in POINTWISE:
            from_end = len(size(node)) - row_of(node)
            for operand in node.all_input_nodes:
                shape = size(operand) if isinstance(operand.meta["val"], torch.Tensor) else ()
                if not is_dynamic(operand) and len(shape) >= from_end and shape[-from_end] != 1:
                    raise NotCovered("an expert's rows meet other rows")
                if is_dynamic(operand) and len(shape) - row_of(operand) != from_end:
                    raise NotCovered("an expert's rows meet other rows")

    def _plain(self, item: Any) -> Any:
        if isinstance(item, SYMBOLS) or is_node(item) and not isinstance(item.meta["val"], (torch.Tensor, list, tuple)):
            raise NotCovered("an expert computes with the number of its rows")
        return self.all_rows(item)

    def _made(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return made_node(self.graph, target, *args, **kwargs)


def _scattered(graph: Any, turn: _Turn, experts: int) -> Any:
    """Weights [T, experts], zero but for those of each row's experts, in the dtype of what they multiply."""
    chosen, weights, top = turn.routing, turn.weights, turn.routing.args[0]
    along = top.args[2] if len(top.args) > 2 else top.kwargs.get("dim", -1)
    if size(top.args[0])[-1] != experts or along not in (-1, 1):
        raise NotCovered(f"a loop over {experts} experts, of which rows choose among {size(top.args[0])[-1]}")
    dtype, shape = turn.result.meta["val"].dtype, list(size(chosen))
    with graph.inserting_before(turn.put):
        if [s for s in size(weights) if s != 1] != [s for s in shape if s != 1]:
            raise NotCovered("weights that are not one for each expert of a row")
        if list(size(weights)) != shape:
            weights = made_node(graph, aten.view.default, weights, shape)
        if weights.meta["val"].dtype != dtype:
            weights = made_node(graph, aten._to_copy.default, weights, dtype=dtype)
        like = {"dtype": dtype, "layout": torch.strided, "device": weights.meta["val"].device, "pin_memory": False}
        zeros = made_node(graph, aten.full.default, [shape[0], experts], 0, **like)
        return made_node(graph, aten.scatter.src, zeros, 1, chosen, weights)


def _mask(mask: Any) -> tuple[Any, int, int]:
    """The experts of each row, the number of one, and in which column of its mask's places the rows stand.

    Covered are ``(chosen == e)`` [T, best], ``(chosen == e).any(-1)`` [T], and ``one_hot(chosen).permute(2, 1, 0)[e]``
    [best, T].
    """
    if mask.target is aten.any.dim and mask.args[1] in (-1, 1) and mask.args[2:] in ((), (False,)):
        mask = mask.args[0]
    node = mask
    while node.target in FLAT or node.target is aten._to_copy.default:
        node = node.args[0]
    if node.target is aten.eq.Scalar and isinstance(node.args[1], int) and size(mask) == size(node):
        return _chosen(node.args[0]), node.args[1], 0
    picked = node
    if node.target in (aten.select.int, aten.slice.Tensor) and node.args[1] == 0 and len(size(mask)) == 2:
        node = node.args[0]
        while node.target is aten._to_copy.default:
            node = node.args[0]
        if node.target is aten.permute.default and list(node.args[1]) == [2, 1, 0]:
            node = node.args[0]
            while node.target is aten._to_copy.default:
                node = node.args[0]
            if node.target is aten.eq.Tensor and _counts_up(node.args[1]):
                chosen, number = node.args[0], picked.args[2]
                if chosen.target is aten.unsqueeze.default and chosen.args[1] in (-1, 2):
                    return _chosen(chosen.args[0]), number, 1
    raise NotCovered("rows that no mask of an expert selects")


def _chosen(node: Any) -> Any:
    """`node`, where it is the places that a topk found, [T, best]."""
    if node.target is not operator.getitem or node.args[0].target is not aten.topk.default or node.args[1] != 1:
        raise NotCovered("experts that no topk chooses: one may be chosen twice")
    if len(size(node)) != 2:
        raise NotCovered("experts of other than rows")
    return node


def _is_zero(node: Any) -> bool:
    """Whether it is a 0 without dimensions, or zeros."""
    return is_node(node) and node.target in (aten.full.default, aten.scalar_tensor.default) and 0 in node.args[-1:]


def _counts_up(node: Any) -> bool:
    """Whether it is 0, 1, 2 and so on."""
    return node.target is aten.arange.start_step and node.args[0] == 0 and list(node.args[2:]) in ([], [1])


def _column(index: Any) -> tuple[Any, int]:
    """The operator that finds a mask's places, and the column of them that `index` is."""
    node, at = index, None
    while is_node(node) and node.target is not SELECTS:
        if node.target in (aten.slice.Tensor, aten.select.int) and node.args[1] == 1 and at is None:
            at = node.args[2]
        elif node.target not in FLAT:
            raise NotCovered("rows that no mask selects")
        node = node.args[0]
    if not is_node(node) or at is None:
        raise NotCovered("rows that no mask selects")
    return node, at


__all__ = ["ADDS", "ROWWISE", "NotCovered", "with_all_rows"]
