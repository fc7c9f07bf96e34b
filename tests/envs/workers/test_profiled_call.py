"""What runs while the profiler looks on: one call, and nothing that was done before."""

from __future__ import annotations

import os

import pytest
import torch

from qimeng.envs.workers.timed_program import TimedProgram
from qimeng.envs.workers.worker_setup import Draw


class Packed(torch.nn.Module):
    """Packs its weight when that has changed, counts its calls in a buffer, and notes both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.seen: list[tuple[bool, float]] = []
        self.stamp = (-1, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stamp = self.weight._version, self.mean._version
        self.seen.append((stamp != self.stamp, float(self.calls)))
        self.stamp = stamp
        self.calls += 1
        return x * self.weight - self.mean


def test_a_profiled_call_packs_nothing_and_finds_buffers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model, worker = Packed(), object.__new__(TimedProgram)
    worker.model, worker.device, worker.kept = model, torch.device("cpu"), [None]
    monkeypatch.setattr(TimedProgram, "_set_parameters", lambda self, seed: model.weight.copy_(torch.full((3,), 2.0)))
    monkeypatch.setattr(TimedProgram, "_inputs", lambda self, draw: (torch.ones(3),))
    with torch.no_grad():
        answer = worker.launches(Draw(1))
    for file in answer.files:
        os.close(file)
    assert model.seen == [(True, 0.0), (False, 0.0)]
