"""Judging inside a full sandbox: right programs pass as ever, candidates that reach out are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qimeng.backend import backend_named
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.estimate.estimator import EstimatingEvaluator
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.sandbox import Sandbox
from qimeng.envs.workers.compile import Compilers, Job
from qimeng.envs.workers.forkserver import ForkServer
from qimeng.envs.workers.service import serve
from qimeng.envs.workers.shared_server import shared_server
from qimeng.graph.opgraph import Meta
from qimeng.interfaces import Action, Asked, Evaluation, Gate, Patch, Request
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from tests.envs.busy_machine import settled

KERNEL = """
@triton.jit
def kernel(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, i < n) * 2, i < n)

def entry(x):
    {before}
    o = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 256),)](x, o, x.numel(), B=256)
    return (o,)
"""


@pytest.fixture(scope="module")
def layers() -> tuple[str, ...]:
    return tuple(Sandbox("full").layers_available().entered)


@pytest.fixture(scope="module")
def evaluator() -> Iterator[GpuEvaluator]:
    spec = KernelSpec.from_module(torch.nn.ReLU(), (torch.randn(64, 64),))
    made = GpuEvaluator(spec, capture_spec(spec), torch_device="cpu", timeout_s=60.0, any_text=True)
    yield made
    made.close()


def judged(evaluator: GpuEvaluator, before: str) -> Evaluation:
    assert evaluator.graph is not None
    program = Program.start(evaluator.graph)
    text = f"import os, socket\ndef entry(x):\n    {before}\n    return (x.clamp(min=0),)\n"
    patch = Patch(target=program.regions[0].id, alternatives=(Implementation("torch", text, "entry"),))
    return evaluator.evaluate(program, patch)


def test_a_right_program_passes_and_the_evaluation_names_the_layers(evaluator, layers):
    found = settled(lambda: judged(evaluator, "pass"))
    assert found.ok, found.error
    assert found.sandbox == layers
    assert Evaluation.from_json(found.to_json()) == found
    program = Program.start(evaluator.graph)
    assert settled(lambda: evaluator.evaluate(program, asked=Asked.FINAL)).ok


@pytest.mark.parametrize(
    ("layer", "before"),
    [
        ("landlock", "open('{outside}/answer', 'w')"),
        ("landlock", "open('/proc/{judge}/environ').read()"),
        ("landlock", "os.kill({judge}, 0)"),
        ("landlock", "os.listdir('{folder}')"),
        ("seccomp", "socket.socket()"),
        ("seccomp", "os.sched_setaffinity({judge}, [0])"),
    ],
)
def test_a_candidate_that_reaches_out_is_refused(evaluator, layers, tmp_path, layer, before, calm):
    if layer not in layers:
        pytest.skip(f"this machine lacks {layer}")
    found = judged(evaluator, before.format(outside=tmp_path, judge=os.getpid(), folder=evaluator.folder))
    assert not found.ok and "PermissionError" in (found.error or ""), found
    assert os.listdir(tmp_path) == []
    assert judged(evaluator, "pass").ok


def test_kernels_are_compiled_into_the_cache_and_nowhere_else(layers, tmp_path):
    outside = tmp_path / "outside"
    cache = tmp_path / "cache"
    cache.mkdir()
    outside.mkdir()
    inputs = (Meta((4096, 4096), (4096, 1), "float32"),)
    reaches = f"open({str(outside / 'x')!r}, 'w').close()"
    jobs = [Job(Implementation("triton", KERNEL.format(before=b), "entry"), inputs) for b in ("pass", reaches)]
    compilers = Compilers(shared_server(), DEVICES["h200"], str(cache), 2, 120.0, sandbox="full")
    right, wrong = compilers.compile(jobs)
    assert right.error is None and (right.kernels[0].registers or 0) > 0
    assert len(list(cache.rglob("*.cubin"))) == 1
    if "landlock" in layers:
        assert "PermissionError" in (wrong.error or "") and not list(outside.iterdir())


def compiles(channel, inputs):
    """The target of a process that reads what was compiled in `folders` and compiles what is not there."""

    def compile(folders, implementation):
        from qimeng.envs.workers.compiled_cache import read_compiled

        read_compiled(folders)
        error = backend_named("triton").compile(implementation, inputs, DEVICES["h200"], os.getcwd()).error
        return [error, len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))]

    serve(channel, {"compile": compile})


def test_a_worker_finds_what_was_compiled_for_its_program_and_nothing_else(layers, tmp_path):
    inputs = (Meta((4096, 4096), (4096, 1), "float32"),)
    implementation = Implementation("triton", KERNEL.format(before="pass"), "entry")
    compilers = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0, sandbox="full")
    assert compilers.compile([Job(implementation, inputs)])[0].error is None
    compiled = tmp_path / implementation.digest
    assert [p.parent.parent for p in tmp_path.rglob("*.cubin")] == [compiled]
    for folders, own in (([str(compiled)], 0), ([], 1)):
        target = "tests.envs.judge.test_sandboxed_judge:compiles"
        process = shared_server().start(target, inputs, sandbox="full", readable=[str(tmp_path)])
        try:
            found = process.call("compile", timeout_s=120, folders=folders, implementation=implementation)[0]
            assert found == [None, own]
        finally:
            process.kill()
    if "landlock" in layers:
        reaches = f"open({str(compiled / 'x')!r}, 'w').close()"
        wrong = compilers.compile([Job(Implementation("triton", KERNEL.format(before=reaches), "entry"), inputs)])[0]
        assert "PermissionError" in (wrong.error or "") and not (compiled / "x").exists()


def test_processes_see_what_the_server_built_and_cannot_change_it(layers):
    if "landlock" not in layers:
        pytest.skip("this machine lacks landlock")
    server = ForkServer(preload=())
    shared = Path(server.folder, "shared")
    shared.mkdir()
    (shared / "built").write_text("for all")
    process = server.start("tests.envs.sandbox.attempts:hostile", sandbox="full")
    try:
        for text, expected in (
            (f"found = open('{shared}/built').read()", ["done", "for all"]),
            (f"open('{shared}/built', 'w')", ["PermissionError", f"[Errno 13] Permission denied: '{shared}/built'"]),
        ):
            assert process.call("attempt", timeout_s=60, text=text, names={})[0] == expected
    finally:
        process.kill()
        server.close()


def test_without_a_gpu_kernels_are_compiled_and_interpreted_inside(layers):
    spec = KernelSpec.from_module(torch.nn.Softmax(dim=-1), (torch.randn(64, 256),))
    program = Program.start(capture_spec(spec))
    coder = TemplateCoder()
    evaluator = EstimatingEvaluator(spec, DEVICES["h200"], coder, sandbox="full")
    try:
        request = Request(program, Action("lowering", (program.regions[0].id,)), DEVICES["h200"])
        found = evaluator.evaluate(program, coder.write(request))
        assert found.gate is Gate.PASSED, found.error
        assert found.accuracy is not None and found.sandbox == layers
    finally:
        evaluator.close()


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_found_run_handed_over_and_timed_inside(layers):
    """Compiled ahead into a cache that the worker only reads; outputs go to the judge by CUDA IPC."""
    torch.manual_seed(0)
    spec = KernelSpec.from_module(torch.nn.Softmax(dim=-1), (torch.randn(4096, 2048),))
    graph = capture_spec(spec)
    program = Program.start(graph)
    coder, evaluator = TemplateCoder(), GpuEvaluator(spec, graph, sandbox="full")
    try:
        request = Request(program, Action("lowering", (program.regions[0].id,)), evaluator.device)
        patch = coder.write(request)
        found = evaluator.evaluate(program, patch)
        assert found.ok, found.error
        assert found.sandbox == layers and found.timing is not None and not found.timing.estimated
        verified = evaluator.evaluate(patch.apply(program, found.chosen), asked=Asked.FINAL)
        assert verified.ok, verified.error
    finally:
        evaluator.close()
