"""How many rounds of timing a program gets in a search."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qimeng.envs.judge import program_times
from qimeng.envs.judge.program_times import FEWEST, FINAL_ROUNDS, FINAL_S, ProgramTimes
from qimeng.envs.workers.stopwatch import Effort, Samples
from qimeng.interfaces import Timing


def eight(ms: float) -> Samples:
    return Samples((ms,) * 8, (ms,) * 8)


def rounds(times: ProgramTimes, ms: float, monkeypatch: pytest.MonkeyPatch) -> list[Effort]:
    """The efforts of a program whose calls take `ms` each; eager takes 1 ms."""
    asked: list[Effort] = []
    monkeypatch.setattr(times, "_time", lambda worker, effort: asked.append(effort) or eight(ms))
    worker: Any = SimpleNamespace(paused=nullcontext)
    times.search(worker, worker, True)
    return asked


def made(device: str) -> ProgramTimes:
    parts: Any = SimpleNamespace(device=torch.device(device), time=lambda effort: eight(1.0))
    return ProgramTimes(parts, parts, parts, parts, lambda: 1.0)


def test_a_program_that_is_clearly_behind_eager_gets_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    times = made("cuda")
    assert [len(rounds(times, ms, monkeypatch)) for ms in (1.4, 1.6, 1.4)] == [2, 1, 2]


def test_so_does_one_that_is_clearly_behind_the_fastest_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    times = made("cuda")
    times.believe(Timing(0.5))
    times.believe(Timing(0.9))
    assert [len(rounds(times, ms, monkeypatch)) for ms in (0.7, 0.8)] == [2, 1]
    assert rounds(times, 0.7, monkeypatch)[0].behind_ms == pytest.approx(0.75)


def test_on_the_cpu_every_program_gets_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rounds(made("cpu"), 9.0, monkeypatch)
    assert len(found) == 2 and found[0].behind_ms == 0 and math.isfinite(found[0].limit_s)


@pytest.mark.parametrize(("seconds", "expected"), [(FINAL_S / 100, FINAL_ROUNDS), (FINAL_S, FEWEST)])
def test_a_final_timing_of_long_rounds_has_fewer(
    seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, now = made("cuda"), [0.0]

    def timed(worker: Any, effort: Effort) -> Samples:
        now[0] += seconds
        return eight(1.0)

    monkeypatch.setattr(times, "_time", timed)
    monkeypatch.setattr(times, "_time_compiled", lambda found: None)
    monkeypatch.setattr(program_times, "time", SimpleNamespace(monotonic=lambda: now[0]))
    worker: Any = SimpleNamespace(paused=nullcontext, part=lambda name: nullcontext())
    candidate, eager = times.final(worker, worker, True)
    assert len(candidate.device_ms) == len(eager.device_ms) == 8 * expected


def test_of_repeated_turns_the_shortest_time_of_each_baseline_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = made("cuda")
    worker: Any = SimpleNamespace(paused=nullcontext, part=lambda name: nullcontext())

    def turn(compiled_ms: float, candidate_ms: float) -> None:
        monkeypatch.setattr(times, "_time_compiled", lambda found: found.update(compiled=eight(compiled_ms)))
        monkeypatch.setattr(times, "_time", lambda worker, effort: eight(candidate_ms))
        times.final(worker, worker, True)

    turn(2.0, 1.0)
    turn(3.0, 1.5)
    found = {name: timing.device_ms for name, timing in times.turns.items()}
    assert found == {"candidate": 1.5, "eager": 1.0, "compiled": 2.0}
