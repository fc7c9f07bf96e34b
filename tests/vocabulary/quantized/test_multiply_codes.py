"""The action that multiplies codes: where it is offered, what it makes of a program, and the search with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from qimeng import IllegalAction, KernelSpec
from qimeng.actions import check_action, legal_actions
from qimeng.device import DEVICES
from qimeng.envs.errors import error_budget
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.region_reference import RegionReference
from qimeng.envs.steps.loop import optimize
from qimeng.family import Unsupported
from qimeng.interfaces import Action
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.testing import fake_task
from qimeng.vocabulary.quantized.coded import coded_product
from qimeng.vocabulary.quantized.multiply_codes import MultiplyCodes
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, layer, reading, start_of

BF16 = torch.bfloat16


def start(module: nn.Module, x: torch.Tensor, text: str = "int8") -> Program:
    return start_of(KernelSpec.from_module(module, (x,), weights=text.partition(":")[0], activations=text))


def kinds_of(program: Program) -> set[str]:
    return {a.kind for a in legal_actions(program, CONTEXT)}


def making(program: Program) -> list[str]:
    """The regions that make codes."""
    return [r.label() for r in program.called if "amax" in r.label()]


def test_nothing_is_offered_without_a_declaration_of_both() -> None:
    module, x = layer(8, 256, 64, BF16)
    for declared in ({}, {"weights": "int8"}):
        program = start_of(KernelSpec.from_module(module, (x,), **declared))
        assert "multiply_codes" not in kinds_of(program)
        action = Action("multiply_codes", (program.called[-1].id,))
        with pytest.raises(IllegalAction, match="multiplies no activations and weights that codes of 8 bits give"):
            check_action(program, action, CONTEXT)


@pytest.mark.parametrize("text", ["int8", "fp8", "fp8:tensor"])
def test_the_region_then_reads_codes_on_both_sides(text: str) -> None:
    module, x = layer(8, 256, 64, BF16, bias=False)
    first = start(module, x, text)
    program = after(first, action_of(first, "multiply_codes"))
    region, kind = reading(program), "int8" if text == "int8" else "float8_e4m3fn"
    assert sorted(program.graph.meta(v).dtype for v in region.inputs) == sorted([kind, kind, "float32", "float32"])
    assert program.implementation(region).schedule.family == "quantized"
    assert len(making(program)) == 1 and len(program.called) == 2, "what makes the codes is one region"
    with pytest.raises(IllegalAction, match="multiplies codes already"):
        check_action(program, Action("multiply_codes", (region.id,)), CONTEXT)
    assert {"tiling", "pipeline", "reordering", "unfuse"} <= kinds_of(program)
    lowered = after(program, Action("lowering", (program.called[0].id,)))
    assert all(lowered.implementation(r).generated for r in lowered.called)


def test_codes_are_not_made_beside_the_product() -> None:
    module, x = layer(8, 256, 64, BF16)
    first = start(module, x)
    program = after(first, action_of(first, "multiply_codes"))
    with pytest.raises(IllegalAction, match=r"computed beside the product|reduction"):
        check_action(program, Action("fusion", tuple(r.id for r in program.called)), CONTEXT)


def test_fp8_is_refused_where_the_gpu_does_not_multiply_it() -> None:
    module, x = layer(8, 256, 64, BF16)
    program = start(module, x, "fp8")
    with pytest.raises(IllegalAction, match="reads fp8, which a100 .sm_80. does not have"):
        check_action(program, action_of(program, "multiply_codes"), replace(CONTEXT, device=DEVICES["a100"]))


def test_a_sum_that_int32_does_not_hold_is_not_covered() -> None:
    module, x = layer(2, 1 << 18, 1, BF16, bias=False)
    program = start(module, x)
    region = MultiplyCodes().target(program, action_of(program, "multiply_codes"))
    with pytest.raises(Unsupported, match="a sum of 262144 products of int8, which int32 does not hold"):
        coded_product(region)


class Shared(nn.Module):
    """Two equal products of the same activations, of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.b(x)


def test_equal_products_change_together_and_share_codes() -> None:
    first = start(Shared().to(BF16), torch.randn(2, 4, 128, dtype=BF16))
    program = after(first, action_of(first, "multiply_codes"))
    made = [program.implementation(r) for r in program.called if "linear" in r.label()]
    assert len(made) == 2 and made[0] is made[1] and made[0].generated
    assert "multiply_codes" not in kinds_of(program)


def test_the_planner_by_rules_begins_with_it() -> None:
    for rows in (8, 2048):
        module, x = layer(rows, 256, 256, BF16, after=nn.GELU())
        task = fake_task(start(module, x).graph, coder=CONTEXT.coder)
        steps = [s.action.kind for s in optimize(task, GreedySearch(HeuristicPlanner())).steps]
        first = next(kind for kind in steps if kind != "library")  # TorchInductor's code comes before the search
        assert first == "multiply_codes" and "dequantize" not in steps, rows


def test_the_judge_refuses_codes_that_are_not_declared() -> None:
    """Rows with an outlier tell: int8 then has no codes left for the others."""
    module, x = layer(16, 512, 32, BF16, bias=False)
    declared = KernelSpec.from_module(module, (x,), weights="int8", activations="int8")
    plain = declared.with_(weights="", activations="")
    for spec, right in ((plain, False), (declared, True)):
        references = References(spec, capture_spec(spec), torch.device("cpu"))
        verdicts = []
        for trial in (t for t in references.every_distribution() if t.draw.distribution in ("normal", "spots")):
            state = references.state(trial.draw)
            candidate = declared.module()
            candidate.load_state_dict(state)
            with torch.no_grad():
                y = candidate(*references.inputs(trial.draw))
            verdicts.append(error_budget.check(y, trial.expected[0])[1])
        assert len(verdicts) > 1 and (not any(verdicts)) is right


def test_each_region_is_judged_alone_in_fp8_too(tmp_path: Path) -> None:
    module, x = layer(8, 64, 32, BF16, bias=False)
    spec = KernelSpec.from_module(module, (x,), weights="fp8", activations="fp8")
    graph = capture_spec(spec)
    first = Program.start(graph)
    program = after(first, action_of(first, "multiply_codes"))
    references = References(spec, graph, torch.device("cpu"))
    for region in program.called:
        reference = RegionReference(references, program, region, str(tmp_path))
        for number, expected in enumerate(reference.expected):
            assert error_budget.check(expected.value.clone(), expected)[1] is None
            wrong = expected.value.clone()
            wrong[0] *= 1.2
            error, text = error_budget.check(wrong, expected)
            assert text is not None and reference.look_again(number, wrong, error) is None, region.label()
