"""Which values of a graph are the kept blocks of a weight: found by what the form itself computes.

The operators before a weight are compared, one by one, with those that `qimeng.vocabulary.sparse.forms` is captured as.
Indices are then right by how they are made, so that kernels need not check them. Knows nothing about regions' kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.ops import category
from qimeng.graph.region import Region, region_of
from qimeng.vocabulary.sparse.forms import dense, stored

PUTS = "aten.index_put"
"""The operator that puts the blocks in their places."""


@dataclass(frozen=True, eq=False)
class Kept:
    """The weight of a linear layer, N x K, and the blocks that it is made of.

    Attributes:
        first: int32 [rows of blocks + 1]; the number of the first block of each row, and of all.
        at: int32 [count]; the column of each block.
        values: [count, block, block].
        weight: [N, K], dense.
        widening: the operators from blocks to `weight`.
    """

    graph: OpGraph
    first: Value
    at: Value
    values: Value
    weight: Value
    widening: frozenset[str]

    @property
    def count(self) -> int:
        """Blocks that are kept."""
        return self.graph.meta(self.values).shape[0]

    @property
    def block(self) -> int:
        """Side of a block."""
        return self.graph.meta(self.values).shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """N and K."""
        return self.graph.meta(self.weight).shape

    @property
    def bytes(self) -> int:
        """Bytes of blocks and indices."""
        return sum(self.graph.meta(v).bytes for v in (self.first, self.at, self.values))

    @property
    def text(self) -> str:
        """The blocks in words, with their numbers."""
        high, wide = (-(-size // self.block) for size in self.shape)
        kind = "weights" if self.block == 1 else f"blocks of {self.block} x {self.block}"
        return f"{self.count} of {high * wide} {kind} ({100 * self.count / (high * wide):.3g} %)"


def kept_blocks(graph: OpGraph, weight: Value) -> Kept:
    """The kept blocks that `weight` is made of.

    Raises:
        Unsupported: it is not made of any.
    """
    found: dict[Value, Kept | None] = graph.memo.setdefault("sparse", {})
    if weight not in found:
        found[weight] = _kept(graph, weight)
    if (made := found[weight]) is None:
        raise Unsupported(f"{weight.node} is not made of kept blocks")
    return made


def _kept(graph: OpGraph, weight: Value) -> Kept | None:
    meta, values = graph.meta(weight), _put(graph, weight)
    if len(meta.shape) != 2 or values is None or len(blocks := graph.meta(values).shape) != 3:
        return None
    count, block, _ = blocks
    made = _captured(meta.shape, meta.dtype, block, count)
    same: dict[Value, Value] = {}
    if not agree(made, made.outputs[-1], graph, weight, same):
        return None
    first, at, values = (same[v] for v in made.outputs[:-1])
    return Kept(graph, first, at, values, weight, frozenset(between(graph, weight, {first, at, values})))


def _put(graph: OpGraph, weight: Value) -> Value | None:
    """What is put in its places to make `weight`; None where no such operator is before it."""
    value = weight
    while (node := graph.nodes[value.node]).packet != PUTS:
        if node.kind != "op" or len(node.operands()) != 1:
            return None
        (value,) = node.operands()
    return node.operands()[-1]


@lru_cache(256)
def _captured(shape: tuple[int, ...], dtype: str, block: int, count: int) -> OpGraph:
    """What the form computes: first, at and values of the kept blocks, then the weight."""

    class Form(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            kept = stored(weight, block, count)
            return kept.first, kept.at, kept.values, dense(kept, shape)

    return capture(Form, lambda: (torch.empty(shape, dtype=getattr(torch, dtype)),))


def agree(made: OpGraph, a: Value, graph: OpGraph, b: Value, same: dict[Value, Value]) -> bool:
    """Whether `b` of `graph` is computed as `a` of `made` is, whose input may be anything; fills in `same`."""
    waiting = [(a, b)]
    while waiting:
        a, b = waiting.pop()
        if same.setdefault(a, b) != b:
            return False
        mine, other = made.nodes[a.node], graph.nodes[b.node]
        if made.meta(a) != graph.meta(b):
            return False
        if mine.kind == "input":
            continue
        if (mine.kind, mine.target, a.port) != (other.kind, other.target, b.port):
            return False
        if _plain(mine.args) != _plain(other.args) or _plain(mine.kwargs) != _plain(other.kwargs):
            return False
        waiting += zip(mine.operands(), other.operands(), strict=True)
    return True


def _plain(arguments: Any) -> Any:
    """Arguments without the names of values."""
    if isinstance(arguments, Value):
        return Value
    return tuple(map(_plain, arguments)) if isinstance(arguments, (tuple, list)) else arguments


def between(graph: OpGraph, goal: Value, start: set[Value]) -> Iterator[str]:
    """Names of the operators from the values of `start` to `goal`."""
    waiting, seen = [goal], set[str]()
    while waiting:
        value = waiting.pop()
        if value not in start and value.node not in seen:
            seen.add(value.node)
            yield value.node
            waiting += graph.nodes[value.node].operands()


def sparse_product(region: Region) -> tuple[Kept, Region]:
    """The kept blocks that the linear layer of `region` reads, and the region without what widens them.

    Raises:
        NotConcerned: there are none.
        Unsupported: what widens them is read besides.
    """
    graph = region.graph
    products = [n for n in region.ops if category(n) == "gemm"]
    made = [n for n in products if n.packet == "aten.linear" and n.operands()[1].node in region.nodes]
    if len(products) != 1 or not made or all(n.packet != PUTS for n in region.ops):
        raise NotConcerned("no linear layer with a weight that is made of kept blocks beside it")
    kept = kept_blocks(graph, made[0].operands()[1])
    if not kept.widening <= set(region.nodes):
        raise NotConcerned("the weight's blocks are put together elsewhere")
    users = graph.users()
    for name in kept.widening:
        readers = {u for port in range(len(graph.nodes[name].metas)) for u in users.get(Value(name, port), ())}
        if (readers & set(region.nodes)) - kept.widening - {made[0].name} or any(
            v.node == name for v in region.outputs
        ):
            raise Unsupported(f"{name}, which puts the weight together, is read besides")
    rest = tuple(n for n in region.nodes if n not in kept.widening)
    return kept, region_of(graph, rest, region.outputs)


__all__ = ["Kept", "agree", "between", "kept_blocks", "sparse_product"]
