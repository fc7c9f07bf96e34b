"""The part of a program file that is computed once: regions that depend on no input (`qimeng.graph.state`).

Deals in source text. One function computes all of them. The class `_Prepared` (`qimeng.program.runtime`) calls it again
when one of its parameters changes. Knows nothing about what the regions compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.region import Region
from qimeng.graph.state import settled_nodes
from qimeng.program.implementation import Implementation

NAME = "_settled"


@dataclass(frozen=True)
class Settled:
    """The function that computes what is computed once.

    Attributes:
        parts: its regions with their implementations, in order.
        inputs: the parameters and buffers that they read; where they read none, any one, which shows a move.
        outputs: the values that other regions read, or that the program returns.
        name: of the function.
    """

    parts: tuple[tuple[Region, Implementation], ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    name: str = NAME

    @classmethod
    def of(cls, graph: OpGraph, parts: Sequence[tuple[Region, Implementation]]) -> Settled | None:
        """That of a program; None where every call computes all of it."""
        mine = tuple((r, m) for r, m in parts if is_settled(graph, r))
        if not mine:
            return None
        made = {v for r, _ in mine for v in r.outputs}
        needed = {v for r, _ in parts if not is_settled(graph, r) for v in r.inputs} | set(graph.results())
        inputs = dict.fromkeys(v for r, _ in mine for v in r.inputs if v not in made)
        outputs = dict.fromkeys(v for r, _ in mine for v in r.outputs if v in needed)
        if not inputs:
            held = next(n.name for n in graph.nodes.values() if n.kind in ("parameter", "buffer"))
            inputs = {Value(held): None}
        return cls(mine, tuple(inputs), tuple(outputs))

    def text(self) -> str:
        """The function's text. The regions' functions are bound as defaults, so that nobody counts them as calls."""
        names = {v: f"x{i}" for i, v in enumerate(self.inputs)}
        bound = [f"r{i}={m.entry}" for i, (_, m) in enumerate(self.parts)]
        lines = [f"def {self.name}({', '.join([*names.values(), *bound])}):"]
        lines.append('    """What depends on no input."""')
        for i, (region, _) in enumerate(self.parts):
            given = ", ".join(names[v] for v in region.inputs)
            for v in region.outputs:
                names[v] = f"t{len(names)}"
            lines.append(f"    {', '.join(names[v] for v in region.outputs)}, = r{i}({given})")
        lines.append(f"    return ({', '.join(names[v] for v in self.outputs)},)")
        return "\n".join(lines)


def is_settled(graph: OpGraph, region: Region) -> bool:
    """Whether `region` depends on no input, in a graph that computes such regions once."""
    return graph.settles and settled_nodes(graph).issuperset(region.nodes)


def settled_section(graph: OpGraph, parts: Sequence[tuple[Region, Implementation]]) -> list[str]:
    """The function with blank lines around it; nothing for programs without one."""
    found = Settled.of(graph, parts)
    return ["\n", found.text(), "\n\n"] if found else []


__all__ = ["Settled", "is_settled", "settled_section"]
