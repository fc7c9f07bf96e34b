"""Regions: operators that are implemented together, and the text of a region as a PyTorch function.

Deals in sets of nodes of one graph: partition, merge, split, inputs and outputs, text and signature.
Knows nothing about kernels.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx as nx

from qimeng.errors import IllegalAction
from qimeng.graph.deciding import deciding_values
from qimeng.graph.opgraph import Node, OpGraph, Value, map_values
from qimeng.graph.ops import RESHAPES, VIEWS
from qimeng.graph.rounding import shown_halves
from qimeng.graph.state import settled_nodes


@dataclass(frozen=True)
class Region:
    """Nodes of `graph` implemented together.

    Attributes:
        graph: the graph the nodes belong to.
        nodes: names in topological order. A cheap node (a view, a recomputed producer) may be in several regions.
        outputs: values that are read outside the region.
    """

    graph: OpGraph = field(repr=False, compare=False, hash=False)
    nodes: tuple[str, ...]
    outputs: tuple[Value, ...]

    def __repr__(self) -> str:
        return f"<Region {self.id}: {self.label()}>"

    @cached_property
    def id(self) -> str:
        """Name made from the nodes, so that it does not depend on the region's position."""
        return "r" + hashlib.blake2b(" ".join(self.nodes).encode(), digest_size=4).hexdigest()

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """Values that the region reads from outside, in order of first use."""
        inside: set[str] = set(self.nodes)
        seen: dict[Value, None] = {}
        for name in self.nodes:
            for value in self.graph.nodes[name].operands():
                if value.node not in inside and self.graph.nodes[value.node].kind != "constant":
                    seen[value] = None
        return tuple(seen)

    @cached_property
    def ops(self) -> tuple[Node, ...]:
        """The operator nodes."""
        return tuple(self.graph.nodes[n] for n in self.nodes)

    def function(self, name: str = "region") -> str:
        """The region as the text of a PyTorch function of its inputs that returns a tuple of its outputs.

        Before it stand the pieces of PyTorch code that it calls (`qimeng.graph.parts`).
        """
        return f"{self._parts}def {name}{self._after_name}"

    @cached_property
    def _parts(self) -> str:
        texts = {n.literal.replace("def part(", f"def {_part_name(n)}(", 1): None for n in self.ops if n.literal}
        return "".join(f"{text}\n\n" for text in texts)

    @cached_property
    def _after_name(self) -> str:
        names: dict[Value, str] = {v: f"x{i}" for i, v in enumerate(self.inputs)}
        lines = [f"({', '.join(names.values())}):"]
        count = 0
        for node in self.ops:
            if node.literal is not None:
                device = _anchor(self.graph, names)
                call = f"{_part_name(node)}({', '.join(_argument(self.graph, v, names, device) for v in node.args)})"
            else:
                call = call_text(self.graph, node, names)
            if len(node.metas) == 1 and node.literal is None:
                names[Value(node.name)] = f"v{count}"
                lines.append(f"    v{count} = {call}")
                count += 1
            else:
                for port in range(len(node.metas)):
                    names[Value(node.name, port)] = f"v{count}[{port}]"
                lines.append(f"    v{count} = {call}")
                count += 1
        lines.append(f"    return ({', '.join(names[v] for v in self.outputs)},)")
        return "\n".join(lines) + "\n"

    @cached_property
    def signature(self) -> str:
        """Hash of what the region computes: text, shapes, strides, dtypes, which values are parameters, decide or show.

        So is whether its results must have the same bits in every call.

        Regions with equal signatures share one implementation.
        """
        parts = [self.function()]
        for value in self.inputs:
            node = self.graph.nodes[value.node]
            held = node.kind if node.kind in ("parameter", "buffer", "scalar") else "tensor"
            parts.append(f"{held} {self.graph.meta(value)}")
        parts += [str(self.graph.meta(v)) for v in self.outputs]
        deciding = deciding_values(self.graph)
        parts += [f"{number} decides" for number, v in enumerate(self.outputs) if v in deciding]
        shown = {v.node for v in shown_halves(self.graph)}
        parts += [f"{number} shows" for number, name in enumerate(self.nodes) if name in shown]
        parts += ["deterministic"] if self.graph.deterministic else []
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()

    def bytes_moved(self) -> int:
        """Bytes of all inputs and outputs, each once: the least the region must move (a lower bound)."""
        return self._bytes_moved

    @cached_property
    def _bytes_moved(self) -> int:
        return sum(self.graph.meta(v).bytes for v in (*self.inputs, *self.outputs))

    def label(self) -> str:
        """Short text such as ``"addmm+relu+mul"`` (views left out); ``"settled"`` for what is computed once."""
        return self._label

    @cached_property
    def _label(self) -> str:
        if settled_nodes(self.graph).issuperset(self.nodes):
            return "settled"
        names = [n.packet.removeprefix("aten.") for n in self.ops if n.packet not in VIEWS]
        return "+".join(names) or "view"


