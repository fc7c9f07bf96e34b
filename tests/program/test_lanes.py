"""Programs whose branches run at the same time: which stream each region gets, the text, and the results."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from qimeng.actions import Context, check_action
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import device_named
from qimeng.errors import IllegalAction
from qimeng.graph.capture import capture
from qimeng.interfaces import Action
from qimeng.program.lanes import MOST, lanes_of
from qimeng.program.program import Program

CONTEXT = Context(device_named("h200"), TemplateCoder())
STREAMS = Action("launch", (), "streams")


class Branches(nn.Module):
    """Two branches of two layers each, and what needs both; a counter that the call raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.calls += 1
        return self.last(self.left(x).relu() + self.right(x).tanh())


def program(make: type[nn.Module] = Branches) -> Program:
    return Program.start(capture(make, lambda: (torch.empty(4, 8),)))


def test_a_branch_continues_its_stream_and_a_join_waits_for_the_other() -> None:
    made = program()
    lanes = lanes_of(made.graph, made.regions)
    number = {r.label(): k for k, r in enumerate(made.regions)}
    assert lanes.count == 3, "the counter needs nothing"
    assert lanes.lane[number["relu"]] != lanes.lane[number["tanh"]]
    joined = number["add"] if "add" in number else max(lanes.lane) - 1
    assert [lanes.lane[n] != lanes.lane[joined] for n in lanes.after[joined]] == [True]
    for k, waited in lanes.after.items():
        mine = [n for n in lanes.lane if lanes.lane[n] == lanes.lane[k] and n < k]
        needed = {n for n, r in enumerate(made.regions) if set(r.outputs) & set(made.regions[k].inputs)}
        assert needed <= {*mine, *waited}, "all that a region needs is on its stream or waited for"


def test_there_are_few_streams() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.cumsum(x * i, i % 2) for i in range(1, 8)])

    made = program(Wide)
    assert lanes_of(made.graph, made.regions).count == MOST


def test_it_is_legal_where_there_are_branches() -> None:
    made = program()
    check_action(made, STREAMS, CONTEXT)
    after = made.with_launch("streams")
    with pytest.raises(IllegalAction, match="launched streams already"):
        check_action(after, STREAMS, CONTEXT)
    check_action(after, Action("launch", (), "one-by-one"), CONTEXT)
    with pytest.raises(IllegalAction, match="no two branches"):
        check_action(program(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())), STREAMS, CONTEXT)


def test_nothing_is_given_back_before_all_streams_have_ended() -> None:
    text = program().with_launch("streams").source
    run = text[text.index("def _qimeng_run") :]
    assert " del " not in run and run.count("lanes.run(") == len(program().called)
    assert run.index("lanes.join()") < run.index(".copy_(") and re.search(r"lanes = _Lanes\(device, 3\)", run)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_results_are_those_of_the_module(device: str) -> None:
    torch.manual_seed(0)
    module, model = Branches().to(device), program().with_launch("streams").load().Model().to(device)
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(4, 8, device=device)
            torch.testing.assert_close(model(x), module(x))
    assert int(model.state_dict()["calls"]) == 5
