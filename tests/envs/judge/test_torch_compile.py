"""torch.compile beside the search: in the background, each mode in a process of its own, a slow one is cut off."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from qimeng.device_lock import DeviceLock
from qimeng.envs.errors.accuracy import Error
from qimeng.envs.judge.baseline import _Bench
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.torch_compile import TorchCompile, check_modes
from qimeng.envs.judge.torch_compile_process import compile_module, measure_alone
from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.forkserver import ForkServer
from qimeng.envs.workers.service import serve
from qimeng.envs.workers.stopwatch import Effort
from qimeng.envs.workers.worker_setup import Setup
from qimeng.interfaces import Asked
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

SETUP = Setup(b"", "default", "cpu")
PRELOAD = ("tests.envs.judge.test_torch_compile",)


def stand_in(channel: Channel, setup: Setup) -> None:
    """In place of the compiling process: two modes never end, one fails, one dies when it is timed."""
    state: dict[str, str] = {}

    def compile(mode: str, seed: int, threads: int, lock: str) -> None:
        state["mode"] = mode
        if mode == "max-autotune":
            time.sleep(60)
        if mode == "reduce-overhead":
            raise ValueError("no graph")

    def timed(seed: int, effort: Effort) -> dict[str, list[float]]:
        return {"device_ms": [float(seed)], "wall_ms": [4.0]}

    serve(channel, {"ready": lambda: None, "compile": compile, "time": timed})


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchCompile]:
    server = ForkServer(PRELOAD)
    start = server.start

    def fake_start(target, setup, environment):  # type: ignore[no-untyped-def]
        assert target == "qimeng.envs.judge.baseline:main" and "TORCHINDUCTOR_CACHE_DIR" in environment
        return start("tests.envs.judge.test_torch_compile:stand_in", setup, environment=environment)

    monkeypatch.setattr(server, "start", fake_start)
    monkeypatch.setattr("qimeng.envs.judge.torch_compile.compile_server", lambda: server)
    made = TorchCompile(SETUP, lambda: 7, 30.0, 2, "")
    yield made
    made.close()
    server.close()


def test_modes_are_made_ready_in_the_background_and_a_slow_one_is_cut_off(compiled: TorchCompile) -> None:
    began = time.monotonic()
    compiled.begin(("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"), limit_s=3.0)
    assert time.monotonic() - began < 3.0, "it does not wait"
    compiled.wait()
    assert compiled.ready == ["default", "max-autotune-no-cudagraphs"]
    assert "no graph" in compiled.failed["reduce-overhead"]
    assert compiled.failed["max-autotune"] == "cut off: not compiled within 3 s"
    assert compiled.time("default", Effort()).device_ms == (7.0,)
    compiled.give_up("default", "it broke")
    assert compiled.ready == ["max-autotune-no-cudagraphs"] and compiled.failed["default"] == "it broke"


def test_what_still_compiles_is_given_up_when_it_is_closed(compiled: TorchCompile) -> None:
    compiled.begin(("max-autotune", "default"), limit_s=60.0)
    time.sleep(0.5)
    began = time.monotonic()
    compiled.close()
    assert time.monotonic() - began < 20 and compiled.ready == []


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no mode fastest; known: default, reduce-overhead"):
        check_modes(("default", "fastest"))


def test_the_compiler_measures_alone_on_the_device(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    """One turn for measurements that follow each other, another one after a pause."""
    from torch._inductor.runtime import benchmarking, triton_heuristics

    turns: list[str] = []

    class Lock:
        def alone(self):  # type: ignore[no-untyped-def]
            turns.append("alone")
            return DeviceLock(str(tmp_path / "lock")).alone()

    monkeypatch.setattr(benchmarking, "benchmarker", benchmarking.Benchmarker())
    monkeypatch.setattr(
        triton_heuristics.CachingAutotuner,
        "benchmark_all_configs",
        lambda self: [benchmarking.benchmarker.benchmark_cpu(lambda: None) for _ in range(2)],
    )
    monkeypatch.setattr(
        benchmarking.Benchmarker, "benchmark_gpu", lambda self, call: benchmarking.benchmarker.benchmark(call)
    )
    monkeypatch.setattr(benchmarking.Benchmarker, "benchmark", lambda self, call: call())
    monkeypatch.setattr("qimeng.envs.judge.torch_compile_process.KEPT_S", 60.0)
    measure_alone(Lock())  # type: ignore[arg-type]
    benchmarking.benchmarker.benchmark(lambda: None)
    assert turns == ["alone"]
    assert benchmarking.benchmarker.benchmark_gpu(lambda: 3) == 3
    monkeypatch.setattr("qimeng.envs.judge.torch_compile_process.KEPT_S", 0.0)
    triton_heuristics.CachingAutotuner.benchmark_all_configs(None)  # type: ignore[arg-type]
    assert turns == ["alone"]
    other = DeviceLock(str(tmp_path / "lock"))
    while other.wanted:
        time.sleep(0.01)
    benchmarking.benchmarker.benchmark(lambda: None)
    assert turns == ["alone"] * 2


@pytest.mark.slow
def test_a_module_is_compiled_for_real() -> None:
    module = torch.nn.Linear(8, 8)
    x = torch.rand(4, 8)
    with torch.no_grad():
        call = compile_module(module, "default", (x,), 1, "")
        torch.testing.assert_close(call(x), module(x))


class Rounded(torch.nn.Module):
    """A product whose operands lose digits where `coarse` is set, as TF32 does."""

    coarse = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut = x.bfloat16().float() if self.coarse else x
        return cut @ cut.T


def test_the_compiled_result_is_held_against_eager_s() -> None:
    spec = KernelSpec.from_module(Rounded(), (torch.randn(32, 64),))
    bench = _Bench(spec, torch.device("cpu"))
    assert max(bench.differ(3)[0]) == 0.0
    coarse = Rounded()
    coarse.coarse = True
    bench.call = coarse
    assert 1e-4 < bench.differ(3)[0][0] < 1.0


def test_so_are_the_buffers_that_a_call_updates() -> None:
    spec = KernelSpec.from_module(torch.nn.BatchNorm1d(8).train(), (torch.randn(64, 8) + 3,))
    bench = _Bench(spec, torch.device("cpu"))
    running = ["running_mean", "running_var"]
    for _ in range(50):
        bench.module(torch.randn(64, 8) + 3)
    moved = bench.module.running_mean.clone()
    assert [max(figures) for figures in bench.differ(3, running)] == [0.0, 0.0, 0.0]

    def coarse(x: torch.Tensor) -> torch.Tensor:
        rounded = bench.module(x.bfloat16().float())
        bench.module.num_batches_tracked -= 1
        return rounded

    bench.call = coarse
    _, mean, variance = bench.differ(3, running)
    assert mean[0] > 1e-5 and variance[0] > 1e-4, "as from the buffers that the module was made with"
    assert torch.equal(bench.module.running_mean, moved)


def test_a_mode_outside_the_budget_of_a_candidate_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec.from_module(torch.nn.Linear(64, 16), (torch.randn(8, 64),))
    judge = GpuEvaluator(spec, capture_spec(spec), torch_device="cpu")
    try:
        errors = {"default": [Error(1e-3, 1e-4)], "max-autotune": [Error(1e-7, 1e-8)]}
        monkeypatch.setattr(judge.compiled, "errors", lambda mode, mutated: errors[mode])
        wrong = judge._compiled_wrong(tuple(errors))
    finally:
        judge.close()
    assert list(wrong) == ["default"] and "max error 0.001 beside eager, allowed" in wrong["default"]


def test_what_is_computed_for_its_accuracy_has_a_turn_on_the_device(
    evaluator: GpuEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float64 result beside the measurements of others would make these longer."""
    held, seen, turn = list[str](), list[list[str]](), evaluator.turns.turn

    @contextmanager
    def noted(part: str, *arguments: Any, **options: Any) -> Iterator[None]:
        with turn(part, *arguments, **options):
            held.append(part)
            yield
            held.pop()

    def looked_at(modes: Sequence[str]) -> dict[str, str]:
        seen.append(list(held))
        return {}

    monkeypatch.setattr(evaluator.turns, "turn", noted)
    monkeypatch.setattr(evaluator, "_compiled_wrong", looked_at)
    assert evaluator.graph is not None
    found = evaluator.evaluate(Program.start(evaluator.graph), asked=Asked.FINAL)
    assert found.ok and seen == [["check"]], found.error