class RegionKey:
    """A region as a key of caches: two are equal where they compute the same."""

    def __init__(self, region: Region):
        self.region = region

    def __hash__(self) -> int:
        return hash(self.region.signature)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RegionKey) and other.region.signature == self.region.signature


def region_of(graph: OpGraph, nodes: tuple[str, ...], outputs: tuple[Value, ...]) -> Region:
    """The region of `nodes` and `outputs`; asked again, the same object, with all that it has worked out."""
    known: dict[Any, Region] = graph.memo.setdefault("regions", {})
    key = nodes, outputs
    if key not in known:
        known[key] = Region(graph, nodes, outputs)
    return known[key]


def make_region(graph: OpGraph, names: Iterable[str]) -> Region:
    """The region of `names` with the outputs that the rest of the graph reads from it."""
    chosen = set(names)
    order = tuple(sorted(chosen, key=graph.position.__getitem__))
    results = set(graph.results())
    users = graph.users()
    outputs = [
        Value(name, port)
        for name in order
        for port in range(len(graph.nodes[name].metas))
        if Value(name, port) in results or any(u not in chosen for u in users.get(Value(name, port), ()))
    ]
    return region_of(graph, order, tuple(outputs))


def partition(graph: OpGraph) -> tuple[Region, ...]:
    """One region an operator, in topological order.

    A view is computed by each operator that reads it (it is free), or by its producer where it is a result; a view of
    only some elements, which no kernel can yield, is then a region of its own.
    """
    results = {v.node for v in graph.results()}
    members: dict[str, set[str]] = {n.name: {n.name} for n in graph.ops() if n.packet not in VIEWS}
    for node in graph.ops():
        if node.packet in VIEWS and node.name in results:
            chain = _view_chain(graph, node.name)
            root = graph.nodes[chain[-1]].operands()[0].node
            whole = all(graph.nodes[n].packet in RESHAPES for n in chain)
            home = root if root in members and whole else node.name
            members.setdefault(home, {node.name}).update(chain)
    for name in list(members):
        for operand in _operands_through(graph, members[name]):
            if graph.nodes[operand].kind == "op" and graph.nodes[operand].packet in VIEWS:
                members[name].update(_view_chain(graph, operand))
    return repartition(graph, list(members.values()))


def merge(regions: tuple[Region, ...], ids: Iterable[str]) -> tuple[Region, ...]:
    """The partition with the regions of `ids` made one.

    Raises:
        IllegalAction: an id is unknown, or the merged partition would have a cycle.
    """
    wanted = set(ids)
    chosen = [r for r in regions if r.id in wanted]
    if len(chosen) < len(wanted) or len(chosen) < 2:
        raise IllegalAction(f"fusion needs two or more regions of this program, got {sorted(wanted)}")
    graph = chosen[0].graph
    sets = [set(r.nodes) for r in regions if r.id not in wanted]
    return repartition(graph, [*sets, set().union(*(r.nodes for r in chosen))])


