"""The kind of action that has a product read its weight as it is stored.

Deals in what is computed once from parameters, and in which of that a region computes again. Knows nothing about how
weights are stored or about kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from qimeng.actions import Context, GraphRewrite, Kind, find_region
from qimeng.device import Device
from qimeng.errors import IllegalAction
from qimeng.graph.narrowest import narrowest
from qimeng.graph.opgraph import Value
from qimeng.graph.ops import flops, is_product
from qimeng.graph.region import Region, repartition
from qimeng.graph.state import settled_nodes
from qimeng.interfaces import Action
from qimeng.program.program import Program

SHARE = 0.75
"""Share of a weight's bytes up to which its stored form is worth reading."""


class Dequantize(Kind):
    """Read a product's weight as it is stored, in 8 or 4 bits with scales, and widen it in registers.

    Legal where a spec declares stored weights (``weights="int8"``), or a module computes its weight from buffers of
    such codes: the product's own values stay the same. Equal regions change together.

    args: the region of the product.
    rewrite: ``linear(x, widened)`` -> ``linear(x, codes.float() * scale)`` in one kernel
    """

    name = "dequantize"

    def proposals(self, program: Program, context: Context) -> Iterator[Action]:
        """One for each product whose weight is computed once, equal ones once."""
        settled, seen = settled_nodes(program.graph), set[str]()
        for region in program.called if settled else ():
            if region.signature not in seen and _weights(region):
                seen.add(region.signature)
                yield Action(self.name, (region.id,))

    def check(self, program: Program, action: Action, context: Context) -> None:
        """Legal where the stored form is smaller than the weight and the coder can implement the product on it."""
        reading = self.target(program, action)
        device = context.device
        small = any(program.graph.meta(v).dtype.startswith("float8") for v in reading.inputs)
        if small and not device.has("fp8"):
            raise IllegalAction(f"{reading.label()} reads fp8, which {device.name} ({device.target}) does not have")
        reason = context.coder.can_implement(reading)
        if reason is not None:
            raise IllegalAction(f"{reading.label()} cannot read its weight as it is stored: {reason}")

    def promising(self, program: Program, action: Action, device: Device) -> bool:
        """Where the product waits for its weight rather than for the tensor cores."""
        region = find_region(program, action)
        moved = sum(program.graph.meta(v).bytes for v in _weights(region)) / (device.bandwidth_gbs * 1e9)
        return moved > sum(flops(program.graph, n) for n in region.ops if is_product(program.graph, n)) / (
            device.half_tflops * 1e12
        )

    def target(self, program: Program, action: Action) -> Region:
        """The region that reads the stored form."""
        region = find_region(program, action)
        nodes = _reading(region)
        return next(r for r in _partition(program, region) if set(r.nodes) == nodes)

    def apply(self, program: Program, action: Action, context: Context) -> GraphRewrite:
        """The partition in which the region, and those equal to it, compute the widening for themselves."""
        region = self.target(program, action)
        note = f"{region.label()} reads its weight as it is stored"
        return GraphRewrite(_partition(program, find_region(program, action)), region, note=note)


def _weights(region: Region) -> list[Value]:
    """What products of `region` multiply by that is computed once."""
    graph = region.graph
    settled = settled_nodes(graph)
    found = dict.fromkeys(v for n in region.ops if is_product(graph, n) for v in n.operands())
    return [v for v in found if v.node in settled]


def _reading(region: Region) -> set[str]:
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


def _partition(program: Program, region: Region) -> tuple[Region, ...]:
    """The regions of `program`, those equal to `region` with what widens their weights."""
    sets = [_reading(r) if r.signature == region.signature else set(r.nodes) for r in program.regions]
    return repartition(program.graph, sets)


__all__ = ["SHARE", "Dequantize"]
