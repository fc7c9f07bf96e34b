"""Partition, fusion and unfuse: what they refuse, what they keep, what they share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qimeng.errors import IllegalAction
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.graph.region import (
    Region,
    _in_order,
    literal,
    make_region,
    merge,
    merge_recomputing,
    partition,
    region_digraph,
    repartition,
    split,
)
from qimeng.program.program import Program
from qimeng.spec.origin import FunctionModule
from tests.properties import PROPERTY

Function = Callable[..., Any]


def graph_of(function: Function, *inputs: torch.Tensor) -> OpGraph:
    return capture(lambda: FunctionModule(function), lambda: tuple(torch.empty_like(x) for x in inputs))


def labels(regions: tuple[Region, ...]) -> list[str]:
    return [r.label() for r in regions]


def run(regions: tuple[Region, ...], graph: OpGraph, inputs: tuple[torch.Tensor, ...]) -> Any:
    return Program(graph, regions).load().Model()(*inputs)


def many(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Diamonds, views, a multi-output operator, a value used twice, a view that is returned."""
    a = x.exp()
    b = a / a.sum(-1, keepdim=True)
    t = b.t()
    values, where = t.max(-1)
    c = t.unsqueeze(0) + y
    d = (c * c).mean(0)
    e = d.relu() - values[:, None]
    return e, where, b.view(-1), d.t() @ e


X, Y = torch.randn(6, 6), torch.randn(3, 6, 6)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return graph_of(many, X, Y)


def check(regions: tuple[Region, ...], graph: OpGraph) -> None:
    """The promises of every partition."""
    given = [v for r in regions for v in r.outputs]
    assert len(given) == len(set(given)), "each value comes from one region"
    assert all(r.outputs for r in regions), "no region for nothing"
    known = {Value(n.name, p) for n in graph.nodes.values() if n.kind != "op" for p in range(len(n.metas))}
    for r in regions:
        assert set(r.inputs) <= known, "what a region reads has come before it"
        known |= set(r.outputs)
    assert {v for v in graph.results() if graph.nodes[v.node].kind == "op"} <= set(given)


def test_one_region_an_operator_and_views_follow(graph: OpGraph) -> None:
    regions = partition(graph)
    check(regions, graph)
    assert labels(regions) == ["exp", "sum", "div", "max", "add", "mul", "mean", "relu", "sub", "mm"]
    by_label = {r.label(): r for r in regions}
    assert [n.packet for n in by_label["max"].ops] == ["aten.permute", "aten.max"], "a reader computes its view itself"
    assert [n.packet for n in by_label["div"].ops] == ["aten.div", "aten.view"], "a view that is returned: its producer"
    assert len(by_label["div"].outputs) == 2 and len(by_label["max"].outputs) == 2
    assert by_label["mul"].inputs == by_label["add"].outputs, "x * x reads x once"


def test_a_view_of_an_input_is_a_region_of_its_own() -> None:
    graph = graph_of(lambda x: x.t()[1:], X)
    (region,) = partition(graph)
    assert [n.packet for n in region.ops] == ["aten.permute", "aten.slice"] and region.label() == "view"
    assert torch.equal(run((region,), graph, (X,)), X.t()[1:])


def test_region_prints_itself_as_a_function(graph: OpGraph) -> None:
    region = {r.label(): r for r in partition(graph)}["mul"]
    text = region.function("square")
    assert text == "def square(x0):\n    v0 = torch.ops.aten.mul.Tensor(x0, x0)\n    return (v0,)\n"
    space: dict[str, Any] = {"torch": torch}
    exec(text, space)
    assert torch.equal(space["square"](Y)[0], Y * Y)