def merge_recomputing(regions: tuple[Region, ...], producer: str, consumer: str) -> tuple[Region, ...]:
    """The partition where `consumer` computes `producer` again for itself, which stays for its other readers.

    Raises:
        IllegalAction: the partition would have a cycle.
    """
    by_id = {r.id: r for r in regions}
    both = set(by_id[producer].nodes) | set(by_id[consumer].nodes)
    return repartition(by_id[producer].graph, [set(r.nodes) for r in regions if r.id != consumer] + [both])


def split(regions: tuple[Region, ...], region_id: str) -> tuple[Region, ...]:
    """The partition with one region taken apart into one region an operator."""
    target = next(r for r in regions if r.id == region_id)
    inside = set(target.nodes)
    singles = [set(r.nodes) for r in partition(target.graph) if set(r.nodes) <= inside]
    return repartition(target.graph, [set(r.nodes) for r in regions if r.id != region_id] + singles)


def region_digraph(regions: Iterable[Region]) -> nx.DiGraph:
    """The regions as a graph: an edge where one reads what another yields."""
    g = nx.DiGraph()
    owner: dict[Value, str] = {}
    for r in regions:
        g.add_node(r.id, region=r)
        for v in r.outputs:
            owner.setdefault(v, r.id)
    for r in regions:
        for v in r.inputs:
            if v in owner and owner[v] != r.id:
                g.add_edge(owner[v], r.id)
    return g


class Cycle(IllegalAction):
    """Regions that need each other's results.

    Attributes:
        regions: some of them.
    """

    def __init__(self, regions: list[Region], cycle: list[str]):
        super().__init__(f"these regions cannot be one: the program would have a cycle ({' -> '.join(cycle)})")
        self.regions = tuple(regions)


def repartition(graph: OpGraph, sets: list[set[str]]) -> tuple[Region, ...]:
    """The regions of `sets` of nodes in topological order, each value yielded by one of them.

    A view or recomputed node is in several regions. Only the first one provides it to others. A region that is no
    longer read, because all its readers recompute it, is dropped.

    Args:
        graph: what is partitioned.
        sets: names of the nodes of each region.

    Raises:
        Cycle: some regions would need each other's results.
    """
    position = graph.position
    sets = sorted({frozenset(s): s for s in sets}.values(), key=lambda s: max(position[n] for n in s))
    results = set(graph.results())
    while True:
        needed = {v for s in sets for n in s for v in graph.nodes[n].operands() if v.node not in s}
        made: list[Region] = []
        given: set[Value] = set()
        for s in sets:
            order = tuple(sorted(s, key=position.__getitem__))
            outputs = tuple(
                v
                for n in order
                for v in (Value(n, p) for p in range(len(graph.nodes[n].metas)))
                if v not in given and (v in results or v in needed)
            )
            given.update(outputs)
            made.append(region_of(graph, order, outputs))
        if all(r.outputs for r in made):
            break
        sets = [set(r.nodes) for r in made if r.outputs]
    ordered = _in_order(made)
    if len(ordered) < len(made):
        cycle = [a for a, _ in nx.find_cycle(region_digraph(made))]
        raise Cycle([r for r in made if r.id in cycle], cycle)
    return tuple(ordered)


