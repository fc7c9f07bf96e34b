"""Times that are impossible, and times that need a note.

Deals in a graph and a device's datasheet. A time below that of the memory traffic can only be a mistake or a cheat, so
only bytes that must move are counted. A time below that of the arithmetic may come from algebra, so it is noted, not
refused. Knows nothing about measurements.
"""

from __future__ import annotations

from collections.abc import Mapping

from qimeng.device import Device
from qimeng.envs.cost.roofline import best_tflops, operand_dtype, product_flops
from qimeng.graph.opgraph import Node, OpGraph, Value, itemsize
from qimeng.graph.ops import RESHAPES, category, precision_of

SHARE = 0.95
"""A time below this share of the bound is refused. It is below 1 because datasheets round."""

_PARTIAL = frozenset(
    f"aten.{name}" for name in "tril triu zeros_like ones_like full_like empty_like where masked_fill".split()
)
"""Operators that need not read all of what they are given."""


_WIDENS = RESHAPES | {"aten.mul", "aten._to_copy", "aten.slice"}
"""Operators between codes and the numbers that they stand for."""


def least_ms(graph: OpGraph, device: Device) -> float:
    """A lower bound in milliseconds for any right result.

    Inputs count where an operator reads all of them; parameters do not, since they may be folded or packed beforehand.
    Outputs count as far as they do not fit the L2 cache.
    """
    read = sum(_bytes(graph, v) for v in _read_whole(graph))
    written = sum(_bytes(graph, v) for v in graph.results() if graph.nodes[v.node].kind == "op")
    moved = read + max(written - device.l2_bytes, 0)
    return moved / device.bandwidth_gbs / 1e6


def above_peak(graph: OpGraph, ms: float, device: Device, mode: str) -> str | None:
    """A sentence where `ms` is less than the products of `graph` take on the tensor cores at their peak; else None.

    Args:
        graph: the computation as it was captured.
        ms: device milliseconds of a call.
        device: the device.
        mode: precision mode: fp32 operands take at least three products of half-precision planes outside ``"high"``,
            but for convolutions in mode ``"default"``, which may use TF32 (`qimeng.graph.ops.TF32`).
    """
    work = [(product_flops(graph, node) / 1e9, _peak_tflops(graph, node, device, mode)) for node in graph.ops()]
    at_peak_ms = sum(flop / rate for flop, rate in work)
    if ms >= at_peak_ms:
        return None
    total = sum(flop for flop, _ in work)
    return (
        f"above the tensor cores' peak: the products as written are {total / ms:.4g} TFLOP/s at {ms:.4g} ms, "
        f"{device.name} reaches {total / at_peak_ms:.4g} in mode {mode}; less was computed than was written"
    )


def _peak_tflops(graph: OpGraph, node: Node, device: Device, mode: str) -> float:
    dtype = operand_dtype(graph, node)
    if category(node) == "gemm" and all(_is_of_bytes(graph, v) for v in node.operands()[:2]):
        return device.byte_tflops
    if dtype not in ("float32", "float16", "bfloat16"):
        return device.half_tflops
    return best_tflops(dtype, device, precision_of([node.packet], mode))


def _is_of_bytes(graph: OpGraph, value: Value) -> bool:
    """Whether `value` is codes of 8 bits, or what they are times scales, which may be multiplied as codes."""
    while itemsize(graph.meta(value).dtype) > 1:
        node = graph.nodes[value.node]
        if node.kind != "op" or node.packet not in _WIDENS:
            return False
        value = node.operands()[0]
    return True


def _read_whole(graph: OpGraph) -> list[Value]:
    users = graph.users()
    found = []
    for node in graph.nodes.values():
        if node.kind == "input" and _is_read_whole(graph, Value(node.name), users):
            found.append(Value(node.name))
    return found


def _is_read_whole(graph: OpGraph, value: Value, users: Mapping[Value, list[str]]) -> bool:
    for name in users.get(value, ()):
        node = graph.nodes[name]
        if node.packet in RESHAPES:
            if _is_read_whole(graph, Value(name), users):
                return True
        elif node.packet not in _PARTIAL and category(node) in ("pointwise", "reduction", "scan", "gemm"):
            result = Value(name)
            if (
                result in graph.results()
                or _is_read_whole(graph, result, users)
                or category(node) not in ("pointwise", "scan")
            ):
                return True
    return False


def _bytes(graph: OpGraph, value: Value) -> int:
    """Bytes of the memory behind a value: what an expanded view repeats counts once."""
    meta = graph.meta(value)
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        count *= size if stride else 1
    return count * itemsize(meta.dtype)


__all__ = ["SHARE", "above_peak", "least_ms"]
