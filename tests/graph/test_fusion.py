"""Which regions may become one: the quick answer is that of the partition itself, and it is quick."""

from __future__ import annotations

import time

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qimeng.actions import Context, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.errors import IllegalAction
from qimeng.graph.fusion import Fusions
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.graph.region import Region, merge, merge_recomputing, partition, split
from qimeng.interfaces import Request
from qimeng.program.program import Program
from tests.properties import PROPERTY

SQUARE = Meta((64, 64), (64, 1), "float32")


def graph_of(ops: list[tuple[str, list[Value], int]], results: list[Value]) -> OpGraph:
    """Nodes ``n0``, ``n1`` … given as (operator, operands, ports), after one input ``x``."""
    nodes = {"x": Node("x", "input", "0", metas=(SQUARE,))}
    for i, (name, operands, ports) in enumerate(ops):
        nodes[f"n{i}"] = Node(f"n{i}", "op", f"aten.{name}.default", tuple(operands), metas=(SQUARE,) * ports)
    return OpGraph(nodes, tuple(results), n_inputs=1)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    ops: list[tuple[str, list[Value], int]] = []
    values, used = [Value("x")], set()
    for i in range(draw(st.integers(3, 9))):
        name = draw(st.sampled_from(["add", "add", "add", "view", "var_mean"]))
        count = 2 if name == "add" else 1
        recent = values[-4:]
        operands = [draw(st.sampled_from(recent)) for _ in range(count)]
        ports = 2 if name == "var_mean" else 1
        ops.append((name, operands, ports))
        used |= set(operands)
        values += [Value(f"n{i}", p) for p in range(ports)]
    loose = [v for v in values[1:] if v not in used]
    results = loose + [v for v in values[1:] if v in used and draw(st.integers(0, 4)) == 0]
    return graph_of(ops, results)


def by_rebuilding(regions: tuple[Region, ...], a: Region, b: Region, recompute: bool) -> Region | str:
    """The rule without a short cut: make the partition and look for a cycle."""
    try:
        new = (merge_recomputing if recompute else lambda r, *ids: merge(r, ids))(regions, a.id, b.id)
    except IllegalAction:
        return "illegal"
    wanted = {*a.nodes, *b.nodes}
    return next((r for r in new if set(r.nodes) == wanted), "illegal")


def quickly(fusions: Fusions, a: Region, b: Region, recompute: bool) -> Region | str:
    try:
        return (fusions.merged_recomputing if recompute else fusions.merged)(a.id, b.id)
    except IllegalAction:
        return "illegal"


@settings(PROPERTY, max_examples=60)
@given(graphs(), st.data())
def test_the_answer_is_that_of_the_partition_itself(graph: OpGraph, data: st.DataObject) -> None:
    regions = partition(graph)
    for _ in range(data.draw(st.integers(0, 4))):
        fusions = Fusions(regions)
        by_id = {r.id: r for r in regions}
        for first, second in fusions.digraph.edges:
            for recompute in (False, True):
                pair = by_id[first], by_id[second]
                found = quickly(fusions, *pair, recompute)
                assert found == by_rebuilding(regions, *pair, recompute)
                assert isinstance(found, str) or found.signature
        edges = sorted(fusions.digraph.edges)
        if not edges:
            return
        pair = data.draw(st.sampled_from(edges))
        try:
            kind = data.draw(st.sampled_from(["merge", "recompute", "split"]))
            if kind == "split":
                regions = split(regions, pair[0])
            else:
                regions = merge(regions, pair) if kind == "merge" else merge_recomputing(regions, *pair)
        except IllegalAction:
            continue


@settings(PROPERTY, max_examples=50)
@given(graphs())
def test_without_shared_nodes_a_merge_is_legal_where_the_contracted_graph_is_acyclic(graph: OpGraph) -> None:
    regions = partition(graph)
    held = [n for r in regions for n in r.nodes]
    if len(held) != len(set(held)):
        return
    fusions = Fusions(regions)
    by_id = {r.id: r for r in regions}
    for a, b in fusions.digraph.edges:
        contracted = nx.contracted_nodes(fusions.digraph, a, b, self_loops=False)
        legal = nx.is_directed_acyclic_graph(contracted)
        assert (quickly(fusions, by_id[a], by_id[b], recompute=False) != "illegal") == legal


def diamonds(count: int) -> OpGraph:
    """`count` operators: exp and tanh of one value, their sum, its relu, and so on."""
    ops: list[tuple[str, list[Value], int]] = []
    top = Value("x")
    for i in range(0, count, 4):
        left, right, both = (Value(f"n{i + k}") for k in range(3))
        ops += [("exp", [top], 1), ("tanh", [top], 1), ("add", [left, right], 1), ("relu", [both], 1)]
        top = Value(f"n{i + 3}")
    return graph_of(ops, [top])


def test_a_refusal_names_the_path() -> None:
    program = Program.start(graph_of([("exp", [Value("x")], 1), ("relu", [Value("n0")], 1),
                                      ("add", [Value("n0"), Value("n1")], 1)], [Value("n2")]))  # fmt: skip
    exp, relu, add = (r.id for r in program.regions)
    with pytest.raises(IllegalAction, match=f"would have a cycle \\({exp} -> {relu} -> {add}\\)"):
        program.fusions.merged(exp, add)
    with pytest.raises(IllegalAction, match=f"{exp} does not read {relu}"):
        program.fusions.merged(relu, exp)
    assert program.fusions.merged_recomputing(exp, add).label() == "exp+add"


def test_the_actions_of_a_program_of_80_regions_take_under_a_second() -> None:
    coder, device = TemplateCoder(), device_named("h200")
    context = Context(device, coder)
    program = Program.start(diamonds(80))
    assert len(program.regions) == 80
    began = time.process_time()
    actions = legal_actions(program, context)
    assert time.process_time() - began < 1.0
    fusions = [a for a in actions if a.kind == "fusion"]
    assert len(fusions) == 3 * 20 + 2 * 19 + 2 * 19, "inside diamonds, between them, and computing relu twice"
    merged = next(a for a in fusions if not a.param)
    assert len(coder.write(Request(program, merged, device)).apply(program).regions) == 79
