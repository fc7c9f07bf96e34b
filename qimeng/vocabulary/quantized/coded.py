"""Which products multiply numbers that codes of 8 bits with scales give back, on both sides.

Deals in the operators that widen codes, and in those that make them of activations. Knows nothing about schedules or
kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.ops import VIEWS, category
from qimeng.graph.region import Region, region_of
from qimeng.vocabulary.lowprecision.stored import CODES, Walk, codes_of

DEEPEST = (1 << 31) // 127**2
"""The deepest sum of products of int8 codes that int32 holds."""


@dataclass(frozen=True, eq=False)
class Coded:
    """A linear layer on codes, as a region reads it.

    Attributes:
        left: codes of the activations, [..., K].
        left_scale: fp32, one for each row, or one; None where sums are not scaled.
        right: codes of the weight, [N, K].
        right_scale: fp32, one for each row of it, or one; None as there.
        whole: all activations share one scale.
        floating: codes are fp8, else int8.
        widened: both operands in the dtype of the product.
        product: the region without the operators that widen, so that both are among its inputs.
        right_whole: the whole weight shares one scale.
        group: codes along K that share a scale, on both sides; 0 for all of a row.
        tall: rows of the weight that share a scale.
    """

    left: Value
    left_scale: Value | None
    right: Value
    right_scale: Value | None
    whole: bool
    floating: bool
    widened: tuple[Value, Value]
    product: Region
    right_whole: bool = False
    group: int = 0
    tall: int = 1


def coded_product(region: Region) -> Coded:
    """The product of codes in `region`.

    Raises:
        NotConcerned: there is none.
        Unsupported: its operands are widened in a way that kernels do not, or read besides.
    """
    graph, inside = region.graph, set(region.nodes)
    products = [n for n in region.ops if category(n) == "gemm"]
    if len(products) != 1 or products[0].packet != "aten.linear":
        raise NotConcerned("no linear layer alone")
    (product,) = products
    x, weight = product.operands()[:2]
    if not {x.node, weight.node} <= inside or codes_of(graph, x) is None:
        raise NotConcerned("no linear layer with activations that are widened beside it")
    walk = Walk(region)
    right, right_scale, bits, group, _ = walk.weight(weight)
    left, left_scale, whole, left_group = _activations(walk, x)
    kinds = {graph.meta(left).dtype, graph.meta(right).dtype}
    if bits != 8 or len(kinds) > 1:
        raise Unsupported("codes of two kinds, or of other than 8 bits")
    depth = graph.meta(weight).shape[1]
    if group != left_group or group and (depth % group or "int8" in kinds):
        sides = f"scales of {left_group or 'all'} codes of a row beside those of {group or 'all'} of the weight's"
        raise Unsupported(f"{sides}, at a depth of {depth}: the same on both sides that divides the depth is covered")
    if "int8" in kinds and depth > DEEPEST:
        raise Unsupported(f"a sum of {depth} products of int8, which int32 does not hold")
    walk.check_unread({product.name})
    rest = tuple(n for n in region.nodes if n not in walk.passed)
    made = region_of(graph, rest, region.outputs)
    return Coded(
        left, left_scale, right, right_scale, whole, "int8" not in kinds, (x, weight), made, group=group, tall=walk.tall
    )


def _activations(walk: Walk, x: Value) -> tuple[Value, Value, bool, int]:
    """Codes, scales, whether there is one scale for all rows, and how many codes of a row share one (0: all)."""
    graph = walk.graph
    value = walk.plain(x)
    if graph.meta(value).dtype != "float32":
        value = walk.plain(walk.through(value, "aten._to_copy")[0])
    shape = graph.meta(value).shape
    left, scale = walk.through(value, "aten.mul")[:2]
    sizes = graph.meta(scale)
    rows = (*shape[:-1], 1)
    if graph.meta(left).shape != shape or sizes.shape not in (rows, (1,) * len(shape)):
        raise Unsupported("scales that are not one for each row of activations, or one for all")
    codes = walk.plain(walk.through(left, "aten._to_copy")[0])
    for found, dtypes in ((codes, CODES), (scale, ("float32",))):
        meta = graph.meta(found)
        if found.node in walk.inside or meta.dtype not in dtypes or not meta.is_contiguous:
            raise Unsupported(f"codes or scales in {meta.dtype} of {meta.shape}, or computed beside the product")
    if shape != graph.meta(x).shape:
        if shape[:-2] != graph.meta(x).shape[:-1] or sizes.shape != rows:
            raise Unsupported(f"activations {graph.meta(x).shape} of codes {shape}")
        return codes, scale, False, shape[-1]
    return codes, scale, sizes.shape != rows, 0


def quantizing(graph: OpGraph, codes: Value, scale: Value) -> set[str]:
    """The operators that make `codes` and `scale` of activations; empty where scales are not the largest magnitudes'.

    They begin with the conversion to fp32 of what is compared, and the views before it.
    """
    value = scale
    while graph.nodes[value.node].packet != "aten.amax":
        operands = graph.nodes[value.node].operands()
        if not operands:
            return set()
        value = operands[0]
    source = graph.nodes[value.node].operands()[0]
    if graph.nodes[source.node].packet == "aten.abs":
        source = graph.nodes[source.node].operands()[0]
    found, waiting = set[str](), [codes, scale]
    while waiting:
        value = waiting.pop()
        if value == source or value.node in found or graph.nodes[value.node].kind == "constant":
            continue
        if graph.nodes[value.node].kind != "op":
            return set()
        found.add(value.node)
        waiting += graph.nodes[value.node].operands()
    if graph.nodes[source.node].packet == "aten._to_copy":
        found.add(source.node)
        (source,) = graph.nodes[source.node].operands()
    while graph.nodes[source.node].packet in VIEWS:
        found.add(source.node)
        source = graph.nodes[source.node].operands()[0]
    return found


__all__ = ["DEEPEST", "Coded", "coded_product", "quantizing"]
