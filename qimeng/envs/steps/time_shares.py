"""The share of GPU time of each region, which shows the actions that matter most.

Deals in milliseconds a region: measured where known, carried over where only the partition changed, else the roofline
bound. Knows nothing about steps, rewards or kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from qimeng.actions import Remainder, action_text, kinds
from qimeng.device import Device
from qimeng.envs.cost.roofline import best_tflops, operand_dtype, product_flops
from qimeng.errors import IllegalAction
from qimeng.graph.opgraph import Node, OpGraph
from qimeng.graph.ops import VIEWS, category, flops, precision_of
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Evaluation
from qimeng.program.program import Program

MAX_ACTIONS = 256
"""Most actions that a state offers."""


def bound_ms(region: Region, device: Device, mode: str = "default") -> float:
    """The roofline bound of `region` in milliseconds: the longer of moving its bytes once and doing its arithmetic.

    Products, convolutions and attention count at the best rate that `mode` allows
    (`qimeng.envs.cost.roofline.best_tflops`: fp32 as three products of half-precision planes, for one), all else at the
    fp32 rate; datasheet peaks.
    """
    return max(region.bytes_moved() / (device.bandwidth_gbs * 1e6), _least_work_ms(region, device, mode))


def ceilings(
    actions: Iterable[Action], program: Program, evaluation: Evaluation | None, device: Device, mode: str = "default"
) -> tuple[float, ...]:
    """For each of `actions`, how many times as fast the program becomes at most, its other regions left as they are.

    That is its time over the same with the action's regions, as one kernel, at their roofline bound: bytes that one of
    them hands to another are not moved. What is done to one region is done to those that are equal. 1 for an action
    without regions (Amdahl's law; Williams et al., Roofline, CACM 2009).
    """
    times = region_times(program, evaluation, device)
    total, equal = sum(times.values()), Counter(r.signature for r in program.regions)

    def ceiling(action: Action) -> float:
        remainder = _remains(program, action)
        if remainder is not None:
            nodes = set(remainder.region.nodes)
            present = sum(times[r.id] for r in program.regions if r.id in action.regions or nodes.issuperset(r.nodes))
            moved = remainder.region.bytes_moved() / (device.bandwidth_gbs * 1e6)
            return saved(present, max(moved, remainder.work * _least_work_ms(remainder.region, device, mode)))
        regions = [program.region(r) for r in action.regions]
        read = [v for r in regions for v in r.inputs]
        handed = {v for r in regions for v in r.outputs}.intersection(read)
        kept = sum(r.bytes_moved() for r in regions) - sum(
            (1 + read.count(v)) * program.graph.meta(v).bytes for v in handed
        )
        work = sum(_least_work_ms(r, device, mode) for r in regions)
        bound = max(kept / (device.bandwidth_gbs * 1e6), work)
        places = equal[regions[0].signature] if len(regions) == 1 else 1
        return saved(places * sum(times[r.id] for r in regions), places * bound)

    def saved(present: float, bound: float) -> float:
        left = total - present + min(bound, present)
        return total / left if left > 0 else 1.0

    return tuple(ceiling(action) for action in actions)


def _remains(program: Program, action: Action) -> Remainder | None:
    """What the action's kind says is left; None where that follows from the regions, or the kind fails."""
    try:
        kind = kinds().get(action.kind)
        return None if kind is None else kind.remains(program, action)
    except IllegalAction:  # a kind of another package at fault, too: a step with it says so
        return None


def _least_work_ms(region: Region, device: Device, mode: str) -> float:
    """The arithmetic of a region at the best rates; kept, since every state asks for it again."""
    known: dict[Any, float] = region.graph.memo.setdefault("least work", {})
    key = region.nodes, device, mode
    if key not in known:
        known[key] = sum(_least_work_of(region.graph, node, device, mode) for node in region.ops)
    return known[key]


def _least_work_of(graph: OpGraph, node: Node, device: Device, mode: str) -> float:
    work = product_flops(graph, node)
    if work:
        rate = best_tflops(operand_dtype(graph, node), device, precision_of([node.packet], mode))
        return work / (rate * 1e9)
    return flops(graph, node) / (device.fp32_tflops * 1e9)


def operator_bound_ms(graph: OpGraph, node: Node, device: Device) -> float:
    """The same for one operator that runs by itself on PyTorch: products of fp32 operands at that of mode default."""
    metas = [*(graph.meta(v) for v in node.operands()), *(m for m in node.metas if m is not None)]
    moved = sum(m.bytes for m in metas) / (device.bandwidth_gbs * 1e6)
    return max(moved, _work_ms(graph, node, device))


def _work_ms(graph: OpGraph, node: Node, device: Device) -> float:
    meta = next((m for m in node.metas if m is not None), None)
    dtype = meta.dtype if meta is not None and category(node) in ("gemm", "convolution", "attention") else "float32"
    if dtype == "float32" and precision_of([node.packet], "default") == "high":
        dtype = "tf32"
    return flops(graph, node) / (device.peak_tflops(dtype) * 1e9)


def region_times(program: Program, evaluation: Evaluation | None, device: Device) -> dict[str, float]:
    """Milliseconds by region id: measured where `evaluation` has them for every region, else roofline bounds."""
    known = evaluation.region_ms if evaluation is not None else {}
    settled = {r.id: 0.0 for r in program.regions if program.is_settled(r)}
    if all(r.id in known for r in program.called):
        return settled | {r.id: known[r.id] for r in program.called}
    return settled | {r.id: bound_ms(r, device) for r in program.called}


def carried(before: Program, after: Program, evaluation: Evaluation | None, device: Device) -> Evaluation | None:
    """What `evaluation` of `before` says about `after`, which computes the same on another partition.

    The time of a region is shared out over its operators by their roofline bounds and summed again. Where a generated
    kernel was dropped the whole program's time is no longer known, and `timing` is None.
    """
    if evaluation is None:
        return None
    by_node: dict[str, float] = {}
    for region in before.regions:
        ms = evaluation.region_ms.get(region.id)
        for name, share in by_operator(region, ms or 0.0, device).items():
            by_node[name] = by_node.get(name, 0.0) + share
    times = {r.id: sum(by_node.get(n, 0.0) for n in r.nodes) for r in after.regions} if by_node else {}
    if dropped_kernels(before, after):
        return replace(evaluation, timing=None, region_ms=times, generated_share=None, library_share=None)
    return replace(evaluation, region_ms=times)


def by_operator(region: Region, ms: float, device: Device) -> dict[str, float]:
    """`ms` of `region` shared out over its operators by their roofline bounds; views take nothing."""
    weights = {n.name: operator_bound_ms(region.graph, n, device) for n in region.ops if n.packet not in VIEWS}
    total = sum(weights.values())
    return {name: ms * weight / total for name, weight in weights.items()} if total else {}


def dropped_kernels(before: Program, after: Program) -> tuple[Region, ...]:
    """Regions of `before` whose generated kernel is not in `after`."""
    return tuple(
        r for r in before.regions if before.implementation(r).generated and r.signature not in after.implementations
    )


def order_actions(
    actions: Iterable[Action], program: Program, evaluation: Evaluation | None, device: Device
) -> tuple[Action, ...]:
    """`actions` by the share of GPU time they touch, most first, then by text; `stop` before all."""
    times = region_times(program, evaluation, device)

    def key(action: Action) -> tuple[bool, float, str]:
        touched = sum(times.get(r, 0.0) for r in action.regions or times)  # one without regions is about them all
        return action.kind != "stop", -touched, action_text(action, program)

    return tuple(sorted(actions, key=key))


def within_limit(ordered: Sequence[Action]) -> tuple[Action, ...]:
    """At most `MAX_ACTIONS` of `ordered`, in the same order, of each intent (kind and parameter) as many as fit.

    So a program of hundreds of regions does not offer fusions alone. An intent with few actions leaves its room to the
    others.
    """
    if len(ordered) <= MAX_ACTIONS:
        return tuple(ordered)
    seen = Counter[tuple[str, str]]()
    ranked = []
    for position, action in enumerate(ordered):
        intent = action.kind, action.param
        ranked.append((seen[intent], position))
        seen[intent] += 1
    kept = sorted(position for _, position in sorted(ranked)[:MAX_ACTIONS])
    return tuple(ordered[position] for position in kept)


__all__ = [
    "MAX_ACTIONS",
    "bound_ms",
    "by_operator",
    "carried",
    "ceilings",
    "dropped_kernels",
    "operator_bound_ms",
    "order_actions",
    "region_times",
    "within_limit",
]
