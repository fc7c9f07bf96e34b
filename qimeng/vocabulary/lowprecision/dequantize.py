"""The kind of action that has a product read its weight as it is stored.

Deals in what is computed once from parameters, and in which of that a region computes again. Knows nothing about how
weights are stored or about kernels.
"""

from __future__ import annotations

from qimeng.actions import find_region
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.graph.narrowest import narrowest
from qimeng.graph.opgraph import Value
from qimeng.graph.ops import flops, is_product
from qimeng.graph.region import Region
from qimeng.graph.state import settled_nodes
from qimeng.interfaces import Action
from qimeng.program.program import Program
from qimeng.vocabulary.lowprecision.stored import codes_of
from qimeng.vocabulary.weight_readers import WeightReader

SHARE = 0.75
"""Share of a weight's bytes up to which its stored form is worth reading."""


class Dequantize(WeightReader):
    """Read a product's weight as it is stored, in 8 or 4 bits with scales, and widen it in registers.

    Legal where a spec declares stored weights (``weights="int8"``), or a module computes its weight from buffers of
    such codes: the product's own values stay the same. Equal regions change together.

    args: the region of the product.
    rewrite: ``linear(x, widened)`` -> ``linear(x, codes.float() * scale)`` in one kernel
    """

    name = "dequantize"
    task = "read its weight as it is stored"

    def concerns(self, region: Region) -> bool:
        """Whether the weight is computed once."""
        return bool(_weights(region))

    def promising(self, program: Program, action: Action, device: Device) -> bool:
        """Where the product waits for its weight rather than for the tensor cores, and its activations are no codes."""
        region = find_region(program, action)
        graph, products = program.graph, [n for n in region.ops if is_product(program.graph, n)]
        if any(codes_of(graph, n.operands()[0]) for n in products):
            return False
        moved = sum(graph.meta(v).bytes for v in _weights(region)) / (device.bandwidth_gbs * 1e9)
        return moved > sum(flops(graph, n) for n in products) / (device.half_tflops * 1e12)

    def reading(self, region: Region) -> set[str]:
        """The nodes of `region`, and those that widen its weights.

        Raises:
            IllegalAction: no weight has a stored form, or it is no smaller, or the region reads it so already.
        """
        graph, weights = region.graph, _weights(region)
        if not weights:
            raise IllegalAction(f"{region.label()} multiplies by no weight that is computed once from a stored form")
        nodes = set(region.nodes)
        for weight in weights:
            read, widening = narrowest(graph, weight)
            size, whole = sum(graph.meta(v).bytes for v in read), graph.meta(weight).bytes
            if size > SHARE * whole:
                raise IllegalAction(f"{region.label()} reads {whole} B of weights; no stored form is below {size} B")
            nodes |= widening
        if nodes == set(region.nodes):
            raise IllegalAction(f"{region.label()} reads its weights as they are stored already")
        return nodes


def _weights(region: Region) -> list[Value]:
    """What products of `region` multiply by that is computed once."""
    graph = region.graph
    settled = settled_nodes(graph)
    found = dict.fromkeys(v for n in region.ops if is_product(graph, n) for v in n.operands())
    return [v for v in found if v.node in settled]


__all__ = ["SHARE", "Dequantize"]
