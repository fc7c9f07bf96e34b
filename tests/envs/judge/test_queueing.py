"""Who cannot be queued behind the judge's signal, and what becomes of the others. Processes are fakes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from qimeng.envs.judge import judge_clock
from qimeng.envs.judge.judge_clock import OuterClock


class Waiting:
    """A process that answers only once it was released."""

    def __init__(self, silent: int):
        self.channel_fd = self.status_fd = silent
        self.asked: list[str] = []

    def send(self, command: str, **options: Any) -> None:
        self.asked.append(command)

    def answer(self, limit_s: float) -> tuple[list[Any], list[int]]:
        return [], []

    def call(self, command: str, limit_s: float) -> None:
        self.asked.append(command)


@pytest.fixture
def silent() -> Iterator[int]:
    """The end of a pipe into which nobody writes."""
    ends = os.pipe()
    yield ends[0]
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    ("who", "nothing", "left"),
    [
        ("eager", False, (True, True, True)),
        ("eager", True, (False, False, False)),
        ("other", False, (True, False, False)),
    ],
)
def test_who_waits_is_released_and_others_are_queued(
    who: str, nothing: bool, left: tuple[bool, ...], silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_clock, "QUEUE_S", 0.01)
    processes = {"eager": Waiting(silent), "other": Waiting(silent)}
    told: list[str] = []
    remote = SimpleNamespace(write=lambda content: told.append("write"), signal=lambda value: told.append("signal"))
    references = SimpleNamespace(device=torch.device("cpu"), random=False)
    judge = SimpleNamespace(references=references, limit_s=1.0)
    clock = OuterClock(cast("Any", judge), cast("Any", SimpleNamespace(running=lambda: processes["eager"])))
    clock._can_queue = clock._queues = True
    batch = judge_clock._Round([], torch.empty(0), [], [])
    options = {"nothing": True} if nothing else {}
    found = clock._queued(cast("Any", processes[who]), cast("Any", remote), batch, torch.empty(0), options)
    assert found is None and told == ["write", "signal"] and processes[who].asked == ["queue", "finish"]
    assert (clock._can_queue, clock._queues, clock._eager_waits) == left
