"""Which products read a weight that is stored in codes with scales, and in which form.

Deals in the operators that widen a weight inside a region. Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.ops import category
from qimeng.graph.region import Region, region_of

SAME_ORDER = ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.alias", "aten.detach", "aten.clone")
"""Operators that leave elements in their order, where they take contiguous ones."""

CODES = ("int8", "float8_e4m3fn")
"""What a byte of codes may be."""

NIBBLE = 4
"""Bits of half a byte."""

WIDENING = (*SAME_ORDER, "aten._to_copy", "aten.mul", "aten.slice")
"""Operators between codes of 8 bits and the numbers that they stand for."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A weight of N outputs and K inputs, as a region reads it.

    Attributes:
        codes: int8 or fp8 (e4m3), one to a byte; or two of int8, the first of two neighbours along K in the low half.
        scale: fp32, one for each `group` codes of an output's row, or of `tall` outputs' rows.
        bits: of a code, 8 or 4.
        group: codes along K that share a scale; 0 for all of a row.
        depth: codes of an output's row: K, filled up to whole groups.
        widened: the weight in the dtype of the product.
        product: the region without the operators that widen, so that `widened` is one of its inputs.
        tall: outputs that share a scale.
    """

    codes: Value
    scale: Value
    bits: int
    group: int
    depth: int
    widened: Value
    product: Region
    tall: int = 1

    @property
    def floating(self) -> bool:
        """Whether codes are fp8."""
        return self.product.graph.meta(self.codes).dtype != "int8"


def stored_weight(region: Region) -> Stored:
    """The stored weight that a linear layer in `region` multiplies by.

    Raises:
        NotConcerned: there is none.
        Unsupported: it is widened in a way that kernels do not, or read besides.
    """
    graph = region.graph
    products = [n for n in region.ops if category(n) == "gemm"]
    made = [n for n in products if n.packet == "aten.linear" and n.operands()[1].node in region.nodes]
    if len(products) != 1 or not made:
        raise NotConcerned("no linear layer with a weight that is widened beside it")
    weight = made[0].operands()[1]
    walk = Walk(region)
    codes, scale, bits, group, depth = walk.weight(weight)
    walk.check_unread({made[0].name})
    rest = tuple(n for n in region.nodes if n not in walk.passed)
    return Stored(codes, scale, bits, group, depth, weight, region_of(graph, rest, region.outputs), walk.tall)


def codes_of(graph: OpGraph, value: Value) -> tuple[Value, set[str]] | None:
    """The codes that `value` is widened from, and the operators that do it; None where it is not."""
    passed = set[str]()
    while graph.meta(value).dtype not in CODES:
        node = graph.nodes[value.node]
        if node.kind != "op" or node.packet not in WIDENING:
            return None
        passed.add(value.node)
        value = node.operands()[0]
    return (value, passed) if passed else None


class Walk:
    """From a weight back to its codes and scales.

    Attributes:
        graph: the region's graph.
        inside: names of the region's operators.
        given: the region's outputs.
        passed: names of the operators on the way.
        tall: outputs that share a scale of the weight.
    """

    def __init__(self, region: Region):
        self.graph, self.inside, self.given = region.graph, set(region.nodes), region.outputs
        self.passed = set[str]()
        self.tall = 1

    def weight(self, weight: Value) -> tuple[Value, Value, int, int, int]:
        """Codes, scales, bits, group and depth."""
        rows, columns = self.graph.meta(weight).shape
        value = self.plain(weight)
        while (node := self.graph.nodes[value.node]).packet == "aten.slice" and value.node in self.inside:
            if tuple(node.args[1:]) not in ((1, 0, columns), (0, 0, rows)):
                raise Unsupported("a part of a weight")
            value = self.plain(self.through(value, "aten.slice")[0])
        if self.graph.meta(value).dtype != "float32":
            value = self.plain(self.through(value, "aten._to_copy")[0])
        shape = self.graph.meta(value).shape
        left, scale = self.through(value, "aten.mul")[:2]
        if len(shape) == 4:
            return self.blocks(left, scale, shape, rows)
        grouped = len(shape) == 3
        if self.graph.meta(left).shape != shape or self.graph.meta(scale).shape != (*shape[:-1], 1):
            raise Unsupported("scales that are not one for each row or group of codes")
        codes = self.plain(self.through(left, "aten._to_copy")[0])
        bits = 8
        if codes.node in self.inside:
            codes, bits = self.nibbles(codes), NIBBLE
        depth = shape[-1] * (shape[1] if grouped else 1)
        kinds = CODES if bits == 8 else CODES[:1]
        for value, dtypes, size in ((codes, kinds, rows * depth * bits // 8), (scale, ("float32",), rows)):
            meta = self.graph.meta(value)
            if value.node in self.inside or meta.dtype not in dtypes or not meta.is_contiguous:
                raise Unsupported(f"codes or scales in {meta.dtype} of {meta.shape}, or computed beside the product")
            if value == codes and meta.numel != size or shape[0] != rows:
                raise Unsupported(f"{meta.numel} bytes of codes for {rows} rows of {depth}")
        return codes, scale, bits, shape[-1] if grouped else 0, depth

    def blocks(
        self, left: Value, scale: Value, shape: tuple[int, ...], rows: int
    ) -> tuple[Value, Value, int, int, int]:
        """The same of codes [R, tall, C, group], with a scale for each `tall` rows and `group` codes of them."""
        high, self.tall, wide, group = shape
        codes = self.plain(self.through(left, "aten._to_copy")[0])
        if self.graph.meta(left).shape != shape or self.graph.meta(scale).shape != (high, 1, wide, 1):
            raise Unsupported("scales that are not one for each block of codes")
        for value, dtypes, size in (
            (codes, CODES, high * self.tall * wide * group),
            (scale, ("float32",), high * wide),
        ):
            meta = self.graph.meta(value)
            if value.node in self.inside or meta.dtype not in dtypes or not meta.is_contiguous or meta.numel != size:
                raise Unsupported(f"codes or scales in {meta.dtype} of {meta.shape}, or computed beside the product")
        if high != -(-rows // self.tall):
            raise Unsupported(f"{high} blocks of {self.tall} rows for {rows} outputs")
        return codes, scale, 8, group, wide * group

    def check_unread(self, products: set[str]) -> None:
        """Raise `Unsupported` where what was passed is read by others than `products`."""
        graph = self.graph
        for name in self.passed:
            values = [Value(name, port) for port in range(len(graph.nodes[name].metas))]
            readers = {u for v in values for u in graph.users().get(v, ())} & self.inside
            if readers - self.passed - products or any(v.node == name for v in self.given):
                raise Unsupported(f"{name}, which widens an operand, is read besides")

    def nibbles(self, value: Value) -> Value:
        """The packed pairs that `value` unpacks."""
        node = self.graph.nodes[value.node]
        parts = self.through(value, "aten.cat")
        if len(parts) != 2 or len(self.graph.meta(value).shape) != 3 or node.args[1:] not in ((-1,), (2,)):
            raise Unsupported("codes that are not pairs of halves of a byte")
        low, high = (self.through(v, "aten.unsqueeze")[0] for v in parts)
        shifted = self.shift(low, "aten.__rshift__")
        pairs = self.shift(shifted, "aten.__lshift__")
        if self.shift(high, "aten.__rshift__") != pairs:
            raise Unsupported("halves of different bytes")
        return self.plain(pairs)

    def shift(self, value: Value, packet: str) -> Value:
        """What `value` is shifted from, by four bits."""
        if self.graph.nodes[value.node].args[1:] != (NIBBLE,):
            raise Unsupported("codes of other than four bits")
        return self.through(value, packet)[0]

    def through(self, value: Value, packet: str) -> tuple[Value, ...]:
        """What the operator that makes `value`, which must be a `packet` of the region, is computed from."""
        node: Node = self.graph.nodes[value.node]
        if value.node not in self.inside or node.packet != packet:
            raise Unsupported(f"a weight that {node.packet or node.kind} makes, where {packet} reads stored codes")
        self.passed.add(value.node)
        return node.operands()

    def plain(self, value: Value) -> Value:
        """What `value` has the elements of, in their order."""
        while value.node in self.inside and self.graph.nodes[value.node].packet in SAME_ORDER:
            (before,) = self.through(value, self.graph.nodes[value.node].packet)
            value = before
        return value


__all__ = ["CODES", "SAME_ORDER", "Stored", "Walk", "codes_of", "stored_weight"]
