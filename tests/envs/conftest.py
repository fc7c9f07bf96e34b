"""What tests of the environment share: a small graph, and a judge whose verdicts no busy machine decides."""

import pytest

from qimeng.envs.judge.judge_clock import OuterClock
from qimeng.envs.judge.verdicts import Verdict
from qimeng.graph.opgraph import OpGraph
from qimeng.testing import sample_graph


@pytest.fixture(scope="session")
def graph() -> OpGraph:
    return sample_graph()


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge's own clock agrees with every time: where no time is tested, a busy machine must not decide."""
    monkeypatch.setattr(OuterClock, "check", lambda *unused: Verdict())
