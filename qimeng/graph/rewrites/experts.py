"""Experts that all compute the same on the same rows, each with weights of its own, as one batch of products.

``r[:, 0:1] * f(x, u[0]) + r[:, 1:2] * f(x, u[1]) + …`` reads the rows once for each expert, and keeps little of a GPU
busy at a time. With stacked weights it is the batch ``(f(x, u) * r.t()[:, :, None]).sum(0)``. Deals in operators whose
copies differ in parameters alone. Knows nothing about how an expert's weight is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qimeng.graph.opgraph import Node, Value, map_values
from qimeng.graph.ops import category
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule

FEWEST = 2
"""Experts of a layer."""

FILLS = ("aten.full", "aten.full_like", "aten.zeros", "aten.zeros_like")


@dataclass(frozen=True)
class _Term:
    """One expert's weighted result: of `base` [T, experts], the column `number` times `result`."""

    result: Value
    base: Value
    number: int


class StackExperts(Rule):
    """``r[:, 0:1] * f(x, u0) + r[:, 1:2] * f(x, u1)`` as ``(f(x, stack(u0, u1)) * r.t()[:, :, None]).sum(0)``."""

    name = "experts"
    option = "experts"
    packets = ("aten.add", "aten.sum")

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for linear layers of equal shapes and pointwise operators between them, on the same rows."""
        terms, before = _summed(edit, node) if node.packet == "aten.sum" else _added(edit, node)
        base, experts = terms[0].base, len(terms)
        numbers = sorted(t.number for t in terms)
        if {t.base for t in terms} != {base} or numbers != list(range(edit.meta(base).shape[-1])):
            raise NoRewrite(f"{node.name} adds up {experts} results with weights of other than {experts} columns")
        terms = sorted(terms, key=lambda t: t.number)
        batch = _Batch(edit, experts)
        y = batch.of([t.result for t in terms])
        if y is None:
            raise NoRewrite(f"{node.name} adds up the same values")
        shape = edit.meta(y).shape
        weights = edit.op("aten.unsqueeze.default", edit.op("aten.permute.default", base, (1, 0)), -1)
        if edit.meta(base).shape != (shape[1], experts) or len(shape) != 3:
            raise NoRewrite(f"{node.name} adds up results of shape {shape[1:]} with weights {edit.meta(base).shape}")
        total = edit.op("aten.sum.dim_IntList", edit.op("aten.mul.Tensor", y, weights), (0,))
        wanted = edit.meta(Value(node.name)).dtype
        if edit.meta(total).dtype != wanted:
            total = edit.op("aten._to_copy.default", total, dtype=getattr(torch, wanted))
        if before is not None:
            total = edit.op("aten.add.Tensor", before, total)
        edit.instead(Value(node.name), total)


def _added(edit: Edit, node: Node) -> tuple[list[_Term], Value | None]:
    """The terms of a chain of additions that `node` ends, and what they are added to, if that is not zero."""
    users = edit.graph.users()
    after = [edit.graph.nodes[n] for n in users.get(Value(node.name), ())]
    if len(after) == 1 and after[0].packet == "aten.add" and _term_of(edit, after[0]) is not None:
        raise NoRewrite("")  # the last of the chain is rewritten
    terms, value, reader = list[_Term](), Value(node.name), ""
    while (found := _term_of(edit, edit.maker(value))) is not None:
        if reader:
            edit.alone(value, reader)
        reader, (rest, term) = value.node, found
        terms.append(term)
        if rest is None:
            break
        value = rest
    else:
        last = _term(edit, value)
        rest = None if last is not None else value
        terms += [] if last is None else [last]
    if len(terms) < FEWEST:
        raise NoRewrite("")
    return terms, None if rest is None or _is_zero(edit, rest) else rest


def _term_of(edit: Edit, node: Node) -> tuple[Value | None, _Term] | None:
    """What an addition adds to, None for the number 0, and the weighted result that it adds; None for others."""
    if node.packet != "aten.add" or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    if isinstance(right, Value) and (term := _term(edit, right)) is not None:
        return left, term
    if isinstance(left, Value) and (term := _term(edit, left)) is not None:
        return (None, term) if right == 0 else (right, term) if isinstance(right, Value) else None
    return None


def _is_zero(edit: Edit, value: Value) -> bool:
    node = edit.maker(value)
    return node.packet in FILLS and (node.packet.startswith("aten.zeros") or node.args[1] == 0)


def _term(edit: Edit, value: Value) -> _Term | None:
    """The column and the result that `value` is the product of; None where it is none."""
    node = edit.maker(value)
    while node.packet == "aten._to_copy":
        node = edit.maker(node.operands()[0])
    if node.packet != "aten.mul" or len(node.operands()) != 2:
        return None
    for mine, other in (node.operands(), node.operands()[::-1]):
        column = _column(edit, mine)
        if column is not None and edit.meta(mine).shape[-1] == 1 and len(edit.meta(other).shape) == 2:
            return _Term(other, *column)
    return None


def _column(edit: Edit, value: Value) -> tuple[Value, int] | None:
    """A matrix and the number of its column that `value` [T, 1] is; None where it is something else."""
    node = edit.maker(value)
    if node.packet == "aten.unsqueeze" and node.args[1] in (1, -1):
        node = edit.maker(node.operands()[0])
        number = node.args[2] if node.packet == "aten.select" and len(node.args) == 3 else None
    elif node.packet == "aten.slice" and len(node.args) == 4 and node.args[3] == node.args[2] + 1:
        number = node.args[2]
    else:
        return None
    if number is None or len(edit.meta(node.operands()[0]).shape) != 2 or node.args[1] not in (1, -1):
        return None
    return node.operands()[0], number


def _summed(edit: Edit, node: Node) -> tuple[list[_Term], None]:
    """The terms of a sum over a stack [T, experts, N] or [experts, T, N] of results, weighted."""
    dims = node.args[1] if len(node.args) > 1 else ()
    times = edit.maker(node.operands()[0])
    if times.packet != "aten.mul" or len(times.operands()) != 2 or not dims or len(dims) != 1 or node.args[2:] != ():
        raise NoRewrite("")
    dim = dims[0] % len(edit.meta(node.operands()[0]).shape)
    for stack, weights in (times.operands(), times.operands()[::-1]):
        results, shape = _stacked(edit, stack, dim), edit.meta(weights).shape
        column = edit.maker(weights)
        if results is None or column.packet != "aten.unsqueeze" or shape[-1] != 1 or len(shape) != 3 or dim == 2:
            continue
        base = column.operands()[0]
        if dim == 0:  # [experts, T, 1]: the transposed matrix
            turned = edit.maker(base)
            if turned.packet not in ("aten.permute", "aten.t", "aten.transpose"):
                raise NoRewrite(f"{node.name} weighs results by {base.node}, which is no transposed matrix")
            base = turned.operands()[0]
        return [_Term(v, base, e) for e, v in enumerate(results)], None
    raise NoRewrite("")


def _stacked(edit: Edit, value: Value, dim: int) -> list[Value] | None:
    """The matrices that `value` stacks along `dim`; None where it is something else."""
    node = edit.maker(value)
    if node.packet == "aten.stack" and (node.args[1:] or (0,))[0] % 3 == dim:
        return list(node.operands())
    shape = edit.meta(value).shape
    if node.packet in ("aten.view", "aten._unsafe_view"):  # of the matrices one beside the other
        whole = edit.maker(node.operands()[0])
        if whole.packet == "aten.cat" and (whole.args[1:] or (0,))[0] % 2 == dim:
            parts = list(whole.operands())
            matrix = shape[:dim] + shape[dim + 1 :]
            return parts if len(parts) == shape[dim] and {edit.meta(v).shape for v in parts} == {matrix} else None
    if node.packet == "aten.cat" and (node.args[1:] or (0,))[0] % 3 == dim:
        nodes = [edit.maker(v) for v in node.operands()]
        if all(n.packet == "aten.unsqueeze" and n.args[1] % 3 == dim for n in nodes):
            return [n.operands()[0] for n in nodes]
    return None


class _Batch:
    """Values that experts compute alike as one value of a batch.

    Args:
        edit: the graph in the hands of the rule.
        experts: number of copies.
    """

    def __init__(self, edit: Edit, experts: int):
        self.edit, self.experts = edit, experts
        self.known: dict[tuple[Value, ...], Value | None] = {}
        self.spread: dict[Value, Value] = {}

    def of(self, values: Sequence[Value]) -> Value | None:
        """The batch [experts, …] of `values`, one of each expert; None where all are the same.

        Raises:
            NoRewrite: they are computed in different ways, or in one that is not covered.
        """
        key = tuple(values)
        if key not in self.known:
            self.known[key] = None if len(set(key)) == 1 else self._made(key)
        return self.known[key]

    def _made(self, values: tuple[Value, ...]) -> Value | None:
        edit, nodes = self.edit, [self.edit.maker(v) for v in values]
        first = nodes[0]
        if all(n.kind == "constant" for n in nodes) and len({n.literal for n in nodes}) == 1:
            return None
        if len({(n.kind, n.target, n.metas, _plain(n)) for n in nodes}) > 1 or first.kind != "op":
            raise NoRewrite(f"{first.name} and {nodes[1].name} are computed in different ways")
        columns = [list(column) for column in zip(*(n.operands() for n in nodes), strict=True)]
        if first.packet in ("aten.linear", "aten.mm"):
            return self._product(first, columns)
        rank = len(edit.meta(values[0]).shape)
        made = [self._vectors(column) if self._is_bias(column, rank) else self.of(column) for column in columns]
        if all(m is None for m in made):
            return None
        kind = category(first)
        if kind == "pointwise" and len(first.metas) == 1:
            return self._op(first, columns, made)
        if first.packet == "aten.slice" and len(made) == 1:
            dim, *rest = first.args[1:]
            return edit.op(first.target, made[0], dim % rank + 1, *rest)
        raise NoRewrite(f"{first.packet} between the products of experts")

    def _op(self, node: Node, columns: Sequence[list[Value]], made: Sequence[Value | None]) -> Value:
        """A pointwise operator on batches; what all share is spread over them."""
        batches = {c[0]: m if m is not None else c[0] for c, m in zip(columns, made, strict=True)}
        for column, batch in zip(columns, made, strict=True):
            shared, shape = batch is None, self.edit.meta(column[0]).shape
            if (
                not shared
                and not self._is_bias(column, 2)
                and len(shape) != len(self.edit.meta(Value(node.name)).shape)
            ):
                raise NoRewrite(f"{node.name} spreads values of an expert")
        args = map_values(node.args, lambda v: batches.get(v, v))
        return self.edit.op(node.target, *args, **dict(node.kwargs))

    def _is_bias(self, column: Sequence[Value], rank: int) -> bool:
        """Whether rows of a matrix all meet one vector of parameters for each expert."""
        edit = self.edit
        return rank == 2 and all(len(edit.meta(v).shape) == 1 and edit.is_state(v) for v in column)

    def _vectors(self, column: Sequence[Value]) -> Value | None:
        """A vector for each expert [experts, 1, N]; None where all are the same."""
        if len(set(column)) == 1:
            return None
        return self.edit.op("aten.unsqueeze.default", self._stack(column), 1)

    def _product(self, node: Node, columns: Sequence[list[Value]]) -> Value:
        """A batch of products with stacked weights."""
        edit, rows = self.edit, self.of(columns[0])
        if rows is None:
            rows = self._spread(columns[0][0])
        weights = self._stack(columns[1])
        if node.packet == "aten.linear":
            weights = edit.op("aten.permute.default", weights, (0, 2, 1))
        y = edit.op("aten.bmm.default", rows, weights)
        if len(columns) > 2:
            bias = edit.op("aten.unsqueeze.default", self._stack(columns[2]), 1)
            y = edit.op("aten.add.Tensor", y, bias)
        return y

    def _spread(self, x: Value) -> Value:
        """The rows that all experts read, [experts, T, D] without a copy."""
        edit, shape = self.edit, self.edit.meta(x).shape
        if len(shape) != 2:
            raise NoRewrite(f"experts multiply {x.node} of shape {shape}, which is no matrix of rows")
        if x not in self.spread:
            whole = edit.op("aten.unsqueeze.default", x, 0)
            self.spread[x] = edit.op("aten.expand.default", whole, (self.experts, *shape))
        return self.spread[x]

    def _stack(self, values: Sequence[Value]) -> Value:
        """The parameters `values` as one tensor; the one that they are the pieces of, where it is."""
        edit, nodes = self.edit, [self.edit.maker(v) for v in values]
        if all(n.packet == "aten.select" and n.args[1:] == (0, e) for e, n in enumerate(nodes)):
            whole = {n.operands()[0] for n in nodes}
            if len(whole) == 1 and edit.meta(first := whole.pop()).shape[0] == self.experts:
                return first
        if not all(edit.is_state(v) for v in values):
            raise NoRewrite(f"{values[0].node} depends on the inputs")
        if len({edit.meta(v) for v in values}) > 1:
            raise NoRewrite(f"{values[0].node} and others have different shapes")
        return edit.op("aten.stack.default", tuple(values), 0)


def _plain(node: Node) -> str:
    """Arguments without the tensors."""
    blank = Value("")
    return repr((map_values(node.args, lambda v: blank), [(k, map_values(v, lambda v: blank)) for k, v in node.kwargs]))


__all__ = ["StackExperts"]
