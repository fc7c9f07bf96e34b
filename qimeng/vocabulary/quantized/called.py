"""Products of codes that a module calls itself: `torch._scaled_mm` and `torch._int_mm`, as quantized layers do.

They mean what a linear layer on widened codes means (`qimeng.vocabulary.quantized.coded`): sums of products of codes,
times the scales of both sides. Deals in the arguments of these two operators. Knows nothing about schedules or kernels.
"""

from __future__ import annotations

from dataclasses import replace

from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import Meta, Node, Value, row_major
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region, region_of
from qimeng.vocabulary.lowprecision.stored import SAME_ORDER
from qimeng.vocabulary.quantized.coded import DEEPEST, Coded

SCALED, INTEGER = "aten._scaled_mm", "aten._int_mm"
HALVES = ("bfloat16", "float16", "float32")
FP8 = "float8_e4m3fn"


def is_called(region: Region) -> bool:
    """Whether `region` has one of the two products."""
    return any(n.packet in (SCALED, INTEGER) for n in region.ops)


def called_product(region: Region) -> Coded:
    """The product of codes in `region`.

    Raises:
        NotConcerned: there is none, or another product beside it.
        Unsupported: it is called in a way that kernels do not compute; the message says which.
    """
    products = [n for n in region.ops if n.packet in (SCALED, INTEGER)]
    if len(products) != 1:
        raise NotConcerned("no single product of codes")
    return _Call(region, products[0]).coded()


