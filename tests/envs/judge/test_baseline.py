"""Eager beside a candidate."""

from __future__ import annotations

import pytest

from qimeng.envs.judge.gates import timing
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.interfaces import Asked, EvaluationRequest, Timing
from qimeng.program.program import Program


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
