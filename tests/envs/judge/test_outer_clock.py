"""The judge's clock on a GPU; what it does without one is in `test_judge.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.judge_clock import NOT_TIMED
from qimeng.envs.workers.forkserver import Process
from qimeng.envs.workers.stopwatch import Effort
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from tests.envs.busy_machine import settled

pytestmark = pytest.mark.gpu
SIZES = {"microseconds": (256, 256), "milliseconds": (8192, 8192)}


class Waits(torch.nn.Module):
    """Eager waits for the device; the operator that a capture sees does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and x.is_cuda:
            torch.cuda.synchronize()
        return x * 2


@pytest.fixture(scope="module", params=SIZES)
def evaluator(request: pytest.FixtureRequest) -> Iterator[GpuEvaluator]:
    rows, columns = SIZES[request.param]
    module = torch.nn.Sequential(torch.nn.Linear(columns, columns), torch.nn.ReLU())
    spec = KernelSpec.from_module(module, (torch.randn(rows, columns),))
    made = GpuEvaluator(spec, capture_spec(spec), timeout_s=30.0)
    yield made
    made.close()


@contextmanager
def loaded(evaluator: GpuEvaluator, body: str) -> Iterator[tuple[Process, float, float]]:
    """A worker with a program whose last region is `body`, its time as it says, and eager's."""
    assert evaluator.graph is not None
    program = Program.start(evaluator.graph)
    text = f"import torch\ndef entry(x):\n    {body}\n"
    program = program.with_implementation(program.regions[-1].id, Implementation("torch", text, "entry"))
    worker = evaluator.workers.start(evaluator.folder.as_posix())
    worker.await_ready()
    try:
        worker.call("load", 30, source=program.source)
        data, _ = worker.call("time", 30, seed=3, effort=Effort())
        told = sorted(data["device_ms"])[len(data["device_ms"]) // 2]
        yield worker, told, evaluator.baselines_process.time(Effort()).timing().device_ms
    finally:
        worker.kill()


def test_queued_calls_are_timed_and_false_times_refuted(evaluator):
    clock = evaluator.outer_clock
    with loaded(evaluator, "return (x.clamp(min=0),)") as (worker, told, eager):
        confirmed = settled(lambda: clock.check(worker, told, eager))
        assert confirmed.ok, confirmed
        assert clock._can_queue and clock._queues, "calls were queued before their inputs were there"
        refuted = settled(lambda: clock.check(worker, told / 4, eager), (NOT_TIMED,))
        assert refuted.failure == "clock", refuted


def test_a_program_that_waits_for_its_own_results_is_timed_with_the_host(evaluator):
    clock = evaluator.outer_clock
    with loaded(evaluator, "return (x.clamp(min=0) if float(x[0, 0]) < 1e9 else x,)") as (worker, told, eager):
        verdict = clock.check(worker, told, eager)
        assert verdict.failure in (None, "not-timed", "clock"), verdict
        assert clock._can_queue and not clock._queues


def test_where_eager_alone_waits_a_program_is_queued():
    spec = KernelSpec.from_module(Waits(), (torch.randn(4096, 4096),))
    made = GpuEvaluator(spec, capture_spec(spec), timeout_s=30.0)
    try:
        with loaded(made, "return (x * 2,)") as (worker, told, eager):
            confirmed = settled(lambda: made.outer_clock.check(worker, told, eager))
            assert confirmed.ok, confirmed
            clock = made.outer_clock
            assert clock._can_queue and clock._queues and clock._eager_waits
            refuted = settled(lambda: clock.check(worker, told / 4, eager), (NOT_TIMED,))
            assert refuted.failure == "clock", refuted
    finally:
        made.close()


def test_work_that_a_told_time_leaves_out_is_seen(evaluator):
    body = "y = x.clamp(min=0); z = [x @ x.t() for _ in range(40)]; return (y,)"
    with loaded(evaluator, body) as (worker, told, eager):
        assert told > 3 * eager
        confirmed = settled(lambda: evaluator.outer_clock.check(worker, told, eager))
        assert confirmed.ok, confirmed
        refuted = settled(lambda: evaluator.outer_clock.check(worker, eager, eager), (NOT_TIMED,))
        assert refuted.failure == "clock", refuted
