"""Compiling ahead for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qimeng.device import DEVICES
from qimeng.envs.compile import Compiled, Job, Kernel, compile_ahead, over_limit, resources_of
from qimeng.envs.forkserver import ForkServer
from qimeng.graph.opgraph import Meta
from qimeng.program.program import Implementation

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
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def build(server: ForkServer, tmp_path, *jobs: Job) -> list[Compiled]:
    return compile_ahead(server, jobs, H200, str(tmp_path), 2, 120.0)


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
    build(server, tmp_path, plain)
    build(server, tmp_path, moved)
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


def test_errors_of_the_compiler_are_told_and_host_code_is_left_to_the_launch(server, tmp_path):
    wrong, syntax, host = build(
        server,
        tmp_path,
        job(body="v = tl.arange(0, B + 1)"),
        Job(Implementation("triton", "def f(:", "f"), ()),
        Job(Implementation("triton", "def f(x):\n    return (torch.empty(5, device='cuda'),)\n", "f"), job().inputs),
    )
    assert "power of 2" in (wrong.error or "")
    assert "SyntaxError" in (syntax.error or "")
    assert host.error is None and not host.kernels


def test_limits_of_the_device_carry_the_numbers():
    big = Compiled((Kernel("k", 4, 262144, 64, 0),))
    assert "262144 B of shared memory, h200 allows 232448 B" in (over_limit(big, H200) or "")
    assert "threads" in (over_limit(Compiled((Kernel("k", 64, 0),)), H200) or "")
    assert "registers" in (over_limit(Compiled((Kernel("k", 16, 0, 255),)), H200) or "")
    fits = Compiled((Kernel("a", 4, 100, 32, 0), Kernel("b", 8, 50, 64, 16)))
    assert over_limit(fits, H200) is None
    found = resources_of([fits])
    assert (found.registers, found.spills, found.shared_bytes, found.kernels) == (64, 16, 100, 2)
