"""Eager beside a candidate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from qimeng.envs.judge.baseline import _Bench, ask_times
from qimeng.envs.judge.gates import timing
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.workers.stopwatch import Effort, Reading, Samples
from qimeng.interfaces import Asked, EvaluationRequest, Timing
from qimeng.program.program import Program
from qimeng.spec import KernelSpec


def test_where_it_has_become_slower_its_shorter_time_from_before_counts(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rounds = Timing(1e-6), list[Timing]()

    def faster(eager: Timing) -> Timing:
        rounds.append(eager)
        return before

    monkeypatch.setattr(evaluator.baselines_process, "faster_before", faster)
    assert evaluator.graph is not None
    spec, program = evaluator.spec, Program.start(evaluator.graph)
    request = EvaluationRequest(program, None, Asked.FINAL, spec.digest, evaluator.device.name, spec.mode)
    found = evaluator.answer(request)
    assert found.ok and found.eager is before and len(rounds) >= timing.CLOCK_ROUNDS, found.error
    assert any("the shorter time counts" in note for note in found.notes)


def test_times_of_a_cpu_are_too_unsteady_for_it(evaluator: GpuEvaluator) -> None:
    evaluator.baselines_process._fastest = Timing(1.0)
    assert evaluator.baselines_process.faster_before(Timing(9.0)) is None


def test_what_the_device_may_have_waited_for_the_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec.from_module(torch.nn.ReLU(), (torch.randn(4, 4),))
    bench = _Bench(spec, torch.device("cpu"))
    late = Reading(2.0, 2.0, host=3.0, late=2.6)
    monkeypatch.setattr(bench.stopwatch, "once", lambda call, inputs, *rest: (late, call(*inputs)))
    asked = SimpleNamespace(call=lambda command, limit_s, **arguments: (bench.time(**arguments), []))
    found = ask_times(cast(Any, asked), lambda: 3, 1.0, Effort(min_calls=4, max_calls=4))
    assert found.usual_late_ms == 2.6 and (found + found).late_ms == (2.6,) * 8
    assert Samples((1.0,), (1.0,)).usual_late_ms == 0.0
