"""What batches of the judge's own clock hold: calls that no program expects, and calls like those that were timed."""

from __future__ import annotations

from typing import Any

import pytest

from qimeng.envs.judge import judge_clock
from qimeng.envs.judge.clock_rule import ROUNDS, Ruling
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.program.program import Program


def test_later_batches_are_like_the_calls_whose_time_was_told(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch, few_calls: None
) -> None:
    """A right program may be slower on other inputs; the first batch has some, so that none counts on what is timed."""
    clock, kinds, seeds = evaluator.outer_clock, list[tuple[int | None, int]](), iter(range(100, 120))
    monkeypatch.setattr(evaluator.references, "parameter_seed", lambda: 7)
    monkeypatch.setattr(evaluator.references, "timed_parameter_seed", lambda: next(seeds))
    prepared = clock._prepared

    def noted(calls: int, seed: int | None, others: int) -> Any:
        kinds.append((seed, others))
        return prepared(calls, None, others)

    monkeypatch.setattr(clock, "_prepared", noted)
    monkeypatch.setattr(judge_clock, "decide", lambda *arguments: Ruling(False, "too long"))
    assert evaluator.graph is not None
    worker = evaluator.workers.start(evaluator.folder.as_posix())
    worker.await_ready()
    try:
        worker.call("load", 60.0, source=Program.start(evaluator.graph).source)
        assert clock.check(worker, 0.2, 0.2).failure == "clock"
    finally:
        worker.kill()
    assert kinds == [(7, judge_clock.OTHERS), *((100 + number, 0) for number in range(ROUNDS - 1))]
    assert {draw.distribution for draw in prepared(64, None, 0)[0].draws} == {"given"}
    assert len({draw.distribution for draw in prepared(64, None)[0].draws}) > 1
