"""An analytic model of how long PyTorch takes: each operator a kernel that moves its bytes and does its arithmetic.

Deals in a graph's sizes and a device's datasheet; the shares of the datasheet's rates that kernels reach are named
constants, each with its measurement. Knows nothing about generated kernels (`qimeng.envs.cost.kernel_time` does).
Everything it says is an estimate, for machines without the device; it is never compared with a measured time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qimeng.device import Device
from qimeng.graph.loops.loop import is_loop, loop_of
from qimeng.graph.narrowest import narrowest
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, itemsize
from qimeng.graph.ops import LAYERS, SCANS, VIEWS, category, flops, precision_of
from qimeng.graph.state import settled_nodes

COPY_SHARE = 4.3 / 4.8
"""Share of the datasheet's bandwidth that a copy reaches: 4.3 of 4.8 TB/s on an H200 (measured)."""

READ_SHARE = 4.5 / 4.8
"""Share of the datasheet's bandwidth that reads reach (the same source)."""

PRODUCT_WRITE_SHARE = 3.1 / 4.8
"""Share that a product's tiles reach when they are written: 32768 x 32768 x 64 on an H200, cuBLAS and Triton alike."""

FP32_SHARE = 51 / 67
"""Share of the fp32 peak that cuBLAS reaches on 4096 x 4096 x 4096."""

TF32_SHARE = 430 / 495
"""The same for TF32 products (432 TFLOP/s at best)."""

HALF_SHARE = 790 / 989
"""The same for bf16 and fp16 products."""

CONVOLUTION_SHARE = 0.2
"""What cuDNN's convolutions reach of the rate of a product of the same size: the median over the stored baselines."""

L2_SPEEDUP = 2.5
"""How much faster the L2 cache gives data than the memory does (about 11 TB/s on an H200)."""

L2_USABLE = 0.5
"""Share of the L2 cache that a producer's output may fill to be still there when the next kernel reads it."""

LAUNCH_MS = 0.003
"""What a kernel in a stream of kernels takes beside its work."""

LAYER_STEP_MS = 0.014
"""What a step of one direction of a recurrent layer takes on PyTorch, whatever its sizes are.

Six layers of 512 steps take 41 ms (LSTM) and 57 ms (GRU), with batches of 10 and states of 256 on an H200.
"""

_READS = {
    "aten._softmax": 3,
    "aten._log_softmax": 3,
    "aten.logsumexp": 4,
    "aten.native_layer_norm": 2,
    "aten.native_group_norm": 2,
    "aten._native_batch_norm_legit": 2,
    "aten._native_batch_norm_legit_functional": 2,
    "aten.native_batch_norm": 2,
    "aten.var_mean": 1,
}
"""How often PyTorch's kernels read their input where that is more than once (a maximum, a sum, then the result)."""

_WRITES = {"aten.logsumexp": 2}
"""Copies of the input that an operator made of several kernels writes on the way."""

_SHARES = {
    "aten.max": 0.73,
    "aten.min": 0.73,
    "aten.argmax": 0.73,
    "aten.argmin": 0.73,
    **dict.fromkeys(SCANS, 0.45),
    "aten.native_group_norm": 0.6,
    "aten._native_batch_norm_legit": 0.6,
    "aten._native_batch_norm_legit_functional": 0.6,
    "aten.native_batch_norm": 0.6,
}
"""Share of a copy's bandwidth that PyTorch's kernel reaches where it is well below 1.

Measured on an H200; of the scans cumsum and cumprod along rows of 32768 elements, 4.48 ms for 8.6 GB."""

_BLOCK_SHARES = {
    "aten._softmax": 1 / 170,
    "aten._log_softmax": 1 / 170,
    "aten.native_layer_norm": 1 / 700,
    "aten.native_group_norm": 1 / 700,
    "aten._native_batch_norm_legit": 1 / 170,
    "aten._native_batch_norm_legit_functional": 1 / 170,
    "aten.native_batch_norm": 1 / 170,
}
"""Share of the bandwidth that one block reaches in kernels that give each row (channel) to one block, so that few rows
leave a device idle (same source: 16 rows of 16 MiB through layer norm, 64 channels of 64 MiB through batch norm)."""

_ONE_PASS_ROW = 1024
"""Longest row that PyTorch's softmax keeps in registers (`softmax_warp_forward`)."""


