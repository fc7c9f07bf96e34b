"""Cuts one region out of a graph: a graph of its own that computes the same from the region's inputs.

Deals in nodes and values. What is computed once from parameters comes along, as do the parameters themselves. Knows
nothing about programs, or about what the values are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.utils import _pytree

from qimeng.errors import IllegalAction
from qimeng.graph.deciding import deciding_values
from qimeng.graph.opgraph import Node, OpGraph, Surroundings, Value, map_values
from qimeng.graph.region import Region
from qimeng.graph.rounding import shown_halves
from qimeng.graph.state import settled_nodes
from qimeng.graph.structure import structure_of


@dataclass(frozen=True)
class Cut:
    """A region as a computation of its own.

    Attributes:
        graph: its inputs are the values that the region reads and that depend on the inputs of the whole.
        regions: the region, last, with its signature and id; before it what is computed once from parameters, if any.
        inputs: the values of the whole graph that are inputs here, in order.
    """

    graph: OpGraph
    regions: tuple[Region, ...]
    inputs: tuple[Value, ...]

    @property
    def region(self) -> Region:
        """The region itself."""
        return self.regions[-1]


def cut(region: Region) -> Cut:
    """`region` cut out of its graph.

    Raises:
        IllegalAction: it reads a Python number of the call, or no tensor that depends on the inputs.
    """
    graph = region.graph
    settled = settled_nodes(graph)
    read = [v for v in region.inputs if graph.nodes[v.node].kind in ("op", "input", "scalar") and v.node not in settled]
    if any(graph.nodes[v.node].kind == "scalar" for v in read):
        raise IllegalAction("the region reads a Python number of the call")
    if not read:
        raise IllegalAction("the region reads nothing that depends on the inputs")
    once = _sources(graph, [v.node for v in region.inputs if v.node in settled], settled)
    own = {*region.nodes, *once}
    needed = {v.node for n in own for v in graph.nodes[n].operands()} - own - {v.node for v in read}
    needed.update(v.node for v in region.inputs if v not in read)
    names = _new_names(graph, read)

    def here(v: Value) -> Value:
        return names.get(v, v) if v.node not in own else v

    nodes = {names[v].node: Node(names[v].node, "input", str(i), metas=(graph.meta(v),)) for i, v in enumerate(read)}
    for node in graph.nodes.values():
        if node.name in own:
            kwargs = tuple((k, map_values(a, here)) for k, a in node.kwargs)
            nodes[node.name] = replace(node, args=map_values(node.args, here), kwargs=kwargs)
        elif node.name in needed:
            nodes[node.name] = node
    leaves = tuple(range(len(read)))
    inside = set(region.nodes)
    made = OpGraph(
        nodes,
        region.outputs,
        in_spec=structure_of(_pytree.tree_structure((leaves, {}))),
        out_spec=structure_of(_pytree.tree_structure(tuple(range(len(region.outputs))))),
        n_inputs=len(read),
        settles=graph.settles,
        deterministic=graph.deterministic,
        around=Surroundings(
            frozenset(v for v in deciding_values(graph) if v.node in inside),
            frozenset(v for v in shown_halves(graph) if v.node in inside),
            frozenset(v for v in graph.updates if v.node in inside),
        ),
    )
    target = Region(made, region.nodes, region.outputs)
    before: tuple[Region, ...] = ()
    if once:
        order = tuple(n for n in made.nodes if n in once)
        given = tuple(v for v in target.inputs if v.node in once)
        before = (Region(made, order, given),)
    return Cut(made, (*before, target), tuple(read))


def _sources(graph: OpGraph, names: list[str], settled: frozenset[str]) -> set[str]:
    """`names` and all settled nodes that they are computed from."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name in settled and name not in found:
            found.add(name)
            names.extend(v.node for v in graph.nodes[name].operands())
    return found


def _new_names(graph: OpGraph, values: list[Value]) -> dict[Value, Value]:
    """An input for each value; one that stands for the first port of a node is called like the node."""
    found: dict[Value, Value] = {}
    for v in values:
        name = v.node if v.port == 0 else f"{v.node}_{v.port}"
        while v.port and name in graph.nodes:
            name += "_"
        found[v] = Value(name)
    return found


__all__ = ["Cut", "cut"]
