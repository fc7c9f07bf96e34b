"""The least time that a call can take, whatever it does: bytes that must be read and written over the bandwidth.

Deals in a graph's inputs and outputs and a device's datasheet. A bound that only a mistake or a cheat goes below, so it
counts what must certainly be moved and nothing else. Knows nothing about measurements.
"""

from __future__ import annotations

from qimeng.device import Device
from qimeng.graph.opgraph import OpGraph, Value, itemsize
from qimeng.graph.ops import RESHAPES, family

SHARE = 0.95
"""A time below this share of the bound is refused: datasheets round."""

_PARTIAL = frozenset(
    f"aten.{name}" for name in "tril triu zeros_like ones_like full_like empty_like where masked_fill".split()
)
"""Operators that need not read all of what they are given."""


def least_ms(graph: OpGraph, device: Device) -> float:
    """Milliseconds below which no right result can be made.

    Inputs count where an operator reads all of them; parameters do not, since they may be folded or packed beforehand.
    Outputs count as far as they do not fit the L2 cache.
    """
    read = sum(_bytes(graph, v) for v in _read_whole(graph))
    written = sum(_bytes(graph, v) for v in graph.results() if graph.nodes[v.node].kind == "op")
    moved = read + max(written - device.l2_bytes, 0)
    return moved / device.bandwidth_gbs / 1e6


def _read_whole(graph: OpGraph) -> list[Value]:
    users = graph.users()
    found = []
    for node in graph.nodes.values():
        if node.kind == "input" and _is_read_whole(graph, Value(node.name), users):
            found.append(Value(node.name))
    return found


def _is_read_whole(graph: OpGraph, value: Value, users: dict[Value, list[str]]) -> bool:
    for name in users.get(value, ()):
        node = graph.nodes[name]
        if node.packet in RESHAPES:
            if _is_read_whole(graph, Value(name), users):
                return True
        elif node.packet not in _PARTIAL and family(node) in ("pointwise", "reduction", "gemm"):
            result = Value(name)
            if result in graph.results() or _is_read_whole(graph, result, users) or family(node) != "pointwise":
                return True
    return False


def _bytes(graph: OpGraph, value: Value) -> int:
    """Bytes of the memory behind a value: what an expanded view repeats counts once."""
    meta = graph.meta(value)
    count = 1
    for size, stride in zip(meta.shape, meta.stride, strict=True):
        count *= size if stride else 1
    return count * itemsize(meta.dtype)


__all__ = ["SHARE", "least_ms"]
