"""What a judge asked again stands in the result, and times of cards with different names are stored apart."""

from __future__ import annotations

import pytest
import torch

from qimeng import KernelSpec
from qimeng.device import DEVICES, Card, Device
from qimeng.envs.steps import setup
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.setup import conditions_of
from qimeng.envs.steps.state import Budget
from qimeng.interfaces import EngineReport
from qimeng.planner.greedy import GreedySearch
from qimeng.testing import FakeEvaluator, ScriptedPlanner, fake_task, sample_graph


class Patient(FakeEvaluator):
    """Says that it asked again."""

    again = {"machine": 2, "measurement": 1}

    @property
    def report(self) -> EngineReport:
        return EngineReport(again=self.again, reason="it died")


@pytest.mark.parametrize("again", [{"machine": 2, "measurement": 1}, {}])
def test_a_result_says_what_was_judged_again(again: dict[str, int]) -> None:
    judge = Patient()
    judge.again = again
    result = optimize(fake_task(sample_graph(), judge), GreedySearch(ScriptedPlanner(["stop"])), Budget(evaluations=2))
    text = "judged again: 2 after a fault of a machine, 1 after a fault of a measurement; the last: it died"
    assert (text in result.notes) == bool(again) and ("judged again" in result.report()) == bool(again)


def test_cards_of_one_row_with_other_names_have_other_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec.from_function(torch.relu, (torch.ones(8),))
    row = DEVICES["h100"]
    here = Device(**{**vars(row), "name": "h100(here)"})
    digests = set()
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(setup, "current_card", lambda name=name: Card(name, "580"))
        found = conditions_of(spec, FakeEvaluator(), here)
        assert dict(found.versions)["card"] == name
        digests.add(found.digest)
        assert "card" not in dict(conditions_of(spec, FakeEvaluator(), row).versions), "an estimate is of no card"
    assert len(digests) == 2
