"""A profiled run waits behind as much work as the host needs to launch it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qimeng.envs.workers import timed_program
from qimeng.envs.workers.timed_program import HOST_SHARE, MOST_QUEUE_MS, QUEUE_MS, TimedProgram


@pytest.mark.parametrize(
    ("host_ms", "longest"),
    [(0.1, QUEUE_MS + HOST_SHARE * 0.1), (9.0, QUEUE_MS + HOST_SHARE * 9.0), (1e3, MOST_QUEUE_MS)],
)
def test_the_queue_is_as_long_as_the_host_needs(
    host_ms: float, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[float] = []

    def timed(module: Any, run: Any, entries: Any, prepare: Any) -> tuple[list[float], float]:
        prepare()
        return [1.0], host_ms

    monkeypatch.setattr(timed_program, "time_regions", timed)
    worker = TimedProgram.__new__(TimedProgram)
    vars(worker).update(device=torch.device("cuda"), module=SimpleNamespace())
    monkeypatch.setattr(worker, "_fill_queue", filled.append)
    monkeypatch.setattr(worker, "_inputs", lambda draw: ())
    monkeypatch.setattr(worker, "_prepared", lambda: ())
    assert worker.profile(1, ["region"], 3) == {"regions": [[1.0]] * 3, "prepare_ms": None}
    assert filled == [QUEUE_MS, *[pytest.approx(longest)] * 3]
