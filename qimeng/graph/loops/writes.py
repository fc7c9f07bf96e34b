"""Steps of a loop that write their results into one tensor, as the concatenation that they make.

``out[:, t] = h`` for every t is a chain of scatters in a graph, each of which copies the whole tensor. Where the pieces
fill the dimension, the last scatter is the concatenation of all that was written, as ``torch.stack`` is, whatever was
in the tensor before. Deals in graphs. Knows nothing about what a step computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, map_values, row_major
from qimeng.graph.ops import VIEWS
from qimeng.graph.rewrites.base import without_dead

SELECT, SLICE, COPY = "aten.select_scatter.default", "aten.slice_scatter.default", "aten.copy.default"
PIECES = ("aten.select.int", "aten.slice.Tensor")
FEWEST = 2
"""Pieces of a concatenation."""


@dataclass(frozen=True)
class _Write:
    """One scatter.

    Attributes:
        node: it.
        into: the tensor before.
        piece: what is written, without a dimension for `SELECT`.
        dim: the dimension.
        start: where in it the piece begins.
        length: of the piece.
    """

    node: Node
    into: Value
    piece: Value
    dim: int
    start: int
    length: int


def concatenated(graph: OpGraph) -> OpGraph:
    """`graph` with chains of scatters that fill a dimension as concatenations, other selections as slices.

    What a step reads of what an earlier one wrote is read directly. A selection that stays is written as a slice of one
    element, which templates know.
    """
    if not any(n.target in (SELECT, SLICE) for n in graph.ops()):
        return graph
    graph = _read_directly(graph)
    writes = {n.name: _write(graph, n) for n in graph.ops() if n.target in (SELECT, SLICE)}
    users, nodes = graph.users(), dict[str, list[Node]]()
    inner = {w.into.node for w in writes.values() if w is not None}
    for write in writes.values():
        if write is None:
            continue
        chain = None if write.node.name in inner else _chain(graph, write, writes, users)
        made = _joined(graph, chain) if chain is not None else None
        if made is None and write.node.target == SELECT:
            made = _as_slice(graph, write)
        if made is not None:
            nodes[write.node.name] = made
    if not nodes:
        return graph
    order = [m for n in graph.nodes.values() for m in nodes.get(n.name, [n])]
    return without_dead(replace(graph, nodes={n.name: n for n in order}))


def _write(graph: OpGraph, node: Node) -> _Write | None:
    """What `node` writes where; None where that is not known, or with gaps."""
    into, piece, *rest = node.args
    given = dict(zip(("dim", "start", "end", "step") if node.target == SLICE else ("dim", "index"), rest, strict=False))
    given |= dict(node.kwargs)
    shape = graph.meta(into).shape
    dim = given.get("dim", 0) % len(shape)
    length = shape[dim]
    if node.target == SELECT:
        start = given["index"]
        return _Write(node, into, _written(graph, piece), dim, start + length * (start < 0), 1)
    start, end, step = given.get("start") or 0, given.get("end"), given.get("step", 1)
    start = min(max(start + length * (start < 0), 0), length)
    end = length if end is None else min(max(end + length * (end < 0), start), length)
    return _Write(node, into, _written(graph, piece), dim, start, end - start) if step == 1 else None


def _written(graph: OpGraph, piece: Value) -> Value:
    """What a scatter writes, without a copy over the values that were there."""
    node = graph.nodes[piece.node]
    if node.target != COPY or not isinstance(node.args[1], Value):
        return piece
    was, now = graph.meta(node.args[1]), graph.meta(piece)
    return node.args[1] if (was.shape, was.dtype) == (now.shape, now.dtype) else piece


def _read_directly(graph: OpGraph) -> OpGraph:
    """`graph`, where what is selected of what was written is what was written; views, whose strides tell, excepted."""
    writes = {n.name: _write(graph, n) for n in graph.ops() if n.target == SELECT}
    users, instead = graph.users(), dict[Value, Value]()
    for node in graph.ops():
        if node.target != "aten.select.int" or Value(node.name) in graph.results():
            continue
        if any(graph.nodes[n].packet in VIEWS for n in users.get(Value(node.name), ())):
            continue
        value, dim, index = node.args
        shape = graph.meta(value).shape
        dim, index = dim % len(shape), index + shape[dim] * (index < 0)
        while (write := writes.get(value.node)) is not None and write.dim == dim and write.start != index:
            value = write.into
        if write is None or write.dim != dim:
            continue
        piece = graph.meta(write.piece)
        in_order = list(piece.stride) == sorted(piece.stride, reverse=True)  # results get the order of what they read
        if in_order and piece.dtype == graph.meta(value).dtype:
            instead[Value(node.name)] = write.piece
    if not instead:
        return graph

    def current(value: Value) -> Value:
        while value in instead:
            value = instead[value]
        return value

    nodes = {}
    for node in graph.nodes.values():
        kwargs = tuple((k, map_values(v, current)) for k, v in node.kwargs)
        changed = replace(node, args=map_values(node.args, current), kwargs=kwargs)
        nodes[node.name] = node if changed == node else changed
    return without_dead(replace(graph, nodes=nodes))


def _chain(
    graph: OpGraph, last: _Write, writes: Mapping[str, _Write | None], users: Mapping[Value, list[str]]
) -> list[_Write] | None:
    """The scatters that `last` ends, in the order of their pieces, where they fill the dimension; None elsewhere.

    Nothing else may read the tensor between two of them, except to say what a piece is like.
    """
    chain, left = [last], graph.meta(last.into).shape[last.dim] - last.length
    while left > 0:
        before = writes.get(chain[-1].into.node)
        if before is None or before.dim != last.dim or chain[-1].into in graph.results():
            return None
        readers = [graph.nodes[n] for n in users[chain[-1].into] if n != chain[-1].node.name]
        if not all(_is_only_overwritten(graph, n, users) for n in readers):
            return None
        chain.append(before)
        left -= before.length
    chain.sort(key=lambda w: w.start)
    ends = [w.start + w.length for w in chain]
    return chain if left == 0 and len(chain) >= FEWEST and [w.start for w in chain] == [0, *ends[:-1]] else None


def _is_only_overwritten(graph: OpGraph, node: Node, users: Mapping[Value, list[str]]) -> bool:
    """Whether `node` is a piece that nothing reads but copies over it, which need its shape alone."""
    piece = Value(node.name)
    copies = (graph.nodes[n] for n in users.get(piece, ()))
    return (
        node.target in PIECES
        and piece not in graph.results()
        and all(n.target == COPY and n.args[0] == piece and n.args[1] != piece for n in copies)
    )


def _joined(graph: OpGraph, chain: list[_Write]) -> list[Node] | None:
    """The operators that make what the scatters of `chain` do, the last with the name of the last scatter."""
    last = max((w.node for w in chain), key=lambda n: graph.position[n.name])
    (meta,) = last.metas
    assert meta is not None
    selects = [w.node.target == SELECT for w in chain]
    if not meta.is_contiguous or any(selects) != all(selects):
        return None
    written = [graph.meta(w.piece) for w in chain]
    if not all(len(m.shape) < 4 or m.is_contiguous for m in written):  # channels-last pieces give such a whole
        return None
    pieces, dim = tuple(w.piece for w in chain), chain[0].dim
    if not all(selects):
        return [replace(last, target="aten.cat.default", args=(pieces, dim), kwargs=())]
    each = graph.meta(pieces[0]).shape
    if dim == len(each):  # as torch.stack comes apart: there is no dimension to lay them side by side in
        made = [_unsqueezed(graph, f"{last.name}__{i}", piece, dim) for i, piece in enumerate(pieces)]
        return [
            *made,
            replace(last, target="aten.cat.default", args=(tuple(Value(n.name) for n in made), dim), kwargs=()),
        ]
    shape = (*each[:dim], each[dim] * len(pieces), *each[dim + 1 :])
    side = Node(f"{last.name}__cat", "op", "aten.cat.default", (pieces, dim), (), (_plain(shape, meta.dtype),))
    return [side, replace(last, target="aten.view.default", args=(Value(side.name), meta.shape), kwargs=())]


def _as_slice(graph: OpGraph, write: _Write) -> list[Node]:
    """A selection as the slice of one element."""
    piece = _unsqueezed(graph, f"{write.node.name}__piece", write.node.args[1], write.dim)
    args: tuple[Any, ...] = (write.into, Value(piece.name), write.dim, write.start, write.start + 1)
    return [piece, replace(write.node, target=SLICE, args=args, kwargs=())]


def _unsqueezed(graph: OpGraph, name: str, value: Value, dim: int) -> Node:
    meta = graph.meta(value)
    step = meta.shape[dim] * meta.stride[dim] if dim < len(meta.shape) else 1
    made = Meta((*meta.shape[:dim], 1, *meta.shape[dim:]), (*meta.stride[:dim], step, *meta.stride[dim:]), meta.dtype)
    return Node(name, "op", "aten.unsqueeze.default", (value, dim), (), (made,))


def _plain(shape: tuple[int, ...], dtype: str) -> Meta:
    return Meta(shape, row_major(shape), dtype)


__all__ = ["concatenated"]
