"""What TorchInductor takes long to compile is compiled once, ahead, and taken over by every worker."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from qimeng import KernelSpec
from qimeng.actions import Context, kind_named
from qimeng.device import DEVICES
from qimeng.envs.judge import library_compilers
from qimeng.envs.judge.gates.gpu_run import TAKEN_OVER_S, GpuRun
from qimeng.envs.judge.gates.library_code import LIBRARY_CODE, failure_of_call
from qimeng.envs.judge.gates.pipeline import Candidate
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.library_compile_process import compile_region, inputs_like
from qimeng.envs.judge.library_compilers import FILE, LEAST, LibraryCompilers, parameters_of
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.steps import setup
from qimeng.envs.workers.compile import job_of
from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.graph.region import Region
from qimeng.interfaces import Action, EvaluationRequest, Gate
from qimeng.interfaces.faults import LEFT_ASIDE
from qimeng.library import COMPILE_S
from qimeng.library.inductor import Inductor
from qimeng.program.program import Implementation, Program, torch_implementation
from qimeng.program.verify import capture_spec
from qimeng.testing import FakeCoder

PATIENCE_S = 60.0
WHOLE = Action("library", (), "inductor")


class Layers(torch.nn.Module):
    """As many operators as it is asked for."""

    def __init__(self, count: int):
        super().__init__()
        self.count, self.scale = count, torch.nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.count):
            x = torch.softmax(x * self.scale, -1) if number % 2 else torch.relu(x + number)
        return x


def whole(count: int) -> Program:
    """`Layers` with TorchInductor's code for all of it."""
    program = Program.start(capture_spec(KernelSpec.from_module(Layers(count), (torch.rand(4, 8),)), verify=False))
    rewrite = kind_named("library").apply(program, WHOLE, Context(DEVICES["h200"], FakeCoder()))
    return rewrite.patch().apply(program)


@pytest.fixture(scope="module")
def large() -> Program:
    return whole(LEAST)


class Server:
    """Starts processes that compile at once, or fail."""

    def __init__(self, fails: bool = False):
        self.fails, self.compiled, self.folder = fails, 0, "server"
        self.started, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.go.set()

    def start(self, *unused: Any, environment: dict[str, str]) -> Server:
        self.cache = environment["TORCHINDUCTOR_CACHE_DIR"]
        self.started.set()
        self.go.wait(PATIENCE_S)
        return self

    def call(self, command: str, timeout_s: float, path: str = "", **unused: Any) -> tuple[Any, list[int]]:
        if self.ended.is_set():
            raise WorkerFailed("crash", "killed")
        if command == "compile":
            self.limit_s = timeout_s
            self.compiled += 1
            if self.fails:
                raise WorkerFailed("error", "no such operator")
            Path(path).parent.mkdir(parents=True)
            Path(path).write_bytes(b"code")
        return True, []

    def kill(self, wait: bool = True) -> None:
        """What it is asked after that fails."""
        self.ended.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(library_compilers, "compile_server", lambda: made)
    return made


@pytest.fixture
def compilers(tmp_path: Path) -> Iterator[LibraryCompilers]:
    made = LibraryCompilers("default", "cpu", tmp_path / "made", 1, "")
    yield made
    made.close()


def test_it_is_compiled_once_for_all_caches(
    large: Program, server: Server, compilers: LibraryCompilers, tmp_path: Path
) -> None:
    assert compilers.wait(large, PATIENCE_S)
    (found,) = compilers.files(large)
    assert Path(found).read_bytes() == b"code" and Path(found).is_relative_to(compilers.folder)
    assert Path(server.cache).is_relative_to(compilers.folder), "where workers may read"
    assert server.compiled == 1 and server.limit_s == math.inf, "until the judge is closed"


def test_a_worker_compiles_by_itself_where_that_fails(
    large: Program, server: Server, compilers: LibraryCompilers, tmp_path: Path
) -> None:
    server.fails = True
    assert compilers.wait(large, PATIENCE_S) and compilers.files(large) == []
    assert compilers.wait(large, PATIENCE_S) and server.compiled == 1


def test_what_takes_longer_than_there_is_time_for_is_left_aside_and_compiled_on(
    large: Program, server: Server, compilers: LibraryCompilers, tmp_path: Path
) -> None:
    server.go.clear()
    run: Any = SimpleNamespace(parts=SimpleNamespace(libraries=compilers), clock=Clock())
    run.library_s = run.library_left_s = 0.01
    candidate = Candidate(0, large)
    LIBRARY_CODE.prepare(run, [candidate])
    refused = LIBRARY_CODE.check(run, candidate)
    assert refused is not None and refused.failure == LEFT_ASIDE and "TorchInductor was not done after" in refused.error
    assert compilers.files(large) == []
    server.go.set()
    run.library_left_s = PATIENCE_S
    assert LIBRARY_CODE.check(run, candidate) is None and run.clock.seconds["library"] > 0
    assert len(compilers.files(large)) == 1 and server.compiled == 1


def test_a_worker_gets_time_to_load_what_was_compiled() -> None:
    allowed: Any = GpuRun.first_call_s.fget  # type: ignore[attr-defined]
    assert allowed(SimpleNamespace(library_left_s=1.0, files=["file"])) == TAKEN_OVER_S
    assert allowed(SimpleNamespace(library_left_s=1.0, files=[])) == 1.0
    assert allowed(SimpleNamespace(library_left_s=100.0, files=["file"])) == 100.0
    assert allowed(SimpleNamespace(library_left_s=1e4, files=["file"])) == COMPILE_S


