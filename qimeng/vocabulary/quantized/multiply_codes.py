"""The kind of action that has a product multiply the codes of activations and weights.

Deals in which operators a region computes again, and in which ones make the codes. Knows nothing about kernels.
"""

from __future__ import annotations

from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.graph.opgraph import Node
from qimeng.graph.region import Region, repartition
from qimeng.interfaces import Action
from qimeng.program.program import Program
from qimeng.vocabulary.lowprecision.stored import codes_of
from qimeng.vocabulary.quantized.coded import quantizing
from qimeng.vocabulary.weight_readers import WeightReader


class MultiplyCodes(WeightReader):
    """Multiply activations and weights as codes of 8 bits, in fp8 or int8 tensor cores, and scale the sums.

    Legal where a spec declares both (``weights="int8", activations="int8"``). What makes the codes of the activations
    becomes one region. Equal products change together.

    args: the region of the product.
    rewrite: ``linear(codes.float() * scale, widened)`` -> sums of products of codes times both scales, in one kernel
    """

    name = "multiply_codes"
    task = "multiply codes of 8 bits"

    def concerns(self, region: Region) -> bool:
        """Whether a linear layer's activations and weight come from codes."""
        return _product(region) is not None

    def promising(self, program: Program, action: Action, device: Device) -> bool:
        """Wherever it is legal: half the bytes, and twice the products in the same time."""
        return True

    def reading(self, region: Region) -> set[str]:
        """The nodes of `region`, and those that widen both operands.

        Raises:
            IllegalAction: an operand does not come from codes, or they are multiplied already.
        """
        product = _product(region)
        if product is None:
            raise IllegalAction(f"{region.label()} multiplies no activations and weights that codes of 8 bits give")
        nodes = set(region.nodes)
        for value in product.operands()[:2]:
            found = codes_of(region.graph, value)
            assert found is not None
            nodes |= found[1]
        if nodes == set(region.nodes):
            raise IllegalAction(f"{region.label()} multiplies codes already")
        return nodes

    def _partition(self, program: Program, region: Region) -> tuple[Region, ...]:
        """As for every one that takes over; what makes the codes of one product's activations becomes one region."""
        made = super()._partition(program, region)
        graph, sets = program.graph, [set(r.nodes) for r in made]
        for changed in (r for r in program.regions if r.signature == region.signature):
            product = _product(changed)
            assert product is not None
            found = codes_of(graph, product.operands()[0])
            assert found is not None
            codes, widening = found
            scales = [v for n in widening if graph.nodes[n].packet == "aten.mul" for v in graph.nodes[n].operands()[1:]]
            nodes = quantizing(graph, codes, scales[0]) if scales else set()
            parts = [s for s in sets if s <= nodes]
            if len(parts) > 1:
                sets = [*(s for s in sets if s not in parts), set().union(*parts)]
        return repartition(graph, sets)


def _product(region: Region) -> Node | None:
    """The linear layer of `region` whose two operands come from codes of one kind."""
    for node in region.ops:
        if node.packet == "aten.linear":
            found = [codes_of(region.graph, v) for v in node.operands()[:2]]
            dtypes = {region.graph.meta(f[0]).dtype for f in found if f is not None}
            if None not in found and len(dtypes) == 1:
                return node
    return None


__all__ = ["MultiplyCodes"]
