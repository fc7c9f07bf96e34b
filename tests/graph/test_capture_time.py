"""A capture that takes too long is ended in time, with a message that says why."""

from __future__ import annotations

import time

import pytest
import torch

from qimeng import KernelSpec
from qimeng.graph.capture import CaptureError
from qimeng.program.verify import capture_spec
from qimeng.spec import patience
from qimeng.spec.patience import within


class Loop(torch.nn.Module):
    """A recurrence as a Python loop, long enough for many seconds of capture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x[0]
        for row in x:
            state = torch.tanh(state * 0.5 + row)
        return state


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a stop that came in a callback
def test_a_loop_over_many_steps_is_ended_and_the_next_capture_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LEAST_S", 1.0)
    torch.export.export(torch.nn.ReLU(), (torch.ones(2),))  # what is imported once takes its time
    spec = KernelSpec.from_module(Loop(), (torch.zeros(6000, 2),))
    began = time.monotonic()
    with within(1.0), pytest.raises(CaptureError, match=r"did not end within 0.5 s.*a Python loop"):
        capture_spec(spec, verify=False)
    assert time.monotonic() - began < 60
    graph = capture_spec(KernelSpec.from_module(Loop(), (torch.zeros(3, 2),)), verify=False)
    assert sum(n.packet == "aten.tanh" for n in graph.ops()) == 3
