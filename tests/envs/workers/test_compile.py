"""Compiling ahead, each implementation in a process of its own: in order, once, into the cache, failures told apart."""

from __future__ import annotations

import pytest
import torch

from qimeng.backend.compiled import Compiled
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, Job
from qimeng.envs.workers.forkserver import ForkServer
from qimeng.envs.workers.shared_server import shared_server
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import Meta
from qimeng.program.program import Implementation, Program
from qimeng.spec.origin import FunctionModule

H200 = DEVICES["h200"]
TEXT = """
@triton.jit
def kernel_{name}(x, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    {body}
    tl.store(o + i, v, i < n)

def {name}(x):
    o = torch.empty_like(x)
    kernel_{name}[(triton.cdiv(x.numel(), {block}),)](x, o, x.numel(), B={block})
    return (o,)
"""


def job(name: str = "double", body: str = "v = tl.load(x + i, i < n) * 2", block: int = 256, after: str = "") -> Job:
    text = TEXT.format(name=name, body=body, block=block) + after
    return Job(Implementation("triton", text, name), (Meta((4096, 4096), (4096, 1), "float32"),))


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return shared_server()


def build(server: ForkServer, tmp_path, *jobs: Job, sandbox: str = "full") -> list[Compiled]:
    return Compilers(server, H200, str(tmp_path), 2, 120.0, sandbox).compile(jobs)


def test_kernels_are_compiled_in_parallel_in_order_and_once(server, tmp_path):
    results = build(server, tmp_path, job(block=256), job(block=512), job("crash", after="\nimport os; os.abort()"))
    assert [r.error is None for r in results] == [True, True, False]
    assert results[0].kernels[0].warps == 4 and (results[0].kernels[0].registers or 0) > 0
    assert "SIGABRT" in (results[2].error or "")
    count = len(list(tmp_path.rglob("*.cubin")))
    assert count == 2
    build(server, tmp_path, job(block=256))
    assert len(list(tmp_path.rglob("*.cubin"))) == count


def test_the_same_kernel_further_down_in_a_file_is_the_same_to_the_cache(server, tmp_path):
    plain = job()
    moved = Job(Implementation("triton", "\n# comment\n" * 9 + plain.implementation.source, "double"), plain.inputs)
    build(server, tmp_path, plain, sandbox="basic")  # in a full one each text has a folder of its own
    build(server, tmp_path, moved, sandbox="basic")
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


def test_errors_of_the_compiler_are_told_and_host_code_is_left_to_the_launch(server, tmp_path):
    wrong, syntax, host = build(
        server,
        tmp_path,
        job(body="v = tl.arange(0, B + 1)"),
        Job(Implementation("triton", "def f(:", "f"), ()),
        Job(Implementation("triton", "def f(x):\n    return (torch.empty(5, device='cuda'),)\n", "f"), job().inputs),
    )
    assert "power of 2" in (wrong.error or "") and wrong.failure == "compile"
    assert "SyntaxError" in (syntax.error or "") and syntax.failure == "compile"
    assert host.host and not host.kernels and not wrong.host and not syntax.host


def test_configurations_that_an_autotuner_can_do_without_are_left_out(server, tmp_path):
    """Triton's autotuner goes on where the compiler runs out of resources in one configuration; so does this."""
    body = "tl.static_assert(B < 1024); v = tl.load(x + i, i < n)"
    tuned = job(body=body).implementation.source.replace(
        "@triton.jit", "@triton.autotune([triton.Config({'B': b}) for b in (256, 2048)], key=[])\n@triton.jit"
    )
    source = tuned.replace(", B=256)", ")")
    (found,) = build(server, tmp_path, Job(Implementation("triton", source, "double"), job().inputs))
    assert found.error is None and len(found.kernels) == 1, found


def test_equal_regions_are_compiled_once_and_remembered(server, tmp_path):
    """What runs on PyTorch has no kernels."""
    shapes = (torch.empty(64, 64, device="meta"),)
    graph = capture(lambda: FunctionModule(lambda x: torch.relu(torch.relu(x) @ x)), lambda: shapes)
    program = Program.start(graph)
    compilers = Compilers(server, H200, str(tmp_path), 2)
    assert compilers.programs([program]) == [{}]
    first = program.regions[0]
    program = program.with_implementation(first.id, job().implementation)
    assert program.implementation(program.regions[2]).generated, "the other relu is equal"
    (found,) = compilers.programs([program])
    assert list(found) == [first.signature]
    assert [(k.name, k.grid) for k in found[first.signature].kernels] == [("kernel_double", (16, 1, 1))]
    (again,) = compilers.programs([program])
    assert again[first.signature] is found[first.signature]
    broken = Implementation("triton", job(body="v = nothing").implementation.source, "double")
    (refused,) = compilers.programs([program.with_implementation(first.id, broken)])
    assert "kernel_double" in (refused[first.signature].error or "")


def test_a_compilation_that_ran_out_of_time_is_tried_again(server, tmp_path):
    graph = capture(lambda: FunctionModule(torch.relu), lambda: (torch.empty(64, 64, device="meta"),))
    program = Program.start(graph)
    # the text hangs while a file is missing
    flag = tmp_path / "free"
    text = job(after=f"\nimport os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.05)\n")
    program = program.with_implementation(program.regions[0].id, text.implementation)
    compilers, strict = (Compilers(server, H200, str(tmp_path), 2, 3.0, forgiving=f) for f in (True, False))
    for some in (compilers, strict):
        (first,) = some.programs([program])
        assert [c.failure for c in first.values()] == ["timeout"]
    flag.touch()
    assert strict.programs([program]) == [first], "where nobody may wait twice, it is refused for good"
    compilers.timeout_s = 60.0
    (second,) = compilers.programs([program])
    assert [c.error for c in second.values()] == [None]


def test_what_was_begun_in_the_background_is_compiled_once(server, tmp_path, monkeypatch):
    graph = capture(lambda: FunctionModule(torch.relu), lambda: (torch.empty(64, 64, device="meta"),))
    program = Program.start(graph)
    program = program.with_implementation(program.regions[0].id, job().implementation)
    compilers, started = Compilers(server, H200, str(tmp_path), 2), list[str]()
    start = server.start
    monkeypatch.setattr(server, "start", lambda *a, **k: started.append(a[0]) or start(*a, **k))
    compilers.begin([program])
    compilers.begin([program])
    for _ in range(2):
        (found,) = compilers.programs([program])
        assert [c.error for c in found.values()] == [None]
    assert len(started) == 1


def test_compilers_that_are_closed_wait_for_nothing(server, tmp_path):
    graph = capture(lambda: FunctionModule(torch.relu), lambda: (torch.empty(64, 64, device="meta"),))
    program = Program.start(graph)
    text = job(after="\nimport time\ntime.sleep(600)\n")
    program = program.with_implementation(program.regions[0].id, text.implementation)
    compilers = Compilers(server, H200, str(tmp_path), 1, 600.0)
    compilers.begin([program])
    compilers.close()
    (found,) = compilers.programs([program])
    assert all(c.error for c in found.values())