def test_the_judge_waits_no_longer_than_a_request_says(large: Program, server: Server) -> None:
    server.go.clear()
    spec = KernelSpec.from_module(Layers(LEAST), (torch.rand(4, 8),))
    judge = GpuEvaluator(spec, large.graph, torch_device="cpu")
    try:
        found = judge.evaluate(large, library_seconds=0.02)
        assert (found.gate, found.failure, found.fault) == (Gate.COMPILE, LEFT_ASIDE, None) and not found.lasting
        assert 0.01 < found.seconds["library"] < PATIENCE_S / 2
        aside = judge.left_aside(EvaluationRequest(large, library_seconds=0.02))
        assert aside is not None and (aside.gate, aside.failure) == (found.gate, found.failure)
        server.go.set()
        assert judge.left_aside(EvaluationRequest(large, library_seconds=PATIENCE_S)) is None
    finally:
        server.go.set()
        judge.close()


def test_a_process_that_starts_while_all_is_closed_is_ended(large: Program, server: Server, tmp_path: Path) -> None:
    made = LibraryCompilers("default", "cpu", tmp_path / "made", 1, "")
    server.go.clear()
    made.begin([large])
    assert server.started.wait(PATIENCE_S)

    def go_on() -> None:
        while not made._closed:
            time.sleep(0.001)
        server.go.set()

    threading.Thread(target=go_on).start()
    made.close()
    assert server.compiled == 0


def test_a_call_that_compiles_and_is_too_slow_for_the_budget_is_no_verdict(large: Program) -> None:
    made, slow = (
        [large.implementation(r) for r in large.called],
        WorkerFailed("timeout", "no answer within 3 s; killed"),
    )
    plain = [torch_implementation(r) for r in Program.start(large.graph).called]

    def failure(library_s: float, of: list[Implementation], failed: WorkerFailed = slow) -> str:
        run: Any = SimpleNamespace(library_s=library_s)
        return failure_of_call(run, of, failed).kind

    assert failure(3.0, made) == LEFT_ASIDE
    assert failure(COMPILE_S, made) == failure(3.0, plain) == "timeout", "its own fault"
    assert failure(3.0, made, WorkerFailed("crash", "killed by signal 11")) == "crash"


def test_small_regions_and_texts_of_others_are_left_to_workers(
    large: Program, server: Server, compilers: LibraryCompilers, tmp_path: Path
) -> None:
    (region,) = large.called
    forged = replace(large.implementation(region), source=large.implementation(region).source + "\nprint('mine')\n")
    other = replace(large, implementations={**large.implementations, region.signature: forged})
    for program in (whole(3), other, Program.start(large.graph)):
        assert compilers.wait(program, PATIENCE_S) and compilers.files(program) == []
    assert server.compiled == 0


def test_loops_and_candidates_take_long_in_small_regions_too() -> None:
    def region(module: torch.nn.Module, *inputs: torch.Tensor) -> Region:
        program = Program.start(capture_spec(KernelSpec.from_module(module, inputs), verify=False))
        return next(r for r in program.regions if r.label() in ("linear", "gru"))

    product, loop = region(torch.nn.Linear(4, 4), torch.rand(2, 4)), region(torch.nn.GRU(4, 4), torch.rand(3, 2, 4))
    plain, tuned = Inductor("inductor"), Inductor("inductor-tuned", "max-autotune-no-cudagraphs")
    takes_long = library_compilers._takes_long
    assert not takes_long(product, plain) and takes_long(product, tuned) and takes_long(loop, plain)


def test_judges_of_one_network_share_what_is_compiled(
    large: Program, server: Server, compilers: LibraryCompilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = KernelSpec.from_module(Layers(LEAST), (torch.rand(4, 8),))
    judge = GpuEvaluator(spec, large.graph, torch_device="cpu", libraries=compilers)
    judge.close()
    assert not compilers._closed
    shared: list[Any] = []
    monkeypatch.setattr(setup, "make_evaluator", lambda *unused, libraries=None, **more: shared.append(libraries))
    judges: Any = setup.region_judges(judge, spec, Context(DEVICES["h200"], FakeCoder()))
    judges.make(SimpleNamespace(spec=spec, program=large))
    assert shared == [compilers]


@pytest.mark.slow
def test_another_process_finds_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process with two caches; the second call of torch.compile compiles nothing."""
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.utils import fresh_cache

    monkeypatch.setattr(library_compilers, "LEAST", 3)
    monkeypatch.setattr(config, "cpp_cache_precompile_headers", False)  # that takes longer than the one file does
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # each one is tried by a compilation
    monkeypatch.chdir(tmp_path)  # who compiles writes its text where it is
    small = whole(3)
    (region,) = small.called
    job = job_of(region, small.implementation(region))
    call = library_compilers._compiled(small)[job.implementation.digest][2]
    path = tmp_path / FILE
    inputs = inputs_like(job.inputs, parameters_of(region), torch.device("cpu"))
    with torch.no_grad():
        with fresh_cache():
            assert compile_region(job, inputs, call.options, 1, "", path)
        torch._dynamo.reset()
        counters.clear()
        with fresh_cache():
            torch.compiler.load_cache_artifacts(path.read_bytes())
            small.load().Model()(inputs[0])
    assert counters["inductor"]["fxgraph_cache_hit"] == 1 and not counters["inductor"]["fxgraph_cache_miss"]