def eager_ms(graph: OpGraph, device: Device, mode: str = "default") -> float:
    """Estimated milliseconds of the whole graph on PyTorch, without what is computed once.

    Args:
        graph: the computation.
        device: where it runs.
        mode: precision mode.
    """
    settled = settled_nodes(graph)
    return sum(node_ms(graph, node, device, mode) for node in graph.ops() if node.name not in settled)


def node_ms(graph: OpGraph, node: Node, device: Device, mode: str = "default") -> float:
    """Estimated milliseconds of one operator on PyTorch; 0 for views."""
    if node.packet in VIEWS:
        return 0.0
    bandwidth = device.bandwidth_gbs * 1e6  # bytes a millisecond
    operands = tuple(dict.fromkeys(node.operands()))
    read = sum(_read_ms(graph, v, device) for v in operands)
    written = sum(m.bytes for m in node.metas if m is not None) / bandwidth
    work = product_flops(graph, node)
    if work:
        rate = product_tflops(graph, node, device, mode) * 1e9
        return LAUNCH_MS + read + written / PRODUCT_WRITE_SHARE + work / rate
    memory = read + written / COPY_SHARE
    if node.packet in _READS and operands:
        size = graph.meta(operands[0]).bytes / (bandwidth * COPY_SHARE)
        again = (_passes(graph, node) - 1) * size
        memory += again / (L2_SPEEDUP if _stays_in_cache(graph, node, device) else 1.0)
        memory += _WRITES.get(node.packet, 0) * size
    share = _SHARES.get(node.packet, 1.0)
    if node.packet in _BLOCK_SHARES and operands:
        rows = graph.meta(operands[0]).numel / max(_row(graph, node), 1)
        share = min(share, max(rows, 1) * _BLOCK_SHARES[node.packet])
    return _steps_ms(graph, node) + LAUNCH_MS + memory / share


def _steps_ms(graph: OpGraph, node: Node) -> float:
    """Milliseconds of the steps of a loop or of a recurrent layer, one after the other."""
    if is_loop(node):
        loop = loop_of(node)
        return loop.count * LAUNCH_MS * sum(category(Node("", "op", line.target)) != "view" for line in loop.body)
    if node.packet not in LAYERS or len(node.args) != 9:
        return 0.0
    count, both, batch_first = node.args[4], node.args[7], node.args[8]
    steps = graph.meta(node.args[0]).shape[1 if batch_first else 0]
    return float(steps * count * (2 if both else 1) * LAYER_STEP_MS)


@dataclass(frozen=True)
class Roofline:
    """What bounds a computation on a device.

    Attributes:
        flop: floating-point operations of its products, convolutions and attentions.
        bytes: of inputs and parameters that are read, and of results.
        tflops: the best rate at which those operations may be computed in the mode, in TFLOP/s; 0 without products.
        bandwidth_gbs: of the device's memory, in GB/s.
        floor_ms: see `floor_ms`.
    """

    flop: int
    bytes: int
    tflops: float
    bandwidth_gbs: float
    floor_ms: float


def roofline(graph: OpGraph, device: Device, mode: str = "default") -> Roofline:
    """The bounds of a graph."""
    flop, work = 0, 0.0
    for node in graph.ops():
        one = product_flops(graph, node)
        flop += one
        work += one / (best_tflops(operand_dtype(graph, node), device, precision_of([node.packet], mode)) * 1e9)
    rate = flop / (work * 1e9) if work else 0.0
    return Roofline(flop, _least_bytes(graph), rate, device.bandwidth_gbs, floor_ms(graph, device, mode))


def _least_bytes(graph: OpGraph) -> int:
    settled = settled_nodes(graph)
    used = {v for node in graph.ops() if node.name not in settled for v in node.operands()}
    sources = {v for v in used if graph.nodes[v.node].kind in ("input", "parameter", "buffer")}
    stored = set[Value]().union(*(narrowest(graph, v)[0] for v in used if v.node in settled))
    return sum(graph.meta(v).bytes for v in (*(sources | stored), *graph.results()))


def floor_ms(graph: OpGraph, device: Device, mode: str = "default") -> float:
    """The least milliseconds the computation can take: its bytes once, or its products at the best rate allowed.

    Bytes are those of the inputs and parameters that are read and of the results. A bound, not an estimate.
    """
    moved, work = _least_bytes(graph), 0.0
    for node in graph.ops():
        rate = best_tflops(operand_dtype(graph, node), device, precision_of([node.packet], mode))
        work += product_flops(graph, node) / (rate * 1e9)
    return max(moved / (device.bandwidth_gbs * READ_SHARE * 1e6), work)