class _Call:
    """One product, and what it reads.

    Attributes:
        region: where it is.
        node: the product.
        passed: names of the views before it that the kernels follow themselves.
    """

    def __init__(self, region: Region, node: Node):
        self.region, self.graph, self.node, self.passed = region, region.graph, node, set[str]()

    def coded(self) -> Coded:
        """The product as the kernels read it."""
        left, right = self.node.operands()[:2]
        columns = self.graph.meta(right).shape[1]
        rows, depth = self.graph.meta(left).shape
        floating = self.node.packet == SCALED
        scales: tuple[Value | None, Value | None] = (None, None)
        whole, bias = (False, False), None
        if floating:
            scales, whole, bias, dtype = self._scaled(rows, columns)
        else:
            dtype = self._sums(depth)
        kinds = {self.graph.meta(v).dtype for v in (left, right)}
        if kinds != {FP8 if floating else "int8"}:
            raise Unsupported(f"{self.node.name} multiplies {' and '.join(sorted(kinds))}: e4m3 or int8 is covered")
        codes = self._source(left, (rows, depth)), self._source(right, (depth, columns), turned=True)
        product, widened = self._product(dtype, bias)
        return Coded(codes[0], scales[0], codes[1], scales[1], whole[0], floating, widened, product, whole[1])

    def _scaled(self, rows: int, columns: int) -> tuple[tuple[Value, Value], tuple[bool, bool], Value | None, str]:
        """Both scales, whether each is one for all, the bias and the dtype of the result of `_scaled_mm`."""
        args = [*self.node.args, *[None] * 8][:8]
        given = dict(self.node.kwargs)
        names = ("scale_a", "scale_b", "bias", "scale_result", "out_dtype")
        scale_a, scale_b, bias, result, out = (given.get(n, a) for n, a in zip(names, args[2:7], strict=True))
        if result is not None:
            raise Unsupported(f"{self.node.name} scales its result, which is not covered: multiply the result instead")
        dtype = str(out or self.graph.meta(Value(self.node.name)).dtype).removeprefix("torch.")
        if dtype not in HALVES:
            raise Unsupported(f"{self.node.name} gives {dtype}: fp32, fp16 and bf16 are covered")
        assert isinstance(scale_a, Value) and isinstance(scale_b, Value)
        sizes = [self.graph.meta(v) for v in (scale_a, scale_b)]
        whole = sizes[0].numel == 1 and sizes[0].shape != (rows, 1), sizes[1].numel == 1 and columns != 1
        wanted = ("rows", (rows, 1), whole[0]), ("columns", (1, columns), whole[1])
        for meta, (what, shape, one) in zip(sizes, wanted, strict=True):
            if meta.dtype != "float32" or not (one or meta.shape == shape):
                has, wants = (
                    f"scales {meta.shape} of {meta.dtype}",
                    f"one in fp32, or one for each of the {what} {shape}",
                )
                raise Unsupported(f"{self.node.name} has {has}: {wants}, is covered")
        found = tuple(self._source(v, m.shape) for v, m in zip((scale_a, scale_b), sizes, strict=True))
        if len({*found, *self.node.operands()[:2]}) < 4:
            raise Unsupported(f"{self.node.name} reads one tensor on both sides")
        return (found[0], found[1]), whole, bias if isinstance(bias, Value) else None, dtype

    def _sums(self, depth: int) -> str:
        """The dtype in which sums of `_int_mm` are read on: kernels give them in fp32."""
        mine = Value(self.node.name)
        readers = [self.graph.nodes[n] for n in self.graph.users().get(mine, ())]
        inside = [n for n in readers if n.name in self.region.nodes]
        whole = mine in self.region.outputs or len(inside) < len(readers)
        wrong = [n for n in inside if n.packet != "aten._to_copy" or "float" not in str(dict(n.kwargs).get("dtype"))]
        if whole or wrong:
            fuse = "kernels convert them, so fuse the conversion with the product"
            raise Unsupported(f"the sums of {self.node.name} leave as int32: {fuse}")
        if depth > DEEPEST:
            raise Unsupported(f"a sum of {depth} products of int8, which int32 does not hold")
        return "float32"

    def _source(self, value: Value, shape: tuple[int, ...], turned: bool = False) -> Value:
        """What `value` is a view of, in the region's inputs; of a `turned` matrix the transposed one."""
        steps = [value]
        while steps[-1].node in self.region.nodes:
            node = self.graph.nodes[steps[-1].node]
            if node.packet not in VIEWS and node.packet not in SAME_ORDER:
                raise Unsupported(f"{node.packet} makes an operand of {self.node.name} beside it")
            self.passed.add(node.name)
            steps.append(node.operands()[0])
        source, meta = steps[-1], self.graph.meta(value)
        if self.graph.nodes[source.node].kind == "constant":
            raise Unsupported(f"{self.node.name} reads a number that is made in forward: hold it in a buffer")
        wanted = (1, shape[0]) if turned else row_major(shape)
        order = all(n == 1 or a == b for n, a, b in zip(shape, meta.stride, wanted, strict=True))
        if not order or not self.graph.meta(source).is_contiguous or self.graph.meta(source).numel != meta.numel:
            way = "column by column (a transposed contiguous one)" if turned else "row by row"
            raise Unsupported(f"{self.node.name} reads {source.node} otherwise than {way}")
        return source

    def _product(self, dtype: str, bias: Value | None) -> tuple[Region, tuple[Value, Value]]:
        """The region as one with a linear layer on whole operands, and these."""
        graph, node = self.graph, self.node
        rows, depth = graph.meta(node.operands()[0]).shape
        columns = graph.meta(node.operands()[1]).shape[1]
        names = f"{node.name}__left", f"{node.name}__right"
        made: dict[str, Node] = {}
        for name, shape in zip(names, ((rows, depth), (columns, depth)), strict=True):
            made[name] = Node(name, "input", name, metas=(Meta(shape, row_major(shape), dtype),))
        wide = Value(names[0]), Value(names[1])
        result = Meta((rows, columns), row_major((rows, columns)), dtype)
        operands = (*wide, bias) if bias is not None else wide
        linear = replace(node, target="aten.linear.default", args=operands, kwargs=(), metas=(result,))
        nodes = {n.name: linear if n is node else n for n in graph.nodes.values()}
        whole = replace(graph, nodes={**made, **nodes})
        rest = tuple(n for n in self.region.nodes if n not in self._unread())
        return region_of(whole, rest, self.region.outputs), wide

    def _unread(self) -> set[str]:
        """The views that nothing but the product's own operands reads."""
        users, left = self.graph.users(), set(self.passed)
        while True:
            read = {
                n
                for n in left
                if any(u not in left and u != self.node.name for u in users.get(Value(n), ()) if u in self.region.nodes)
                or Value(n) in self.region.outputs
            }
            if not read:
                return left
            left -= read


__all__ = ["called_product", "is_called"]
