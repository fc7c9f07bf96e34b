"""What a generated kernel loads: the region's inputs, or free views of them made by PyTorch beforehand.

A view at the edge of a region costs nothing when PyTorch makes it before the launch: the kernel then reads a strided
tensor. Deals in which views those are and in their text. Knows nothing about kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.coder.template.nest.ir import Source
from qimeng.graph.opgraph import Value
from qimeng.graph.ops import VIEWS
from qimeng.graph.region import Region, call_text


@dataclass(frozen=True)
class Loads:
    """How a region's inputs reach its kernels.

    Attributes:
        values: what is loaded: inputs of the region, or views of them.
        names: the variable of each in the entry function.
        prelude: lines that make the views.
        views: numbers of the sources that are views rather than inputs.
    """

    values: dict[Value, Source]
    names: dict[int, str]
    prelude: tuple[str, ...]


def find_loads(region: Region) -> Loads:
    """The loads of `region`; views that a kernel can follow by itself are left to it unless they start at an input."""
    graph = region.graph
    text: dict[Value, str] = {v: f"x{i}" for i, v in enumerate(region.inputs)}
    at_edge = set(region.inputs)
    lines: list[str] = []
    for node in region.ops:
        if node.packet in VIEWS and node.operands() and node.operands()[0] in at_edge:
            value = Value(node.name)
            at_edge.add(value)
            text[value] = f"w{len(lines)}"
            lines.append(f"{text[value]} = {call_text(graph, node, text)}")
    read = {v for n in region.ops if not (n.packet in VIEWS and Value(n.name) in at_edge) for v in n.operands()}
    read |= set(region.outputs)
    chosen = [v for v in at_edge if v in read]
    chosen.sort(key=lambda v: (v not in region.inputs, text[v]))
    values, names = {}, {}
    for number, value in enumerate(chosen):
        meta = graph.meta(value)
        scalar = graph.nodes[value.node].kind == "scalar"
        values[value] = Source(number, meta.stride, meta.shape, "float32" if scalar else meta.dtype, scalar)
        names[number] = text[value]
    needed = _needed(lines, set(names.values()))
    return Loads(values, names, tuple(line for line in lines if line.split(" = ")[0] in needed))


def _needed(lines: list[str], wanted: set[str]) -> set[str]:
    for line in reversed(lines):
        target, call = line.split(" = ", 1)
        if target in wanted:
            wanted |= {w for w in call.replace("(", " ").replace(",", " ").replace(")", " ").split() if w[0] == "w"}
    return wanted


__all__ = ["Loads", "find_loads"]
