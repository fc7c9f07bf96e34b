"""The action that reads stored weights: where it is offered, what it makes of a program, and the search with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from qimeng import IllegalAction, KernelSpec
from qimeng.actions import check_action, legal_actions
from qimeng.device import DEVICES
from qimeng.envs.steps.loop import optimize
from qimeng.graph.narrowest import narrowest
from qimeng.graph.state import settled_nodes
from qimeng.interfaces import Action, Request
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.program.origin import is_printed
from qimeng.testing import ScriptedPlanner, fake_task
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, layer, reading, spec_of, start_of

BF16 = torch.bfloat16


def kinds_of(program: object) -> set[str]:
    return {a.kind for a in legal_actions(program, CONTEXT)}  # type: ignore[arg-type]


def test_nothing_is_offered_without_a_declaration() -> None:
    module, x = layer(8, 256, 64, BF16)
    program = start_of(KernelSpec.from_module(module, (x,)))
    assert not settled_nodes(program.graph) and "dequantize" not in kinds_of(program)
    with pytest.raises(IllegalAction, match="multiplies by no weight that is computed once from a stored form"):
        check_action(program, Action("dequantize", (program.regions[0].id,)), CONTEXT)


def test_what_is_declared_is_computed_once_from_the_start() -> None:
    module, x = layer(8, 256, 64, BF16)
    program = start_of(spec_of(module, x, "int8"))
    assert [r.label() for r in program.regions] == ["settled", "linear"] and len(program.called) == 1


@pytest.mark.parametrize(("text", "share"), [("int8", 1 / 2), ("int4:64", 1 / 4)])
def test_the_region_then_reads_codes_and_scales(text: str, share: float) -> None:
    module, x = layer(8, 256, 64, BF16, bias=False)
    start = start_of(spec_of(module, x, text))
    program = after(start, action_of(start, "dequantize"))
    region = reading(program)
    metas = [program.graph.meta(v) for v in region.inputs]
    (codes,) = [m for m in metas if m.dtype == "int8"]
    assert codes.bytes == share * 64 * 256 * 2 and {m.dtype for m in metas} == {"int8", "float32", "bfloat16"}
    made = program.implementation(region)
    assert made.schedule is not None and made.schedule.family == "lowprecision" and not made.prepare
    assert is_printed(region, made)
    with pytest.raises(IllegalAction, match="reads its weights as they are stored already"):
        check_action(program, Action("dequantize", (region.id,)), CONTEXT)
    assert {"tiling", "pipeline", "reordering", "unfuse"} <= kinds_of(program)


@pytest.mark.parametrize("text", ["int8", "int4", "fp8"])
def test_one_row_is_offered_as_tiles_and_as_a_reduction_of_rows(text: str) -> None:
    module, x = layer(1, 512, 256, BF16, after=nn.GELU())
    start = start_of(spec_of(module, x, text))
    patch = CONTEXT.coder.write(Request(start, action_of(start, "dequantize"), CONTEXT.device))
    found = [made.schedule.family for made in patch.alternatives if made.schedule is not None]
    assert found == ["lowprecision"] * 7 + ["tile"]
    for number in (0, 7):
        program = patch.apply(start, number)
        fused = after(program, action_of(program, "fusion"))
        assert len(fused.called) == 1 and fused.implementation(fused.called[0]).generated


def test_a_reduction_of_one_row_is_not_fused_with_its_product() -> None:
    module, x = layer(1, 512, 256, BF16, after=nn.Softmax(-1))
    start = start_of(spec_of(module, x, "int8"))
    program = after(start, action_of(start, "dequantize"))
    with pytest.raises(IllegalAction, match="a reduction of a matrix product with one row"):
        check_action(program, Action("fusion", tuple(r.id for r in program.called)), CONTEXT)


def test_the_smallest_values_are_found_nearest_to_the_weight() -> None:
    module, x = layer(8, 200, 64, BF16)
    graph = start_of(spec_of(module, x, "int4:64")).graph
    linear = next(n for n in graph.ops() if n.packet == "aten.linear")
    read, passed = narrowest(graph, linear.operands()[1])
    assert sorted(graph.nodes[v.node].packet for v in read) == ["aten.bitwise_or", "aten.mul"]
    assert sum(graph.meta(v).bytes for v in read) == 64 * (256 // 2 + 4 * 4) and linear.name not in passed


def test_a_form_that_is_no_smaller_is_refused_with_the_numbers() -> None:
    module, x = layer(8, 64, 32, torch.float16)
    program = start_of(spec_of(module, x, "int4:512"))
    action = Action("dequantize", (program.called[0].id,))
    with pytest.raises(IllegalAction, match="reads 4096 B of weights; no stored form is below"):
        check_action(program, action, CONTEXT)


def test_fp8_is_refused_where_the_gpu_does_not_convert_it() -> None:
    module, x = layer(8, 256, 64, BF16)
    program = start_of(spec_of(module, x, "fp8"))
    action = action_of(program, "dequantize")
    with pytest.raises(IllegalAction, match="reads fp8, which a100 .sm_80. does not have"):
        check_action(program, action, replace(CONTEXT, device=DEVICES["a100"]))


def test_equal_regions_change_together() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x)))

    start = start_of(spec_of(Twice().to(BF16), torch.randn(8, 128, dtype=BF16), "int8"))
    program = after(start, action_of(start, "dequantize"))
    made = [program.implementation(r) for r in program.called if "linear" in r.label()]
    assert len(made) == 2 and made[0] is made[1] and made[0].generated
    assert "dequantize" not in kinds_of(program)


def test_a_product_is_taken_apart_again() -> None:
    module, x = layer(8, 256, 64, BF16)
    start = start_of(spec_of(module, x, "int8"))
    program = after(start, action_of(start, "dequantize"))
    back = after(program, action_of(program, "unfuse"))
    assert {r.label() for r in back.called} == {"linear"} and "dequantize" in kinds_of(back)


def test_buffers_of_codes_need_no_declaration() -> None:
    class Own(nn.Module):
        """What a user's quantized layer may look like."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randint(-127, 128, (64, 256), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(64, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, (self.codes.float() * self.scale).to(x.dtype))

    program = start_of(KernelSpec.from_module(Own(), (torch.randn(8, 256, dtype=BF16),)))
    while len(program.regions) > 1:
        program = after(program, action_of(program, "fusion"))
    program = after(program, action_of(program, "lowering"))
    schedule = program.schedule(program.regions[0])
    assert schedule is not None and schedule.family == "lowprecision"


def test_the_planner_by_rules_begins_with_it_where_the_weight_is_what_is_moved() -> None:
    for rows, first in ((8, True), (4096, False)):
        module, x = layer(rows, 512, 512, BF16)
        task = fake_task(start_of(spec_of(module, x, "int8")).graph, coder=CONTEXT.coder)
        steps = optimize(task, GreedySearch(HeuristicPlanner())).steps
        assert (steps[0].action.kind == "dequantize") is first, rows


def test_a_scripted_search_takes_it_and_tunes_it() -> None:
    module, x = layer(8, 512, 256, BF16, after=nn.GELU())
    task = fake_task(start_of(spec_of(module, x, "int4")).graph, coder=CONTEXT.coder)
    result = optimize(task, GreedySearch(ScriptedPlanner(["dequantize", "fusion", "tiling wider"])))
    assert [s.action.kind for s in result.steps if s.accepted][:3] == ["dequantize", "fusion", "tiling"]
