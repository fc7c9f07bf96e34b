"""What the planner by rule asks about the regions of a program: products, times, distances from the roofline, tunings.

Deals in one observation at a time. Knows nothing about the order of the choices (`qimeng.planner.heuristic`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from qimeng.errors import IllegalAction
from qimeng.family import concerned, family_of
from qimeng.graph.ops import category, is_product, precision_of
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Observation
from qimeng.program.program import Program

NEAR_ROOFLINE = 0.98
"""A region whose least memory traffic, at the rates below, takes this share of its time is left alone."""

FAR_FROM_ROOFLINE = 0.85
"""Below this share a kernel is not bound by memory, but for example by special functions."""

READ_FRACTION, COPY_FRACTION = 0.94, 0.88
"""Share of the datasheet's bandwidth that reading reaches, and reading and writing (H200: 4.5 and 4.2 of 4.8 TB/s)."""


def tried_before(o: Observation) -> set[Action]:
    """The actions of the steps so far."""
    return {s.action for s in o.history}


def has_product(region: Region) -> bool:
    """Whether the region multiplies matrices."""
    return any(is_product(region.graph, n) for n in region.ops)


def _half(region: Region) -> bool:
    return any(region.graph.meta(v).dtype in ("float16", "bfloat16") for v in region.inputs)


def convolves_halves(program: Program) -> bool:
    """Whether a convolution of `program` has operands of a half type."""
    graph = program.graph
    return any(
        category(n) == "convolution" and graph.meta(n.operands()[0]).dtype in ("float16", "bfloat16")
        for n in graph.ops()
    )


def library_first(o: Observation, regions: Iterable[Region]) -> bool:
    """Whether the library's product runs on the tensor cores, so that a generated one may not be faster.

    It does for convolutions in fp32 as well, but with operands of twice the bytes and at half the rate of the fp16
    planes that a generated one multiplies.
    """
    regions = tuple(regions)
    nodes = [n for r in regions for n in r.ops if is_product(r.graph, n)]
    products = [n.packet for n in nodes if category(n) != "convolution"]
    return bool(products) and precision_of(products, o.mode) == "high" or any(_half(r) for r in regions)


def by_time(o: Observation, actions: list[Action]) -> list[Action]:
    """The actions by the time of their first region, the longest first; by the bytes that it moves where not known."""
    times = o.evaluation.region_ms if o.evaluation else {}

    def weight(a: Action) -> float:
        region = o.program.region(a.regions[0])
        return times.get(region.id, 0.0) or region.bytes_moved() * 1e-12

    return sorted(actions, key=lambda a: -weight(a))


def floor_ms(region: Region, o: Observation) -> float:
    """Milliseconds that moving the region's bytes once takes at the rate that such traffic reaches."""
    moved, written = region.bytes_moved(), sum(region.graph.meta(v).bytes for v in region.outputs)
    fraction = COPY_FRACTION if written > moved / 4 else READ_FRACTION
    return moved / (o.device.bandwidth_gbs * fraction * 1e6)


def at_roofline(region: Region, ms: float, o: Observation) -> bool:
    """Whether a region that takes `ms` milliseconds is about as fast as memory, and is no product."""
    return not has_product(region) and bool(ms) and floor_ms(region, o) / ms > NEAR_ROOFLINE


def torch_ms(region: Region, o: Observation) -> float | None:
    """What PyTorch took for a region that was lowered: its kernel's time less what the lowering cost the program.

    Equal regions are lowered together, and share the cost.
    """
    before, equal = o.eager_ms, sum(r.signature == region.signature for r in o.program.called)
    for step in o.history:
        found = step.evaluation
        if not step.accepted or found is None or found.ms is None:
            continue
        if step.action == Action("lowering", (region.id,)) and before is not None and region.id in found.region_ms:
            return found.region_ms[region.id] - (found.ms - before) / max(equal, 1)
        before = found.ms
    return None


def intents_in_order(region: Region, ms: float, o: Observation) -> tuple[tuple[str, str], ...]:
    """The family's, with fast special functions early where memory is not what binds the kernel."""
    intents = tuple(_intents(region, o))
    if intents and not has_product(region) and ms and floor_ms(region, o) / ms < FAR_FROM_ROOFLINE:
        forms = tuple(takewhile(lambda i: i[0] == "split", intents))  # how memory is walked gains more
        intents = (*forms, ("special", "fast"), *intents[len(forms) :])
    return intents


def _intents(region: Region, o: Observation) -> Sequence[tuple[str, str]]:
    """What the region's family says is worth trying; a kernel without a schedule is like others of its kind."""
    schedule = o.program.schedule(region)
    try:
        family = family_of(schedule) if schedule is not None else concerned(region)
        return () if family is None else family.intents(region, schedule, o.device, o.mode)
    except IllegalAction:  # another package's, which fails or is not installed; a step with it says so
        return ()


__all__ = [
    "COPY_FRACTION",
    "FAR_FROM_ROOFLINE",
    "NEAR_ROOFLINE",
    "READ_FRACTION",
    "at_roofline",
    "by_time",
    "convolves_halves",
    "floor_ms",
    "has_product",
    "intents_in_order",
    "library_first",
    "torch_ms",
    "tried_before",
]
