"""The actions on reductions by segment: where they are offered, what they make of a program, what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qimeng import IllegalAction, KernelSpec
from qimeng.actions import check_action, legal_actions
from qimeng.envs.steps.loop import optimize
from qimeng.interfaces import Action
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.program.program import Program
from qimeng.testing import fake_task
from tests.vocabulary.irregular.samples import CONTEXT, Bags, Layer, action_of, after, graph, reducing, start_of


def program_of(module: nn.Module, *inputs: torch.Tensor) -> Program:
    return start_of(KernelSpec.from_module(module, inputs))


def layer(reduce: str = "index_add", *, buffer: bool = False, edges: int = 60) -> Program:
    pairs = graph(20, edges)
    x, weights = torch.randn(20, 8), torch.rand(edges)
    return program_of(Layer(reduce, pairs if buffer else None), x, weights, *(() if buffer else (pairs,)))


def refusal(program: Program, kind: str, param: str = "") -> str:
    with pytest.raises(IllegalAction) as error:
        check_action(program, Action(kind, (program.called[-1].id,), param), CONTEXT)
    return str(error.value)


def test_messages_are_computed_where_they_are_summed() -> None:
    start = layer()
    assert [r.label() for r in start.regions] == ["index_select", "mul", "relu", "full_like", "index_put"]
    program = after(start, action_of(start, "aggregate"))
    assert [r.label() for r in program.regions] == ["index_select+mul+relu+full_like+index_put"]
    made = program.implementation(program.regions[0])
    assert made.schedule is not None and made.schedule.family == "irregular" and not made.prepare
    assert "computes its rows itself" in refusal(program, "aggregate")
    kinds = {a.kind for a in legal_actions(program, CONTEXT)}
    assert {"irregular", "tiling", "pipeline", "unfuse"} <= kinds and "aggregate" not in kinds


def test_messages_that_others_read_stay_for_them() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
            messages = x[source] * 2
            return torch.zeros_like(x).index_add(0, target, messages), messages

    source, target = graph(20, 60)
    start = program_of(Both(), torch.randn(20, 8), source, target)
    program = after(start, action_of(start, "aggregate"))
    assert sorted(r.label() for r in program.regions) == ["index", "index+mul+full_like+index_put", "mul"]


def test_an_index_in_a_buffer_is_put_in_order_once() -> None:
    for buffer in (False, True):
        start = layer(buffer=buffer)
        program = after(start, action_of(start, "aggregate"))
        made = program.implementation(reducing(program))
        assert bool(made.prepare) == buffer
        assert made.schedule is not None and f"{made.schedule.form}" == ("sorted" if buffer else "bucket")  # type: ignore[attr-defined]
    assert "whose order is found once" in refusal(program, "irregular", "bucket")


@pytest.mark.parametrize("reduce", ["amax apart", "amin joined", "index_reduce amax"])
def test_extremes_have_no_atomic_form(reduce: str) -> None:
    start = layer(reduce)
    program = after(start, action_of(start, "aggregate"))
    assert "rows are added by atomics, and this reduction takes the m" in refusal(program, "irregular", "atomic")


def test_sums_keep_their_order_where_pytorch_is_asked_for_the_same_results() -> None:
    start, extremes = layer(), layer("amax apart")
    before = after(start, action_of(start, "aggregate"))
    torch.use_deterministic_algorithms(True)
    try:
        program = after(start, action_of(start, "aggregate"))
        assert "irregular" not in {a.kind for a in legal_actions(program, CONTEXT)}
        assert "use_deterministic_algorithms is on; take sorted" in refusal(program, "irregular", "atomic")
        assert {a.param for a in legal_actions(before, CONTEXT) if a.kind == "irregular"} == {"sorted"}
        of_extremes = after(extremes, action_of(extremes, "aggregate"))
        assert {a.param for a in legal_actions(of_extremes, CONTEXT) if a.kind == "irregular"} == {"bucket"}
    finally:
        torch.use_deterministic_algorithms(False)


def test_sums_keep_their_order_where_the_spec_asks_for_the_same_results() -> None:
    edges = graph(25, 70)
    inputs = torch.randn(25, 20), torch.rand(70), edges
    start = start_of(KernelSpec.from_module(Layer(), inputs, deterministic=True))
    program = after(start, action_of(start, "aggregate"))
    assert getattr(program.schedule(reducing(program)), "form", "") == "sorted"
    assert "the spec asks for the same bits in every call" in refusal(program, "irregular", "bucket")
    free = start_of(KernelSpec.from_module(Layer(), inputs))
    assert getattr(after(free, action_of(free, "aggregate")).schedule(reducing(free)), "form", "bucket") == "bucket"
    assert free.digest != start.digest


def test_bags_are_lowered_as_they_are_and_take_their_offsets_over() -> None:
    by_offsets = program_of(Bags("sum"), torch.randint(0, 40, (30,)), torch.tensor([0, 4, 4, 10]))
    assert "aggregate" not in {a.kind for a in legal_actions(by_offsets, CONTEXT)}
    assert "computes its rows itself, or only reads them; lower it" in refusal(by_offsets, "aggregate")
    lowered = after(by_offsets, action_of(by_offsets, "lowering"))
    assert "rows lie in the order of their segments" in refusal(lowered, "irregular", "atomic")
    even = program_of(Bags("sum"), torch.randint(0, 40, (6, 5)))
    assert [r.label() for r in even.regions] == ["arange", "_embedding_bag_forward_only"]
    program = after(even, action_of(even, "aggregate"))
    assert [r.label() for r in program.regions] == ["arange+_embedding_bag_forward_only"]
    assert "first_ptr" not in program.implementation(program.regions[0]).source


def test_a_row_that_bags_leave_out_is_refused() -> None:
    module = nn.EmbeddingBag(40, 8, mode="sum", padding_idx=3)
    program = program_of(module, torch.randint(0, 40, (30,)), torch.tensor([0, 4, 4, 10]))
    assert "an embedding bag that leaves out row 3" in refusal(program, "lowering")


def test_long_segments_are_shared_among_programs() -> None:
    short = layer()
    assert "nothing to change" in refusal(after(short, action_of(short, "aggregate")), "split", "more")
    start = layer(buffer=True, edges=3000)
    program = after(start, action_of(start, "aggregate"))
    assert "longest=1024" in str(program.schedule(reducing(program)))
    shorter = after(program, Action("split", (reducing(program).id,), "more"))
    assert "longest=512" in str(shorter.schedule(reducing(shorter)))
    whole = after(program, Action("split", (reducing(program).id,), "fewer"), 1)
    assert "longest" not in str(whole.schedule(reducing(whole)))
    atomic = after(program, Action("irregular", (reducing(program).id,), "atomic"))
    assert "programs share all rows evenly" in refusal(atomic, "split", "more")


def test_what_is_no_reduction_by_segment_is_left_alone() -> None:
    class ByColumn(nn.Module):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x).scatter_add(0, index, x * 2)

    class Products(nn.Module):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(x).scatter_reduce(0, index[:, None].expand_as(x), x * 2, "prod")

    x = torch.randn(20, 8)
    for module, inputs in (
        (ByColumn(), (x, torch.randint(0, 20, (20, 8)))),
        (Products(), (x, torch.randint(0, 20, (20,)))),
    ):
        program = program_of(module, *inputs)
        assert "aggregate" not in {a.kind for a in legal_actions(program, CONTEXT)}
        assert "reduces no rows by segment (index_add, scatter_reduce, embedding_bag" in refusal(program, "aggregate")
    few = layer(edges=8)
    assert "aggregate" not in {a.kind for a in legal_actions(few, CONTEXT)}


def test_an_index_out_of_range_is_refused_when_the_order_is_found() -> None:
    program = after(start := layer(buffer=True), action_of(start, "aggregate"))
    made = program.load()
    prepare = getattr(made, program.implementation(reducing(program)).prepare)
    (order, first) = prepare(torch.tensor([[0, 1, 2], [4, 0, 4]]))
    assert order.tolist() == [1, 0, 2] and first[:6].tolist() == [0, 1, 1, 1, 1, 3] and int(first[-1]) == 3
    with pytest.raises(ValueError, match="an index of a reduction by segment is not in -20 to 19"):
        prepare(torch.tensor([[0, 1, 2], [4, 20, 4]]))


def test_the_planner_by_rules_begins_with_it() -> None:
    start = layer()
    result = optimize(fake_task(start.graph, coder=CONTEXT.coder), GreedySearch(HeuristicPlanner()))
    assert result.steps[0].action.kind == "aggregate" and result.steps[0].accepted


def test_a_number_without_dimensions_has_no_rows() -> None:
    def largest(x: torch.Tensor, index: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.index_reduce(0, index, y, "amax"), x.scatter_reduce(0, index, y, "amin"), x.scatter_add(0, index, y)

    inputs = torch.tensor(1.0), torch.tensor(0), torch.tensor(2.0)
    for region in start_of(KernelSpec.from_function(largest, inputs)).regions:
        CONTEXT.coder.can_implement(region)