def test_equal_regions_share_a_signature() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.exp(), y.exp(), y.t().exp(), y[:3].exp(), y.exp2()

    first, *others = partition(graph_of(both, torch.rand(6, 6), torch.rand(6, 6)))
    assert first.signature == others[0].signature and first.id != others[0].id
    assert len({r.signature for r in others}) == 4, "another stride, shape or operator is another signature"
    assert first.signature != partition(graph_of(both, torch.rand(6, 6).half(), torch.rand(6, 6)))[0].signature

    class Held(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.w

    held = partition(capture(Held, lambda: (torch.empty(6, 6),)))
    free = partition(graph_of(lambda x, y: x + y, torch.rand(6, 6), torch.rand(6, 6)))
    assert held[0].function() == free[0].function() and held[0].signature != free[0].signature


def test_names_do_not_depend_on_the_position(graph: OpGraph) -> None:
    regions = partition(graph)
    fused = merge(regions, [regions[0].id, regions[1].id])
    assert {r.id for r in regions[2:]} <= {r.id for r in fused}
    assert fused == merge(regions, [regions[1].id, regions[0].id])


def test_a_change_keeps_the_regions_that_it_does_not_touch(graph: OpGraph) -> None:
    """The objects themselves, with the text and signature that they have worked out."""
    regions = partition(graph)
    fused = merge(regions, [regions[0].id, regions[1].id])
    for new in (fused, merge_recomputing(regions, regions[0].id, regions[1].id), split(fused, fused[0].id)):
        assert sum(any(r is old for old in (*regions, *fused)) for r in new) >= len(regions) - 2


def test_fusion_that_makes_a_cycle_is_refused(graph: OpGraph) -> None:
    by_label = {r.label(): r.id for r in partition(graph)}
    with pytest.raises(IllegalAction, match=r"would have a cycle \(r\w+ -> r\w+\)"):
        merge(partition(graph), [by_label["exp"], by_label["div"]])
    merged = merge(partition(graph), [by_label["exp"], by_label["sum"], by_label["div"]])
    check(merged, graph)
    assert labels(merged)[0] == "exp+sum+div"


def test_fusion_refuses_what_is_no_pair(graph: OpGraph) -> None:
    regions = partition(graph)
    for ids in ([regions[0].id], [regions[0].id, "r00000000"], [regions[0].id, regions[0].id], []):
        with pytest.raises(IllegalAction, match="two or more regions of this program"):
            merge(regions, ids)


def test_unfuse_undoes_fusion(graph: OpGraph) -> None:
    regions = partition(graph)
    by_label = {r.label(): r.id for r in regions}
    for group in (
        ["add", "mul"],
        ["exp", "sum", "div"],
        ["sum", "exp"],
        ["mean", "relu", "sub", "mm"],
        ["exp", "mm"][:1] + ["sum"],
    ):
        fused = merge(regions, [by_label[g] for g in group])
        (new,) = [r for r in fused if r.label().count("+") == len(group) - 1 and "+" in r.label()]
        assert split(fused, new.id) == regions


def test_recomputing_keeps_the_producer_for_its_other_readers(graph: OpGraph) -> None:
    regions = partition(graph)
    by_label = {r.label(): r.id for r in regions}
    twice = merge_recomputing(regions, by_label["exp"], by_label["sum"])
    check(twice, graph)
    assert labels(twice)[:3] == ["exp", "exp+sum", "div"] and twice[1].inputs == twice[0].inputs
    assert split(twice, twice[1].id) == regions
    for a, b in zip(run(twice, graph, (X, Y)), many(X, Y), strict=True):
        assert torch.equal(a, b)


def test_a_producer_that_all_readers_compute_again_goes() -> None:
    graph = graph_of(lambda x: (x.exp() + 1).relu(), X)
    exp, add, _ = partition(graph)
    again = merge_recomputing(partition(graph), exp.id, add.id)
    assert labels(again) == ["exp+add", "relu"]
    check(again, graph)
    assert torch.equal(run(again, graph, (X,)), (X.exp() + 1).relu())
    dead = repartition(graph, [set(r.nodes) for r in (exp, add, *again)])
    check(dead, graph)


def test_make_region_finds_what_is_read_outside(graph: OpGraph) -> None:
    names = [n.name for n in graph.ops() if n.packet in ("aten.exp", "aten.sum")]
    region = make_region(graph, reversed(names))
    assert region.nodes == tuple(names) and len(region.outputs) == 2


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_fusions_keeps_the_promises(graph: OpGraph, seed: int) -> None:
    rng = random.Random(seed)
    regions = partition(graph)
    for _ in range(12):
        before = regions
        try:
            if rng.random() < 0.3:
                regions = split(regions, rng.choice(regions).id)
            elif rng.random() < 0.3:
                edges = list(region_digraph(regions).edges)
                regions = merge_recomputing(regions, *rng.choice(edges)) if edges else regions
            elif len(regions) > 1:
                regions = merge(regions, [r.id for r in rng.sample(regions, 2)])
        except IllegalAction:
            assert regions == before
        check(regions, graph)
    for a, b in zip(run(regions, graph, (X, Y)), many(X, Y), strict=True):
        assert torch.allclose(a, b) and a.stride() == b.stride()


def test_new_tensors_are_made_beside_the_others() -> None:
    graph = graph_of(lambda x: x + torch.arange(6), X)
    regions = partition(graph)
    assert "device=torch.get_default_device()" in regions[0].function()
    (fused,) = merge(regions, [r.id for r in regions])
    assert "device=x0.device" in fused.function()
    source = Program(graph, regions).source
    assert "        with device:\n" in source, "a region that reads nothing is told where to make its tensors"
    meta = Program(graph, regions).load().Model()(X.to("meta"))
    assert meta.device.type == "meta"


def test_literals_give_themselves_back() -> None:
    space = {"torch": torch}
    for item in (
        1,
        -2.5,
        True,
        None,
        "it's",
        float("inf"),
        float("-inf"),
        torch.float16,
        torch.channels_last,
        torch.strided,
    ):
        assert eval(literal(item), space) == item
    assert eval(literal(float("nan")), space) != eval(literal(float("nan")), space)


@PROPERTY
@given(st.permutations(range(12)), st.data())
def test_regions_stay_in_the_order_of_networkx(numbers: list[int], data: st.DataObject) -> None:
    """Of those that may come next, the first one."""
    values = [Value(f"v{n}") for n in numbers]
    nodes = {v.node: Node(v.node, "op", "aten.relu.default", metas=(Meta((2,), (1,), "float32"),)) for v in values}
    for i, v in enumerate(values):
        read = data.draw(st.lists(st.sampled_from(values[:i]), max_size=3, unique=True)) if i else []
        nodes[v.node] = replace(nodes[v.node], args=tuple(read))
    graph = OpGraph(nodes, (values[-1],))
    made = [Region(graph, (v.node,), (v,)) for v in (Value(f"v{n}") for n in range(12))]
    rank = {r.id: i for i, r in enumerate(made)}
    expected = nx.lexicographical_topological_sort(region_digraph(made), key=lambda i: rank[i])
    assert [r.id for r in _in_order(made)] == list(expected)