def best_tflops(dtype: str, device: Device, mode: str) -> float:
    """The fastest rate at which a product of `dtype` may be computed in `mode`, in TFLOP/s of the product.

    fp32 outside mode ``"high"`` takes at least three products of half-precision planes. In that mode it takes one: fp16
    has the significand of TF32, and scales give it the range.
    """
    if dtype in ("float16", "bfloat16"):
        return device.half_tflops
    if dtype != "float32":
        return device.fp32_tflops
    if mode == "high":
        return max(device.tf32_tflops, device.half_tflops)
    return max(device.fp32_tflops, device.half_tflops / 3)


def product_flops(graph: OpGraph, node: Node) -> int:
    """Floating-point operations of a product, convolution or attention; 0 for everything else."""
    kind = category(node)
    if kind in ("gemm", "convolution", "attention"):
        return flops(graph, node)
    return 0


def product_tflops(graph: OpGraph, node: Node, device: Device, mode: str) -> float:
    """The rate that PyTorch's libraries reach on a large product like `node` in `mode`, in TFLOP/s."""
    dtype = operand_dtype(graph, node)
    convolution = category(node) == "convolution"
    if dtype in ("float16", "bfloat16"):
        rate = device.half_tflops * HALF_SHARE
    elif dtype == "float32" and precision_of([node.packet], mode) == "high":
        rate = device.tf32_tflops * TF32_SHARE
    else:
        rate = device.fp32_tflops * FP32_SHARE
    return rate * CONVOLUTION_SHARE if convolution else rate


def source_bytes(meta: Meta) -> int:
    """Bytes of the different elements behind a tensor (broadcast axes count once)."""
    elements = math.prod(n for n, step in zip(meta.shape, meta.stride, strict=True) if step != 0)
    return int(elements) * itemsize(meta.dtype)


def _read_ms(graph: OpGraph, value: Value, device: Device) -> float:
    size = source_bytes(graph.meta(value))
    ms = size / (device.bandwidth_gbs * COPY_SHARE * 1e6)
    fresh = graph.nodes[_origin(graph, value)].kind == "op" and size <= L2_USABLE * device.l2_bytes
    return ms / L2_SPEEDUP if fresh else ms


def _origin(graph: OpGraph, value: Value) -> str:
    name = value.node
    while graph.nodes[name].packet in VIEWS:
        name = graph.nodes[name].operands()[0].node
    return name


def _passes(graph: OpGraph, node: Node) -> int:
    if node.packet in ("aten._softmax", "aten._log_softmax") and _row(graph, node) <= _ONE_PASS_ROW:
        return 1
    return _READS[node.packet]


def _row(graph: OpGraph, node: Node) -> int:
    """Elements that are reduced together."""
    source = graph.meta(node.operands()[0])
    if node.packet in ("aten._softmax", "aten._log_softmax"):
        axis = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], int) else -1
        return source.shape[axis] if source.shape else 1
    kept = min((m.numel for m in node.metas[1:] if m is not None and m.numel), default=1)
    return source.numel // max(kept, 1)


def _stays_in_cache(graph: OpGraph, node: Node, device: Device) -> bool:
    """Whether what is read again is still in the L2 cache: the rows of one block on every SM, or the whole input."""
    source = graph.meta(node.operands()[0])
    if source.bytes <= L2_USABLE * device.l2_bytes:
        return True
    row = _row(graph, node) * itemsize(source.dtype)
    batch_norm = "batch_norm" in node.packet or node.packet == "aten.logsumexp"
    return not batch_norm and row * 2 * device.sms <= L2_USABLE * device.l2_bytes


def operand_dtype(graph: OpGraph, node: Node) -> str:
    """Dtype of the first operand; ``"float32"`` where there is none."""
    return next((graph.meta(v).dtype for v in node.operands()), "float32")


__all__ = [
    "COPY_SHARE",
    "L2_SPEEDUP",
    "L2_USABLE",
    "LAUNCH_MS",
    "PRODUCT_WRITE_SHARE",
    "Roofline",
    "best_tflops",
    "eager_ms",
    "floor_ms",
    "node_ms",
    "operand_dtype",
    "product_flops",
    "product_tflops",
    "roofline",
    "source_bytes",
]