def _in_order(regions: list[Region]) -> list[Region]:
    """`regions` in topological order, the first of those that may come next; without those behind a cycle."""
    owner: dict[Value, int] = {}
    for i, region in enumerate(regions):
        for v in region.outputs:
            owner.setdefault(v, i)
    before = [{owner[v] for v in region.inputs if v in owner} - {i} for i, region in enumerate(regions)]
    after: dict[int, list[int]] = {}
    for i, sources in enumerate(before):
        for source in sources:
            after.setdefault(source, []).append(i)
    missing = [len(sources) for sources in before]
    waiting = [i for i, count in enumerate(missing) if not count]  # a heap: in ascending order
    ordered: list[Region] = []
    while waiting:
        i = heapq.heappop(waiting)
        ordered.append(regions[i])
        for reader in after.get(i, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(waiting, reader)
    return ordered


def _view_chain(graph: OpGraph, name: str) -> list[str]:
    """`name` and the views it is made from, nearest first."""
    chain = [name]
    while True:
        parent = graph.nodes[chain[-1]].operands()[0].node
        if graph.nodes[parent].kind != "op" or graph.nodes[parent].packet not in VIEWS:
            return chain
        chain.append(parent)


def _operands_through(graph: OpGraph, names: set[str]) -> list[str]:
    return [v.node for n in names for v in graph.nodes[n].operands() if v.node not in names]


BESIDE_NUMBERS = frozenset(f"aten.{name}" for name in "add sub mul div pow eq ne lt le gt ge maximum minimum".split())
"""Operators of two tensors that take a number on the CPU beside a tensor on a GPU, as an argument of their kernel."""


def call_text(graph: OpGraph, node: Node, names: dict[Value, str]) -> str:
    """The call of `node` as text, with `names` for the values known so far.

    A new tensor is made on the device of one of those, or on the default device where there is none. So is a constant,
    unless the operator takes it as a number.
    """
    anchor = _anchor(graph, names)

    def text(item: Any) -> str:
        return _argument(graph, item, names, "" if _takes_number(graph, node) else anchor)

    args = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs if k != "device"]
    if "device" in dict(node.kwargs) and not node.operands():
        args.append(f"device={anchor or 'torch.get_default_device()'}")
    return f"torch.ops.{node.target}({', '.join(args)})"


def _anchor(graph: OpGraph, names: dict[Value, str]) -> str:
    """The device of a tensor among `names` as text; empty where there is none."""
    beside = (name for v, name in names.items() if graph.nodes[v.node].kind not in ("scalar", "constant"))
    name = next(beside, "")
    return name and f"{name}.device"


def _takes_number(graph: OpGraph, node: Node) -> bool:
    tensors = [v for v in node.operands() if graph.nodes[v.node].kind not in ("scalar", "constant")]
    return node.packet in BESIDE_NUMBERS and bool(tensors)


def _part_name(node: Node) -> str:
    return f"part_{node.target.rsplit('.', 1)[1]}"


def _argument(graph: OpGraph, item: Any, names: dict[Value, str], device: str) -> str:
    """`item` as text, a constant on `device`, or where that is empty, on the default device."""
    if isinstance(item, Value):
        source = graph.nodes[item.node]
        if source.kind == "constant" and source.metas[0] is not None:
            place = f", device={device}" if device else ""
            return f"torch.scalar_tensor({literal(source.literal)}, dtype=torch.{source.metas[0].dtype}{place})"
        return names[item]
    if isinstance(item, (tuple, list)):
        return f"[{', '.join(_argument(graph, i, names, device) for i in item)}]"
    return literal(item)


def literal(item: Any) -> str:
    """A plain value as Python text that gives it back.

    >>> literal(float("-inf")), literal("a"), literal(2)
    ('float("-inf")', "'a'", '2')
    """
    import torch

    if isinstance(item, float) and item != item:
        return 'float("nan")'
    if isinstance(item, float) and item in (float("inf"), float("-inf")):
        return f'float("{item}")'
    if isinstance(item, torch.memory_format):
        return str(item)
    if isinstance(item, torch.layout):
        return str(item)
    return str(item) if isinstance(item, torch.dtype) else repr(item)


__all__ = [
    "Cycle",
    "Region",
    "RegionKey",
    "call_text",
    "literal",
    "make_region",
    "map_values",
    "merge",
    "merge_recomputing",
    "partition",
    "region_digraph",
    "region_of",
    "repartition",
    "split",
]
