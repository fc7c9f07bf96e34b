"""The least time a computation can take on a device: bytes over bandwidth, or products over peak rate.

Deals in a captured graph's sizes and a device's datasheet. Knows nothing about how the computation is implemented.
A bound, not an estimate: caches, launches and tails are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.device import Device
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.ops import family, flops

ATTAINABLE_BANDWIDTH = 4.5 / 4.8
"""Share of the datasheet's bandwidth that reads reach on an H200 (shared/reference/platform.md: 4.5 of 4.8 TB/s)."""


@dataclass(frozen=True)
class Roofline:
    """The least work of a computation and the least time it takes.

    Attributes:
        bytes: inputs and parameters that are read, outputs and updated buffers, each once.
        flops: floating-point operations of the matrix products (a multiply-add counts two).
        memory_ms: `bytes` over the attainable bandwidth, in milliseconds.
        compute_ms: `flops` over the peak rate of the fastest number format the precision mode allows.
    """

    bytes: int
    flops: int
    memory_ms: float
    compute_ms: float

    @property
    def ms(self) -> float:
        """The larger of the two, in milliseconds."""
        return max(self.memory_ms, self.compute_ms)


def roofline(graph: OpGraph, device: Device, mode: str) -> Roofline:
    """The bound of `graph` on `device` in precision mode `mode`."""
    used = graph.users()
    read = [
        Value(node.name)
        for node in graph.nodes.values()
        if node.kind in ("input", "parameter", "buffer") and Value(node.name) in used
    ]
    moved = sum(graph.meta(v).bytes for v in (*read, *graph.results()))
    products = {node.name: flops(graph, node) for node in graph.ops() if family(node) == "gemm"}
    compute_ms = sum(
        count / _rate_tflops(device, mode, graph.meta(Value(name)).dtype) / 1e9 for name, count in products.items()
    )
    memory_ms = moved / (device.bandwidth_gbs * ATTAINABLE_BANDWIDTH) / 1e6
    return Roofline(moved, sum(products.values()), memory_ms, compute_ms)


def _rate_tflops(device: Device, mode: str, dtype: str) -> float:
    """The fastest way to a product that the mode's error budget admits.

    Half types run at their own peak. fp32 in mode ``high`` may use TF32; elsewhere it takes at least three products of
    half-precision planes, where tensor cores beat the plain fp32 units at all.
    """
    if dtype in ("float16", "bfloat16"):
        return device.half_tflops
    if mode == "high":
        return max(device.tf32_tflops, device.half_tflops / 3)
    return max(device.fp32_tflops, device.half_tflops / 3) if dtype == "float32" else device.fp32_tflops
