"""The kind `algebra`: when it is offered, what it makes of a program, how it is judged and stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qimeng.actions import Context, check_action, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.state import Budget
from qimeng.errors import IllegalAction, ReplayError
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.rewrites import Rewrite
from qimeng.interfaces import Action, Request
from qimeng.interfaces.records import PatchRecord, program_from_json, program_to_json
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.recipe import Recipe
from qimeng.testing import FakeEvaluator, ScriptedPlanner, fake_task, sample_graph

FOLD = Action("algebra", (), "fold")
CODER, H200 = TemplateCoder(), DEVICES["h200"]
CONTEXT = Context(H200, CODER)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return capture(Net, lambda: (torch.empty(2, 3, 8, 8),))


@pytest.fixture(scope="module")
def folded(graph: OpGraph) -> Program:
    return CODER.write(Request(Program.start(graph), FOLD, H200)).apply(Program.start(graph))


def test_it_is_offered_where_a_rule_applies(graph: OpGraph, folded: Program) -> None:
    assert FOLD in legal_actions(Program.start(graph), CONTEXT)
    assert FOLD not in legal_actions(folded, CONTEXT)
    with pytest.raises(IllegalAction, match="no rule applies to the 5 regions"):
        check_action(Program.start(sample_graph()), FOLD, CONTEXT)
    with pytest.raises(IllegalAction, match="no option 'folds'"):
        check_action(Program.start(graph), Action("algebra", (), "folds"), CONTEXT)


def test_weights_are_made_once_in_a_region_that_nothing_touches(graph: OpGraph, folded: Program) -> None:
    assert [r.label() for r in folded.called] == ["convolution", "relu", "mean", "linear"]
    (settled,) = (r for r in folded.regions if folded.is_settled(r))
    assert settled.label() == "settled" and folded.start_graph is graph
    for kind in ("lowering", "unfuse", "library"):
        with pytest.raises(IllegalAction, match="computed once"):
            check_action(folded, Action(kind, (settled.id,)), CONTEXT)
    named = {r for a in legal_actions(folded, CONTEXT) for r in a.regions}
    assert settled.id not in named and named
    assert "prepared[0](self.conv.weight" in folded.source.replace("self.norm.running_var, ", "") or (
        "= prepared[0](" in folded.source
    )


def test_kernels_of_untouched_regions_stay(graph: OpGraph) -> None:
    program = Program.start(graph)
    relu = next(r for r in program.regions if r.label() == "relu")
    program = CODER.write(Request(program, Action("lowering", (relu.id,)), H200)).apply(program)
    after = CODER.write(Request(program, FOLD, H200)).apply(program)
    assert after.implementation(after.region(relu.id)) == program.implementation(relu)


def test_a_rewrite_is_judged_and_a_wrong_one_rolled_back(graph: OpGraph) -> None:
    script = ["algebra fold", "lowering"]
    judge = FakeEvaluator()
    result = optimize(fake_task(graph, judge), GreedySearch(ScriptedPlanner(script)), Budget(evaluations=9))
    assert result.steps[0].accepted and result.steps[0].evaluation is not None and len(judge.calls) >= 3
    assert result.recipe.steps[0].patch.rewrites == (Rewrite("norm", "_native_batch_norm_legit_no_training"),)
    wrong = FakeEvaluator(wrong=lambda p: "the weights are off" if p.rewrites else None)
    result = optimize(fake_task(graph, wrong), GreedySearch(ScriptedPlanner(script)), Budget(evaluations=9))
    assert not result.steps[0].accepted and result.program is not None and not result.program.rewrites


def test_a_recipe_with_a_rewrite_replays(graph: OpGraph) -> None:
    script = ["lowering", "algebra fold", "fusion"]
    result = optimize(fake_task(graph), GreedySearch(ScriptedPlanner(script)), Budget(evaluations=9))
    assert result.program is not None and result.program.rewrites
    again = Recipe.from_json(result.recipe.to_json())
    assert again == result.recipe and again.replay(graph).source == result.program.source
    other = capture(nn.ReLU, lambda: (torch.empty(8),))
    step = next(s for s in again.steps if s.patch.rewrites)
    with pytest.raises(ReplayError, match="which the graph lacks"):
        step.patch.patch(other)


def test_a_rewritten_program_is_stored_and_named_by_its_content(graph: OpGraph, folded: Program) -> None:
    assert program_from_json(program_to_json(folded), graph).digest == folded.digest != Program.start(graph).digest
    patch = CODER.write(Request(Program.start(graph), FOLD, H200))
    assert PatchRecord.from_json(PatchRecord.of(patch).to_json()) == PatchRecord.of(patch)
    assert "rewrites" not in PatchRecord().to_json()  # patches of before keep their hash
    assert patch.digest() != CODER.write(Request(Program.start(graph), Action("stop"), H200)).digest()


def test_a_rewritten_program_is_printed_again_at_another_size(folded: Program) -> None:
    relu = next(r for r in folded.called if r.label() == "relu")
    lowered = CODER.write(Request(folded, Action("lowering", (relu.id,)), H200)).apply(folded)
    smaller = CODER.reprint(lowered, capture(Net, lambda: (torch.empty(1, 3, 5, 5),)))
    assert [r.label() for r in smaller.called] == [r.label() for r in lowered.called]
    assert any(smaller.implementation(r).generated for r in smaller.called)
