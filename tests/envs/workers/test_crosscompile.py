"""Compiling for a named device without one: facts, failures, limits, and cache entries that real launches find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.backend.facts import KernelFacts, dot_types
from qimeng.backend.load import HEADER
from qimeng.device import DEVICES
from qimeng.envs.screening.resources import largest, refusal, too_many_spills
from qimeng.envs.workers.compile import Compilers, Job
from qimeng.envs.workers.forkserver import ForkServer
from qimeng.envs.workers.shared_server import shared_server
from qimeng.graph.opgraph import Meta
from qimeng.program.program import Implementation

H200 = DEVICES["h200"]

ADD = """
@triton.jit
def add_kernel(x, y, scale, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n) * scale, at < n)


def add(x, scale):
    y = torch.empty_like(x)
    add_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, scale, x.numel(), BLOCK=1024, num_warps=8)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, scale, x.numel(), BLOCK=1024, num_warps=8)
    return (y + 1,)
"""

DOT = """
@triton.autotune(configs=[triton.Config({"BK": 32}, num_stages=s) for s in (2, 3)], key=[])
@triton.jit
def dot_kernel(a, b, c, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    da = tl.make_tensor_descriptor(a, [BM, K], [K, 1], [BM, BK])
    acc = tl.zeros((BM, BM), tl.float32)
    for k in range(0, K, BK):
        acc += tl.dot(da.load([0, k]), b.load([k, 0]))
    i = tl.arange(0, BM)
    tl.store(c + i[:, None] * BM + i[None, :], acc)


def pack(b):
    p = torch.empty_like(b)
    copy_kernel[(b.numel() // 1024,)](b, p, BLOCK=1024)
    return (p,)


@triton.jit
def copy_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


def dot(a, b, packed):
    from triton.tools.tensor_descriptor import TensorDescriptor

    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=a.device))
    c = torch.empty((64, 64), dtype=torch.float32, device=a.device)
    dot_kernel[(1,)](a, TensorDescriptor.from_tensor(packed, [32, 64]), c, K=a.shape[1], BM=64)
    return (c,)
"""


def meta(*shape: int, dtype: str = "float32") -> Meta:
    from qimeng.graph.opgraph import row_major

    return Meta(shape, row_major(shape), dtype)


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return shared_server()


def compilers(
    server: ForkServer, folder: Path, device: str = "h200", timeout_s: float = 60.0, sandbox: str = "full"
) -> Compilers:
    folder.mkdir(exist_ok=True)
    return Compilers(server, DEVICES[device], str(folder), 2, timeout_s, sandbox)


def add(text: str = ADD) -> Job:
    return Job(Implementation("triton", text, "add"), (meta(1024), None))


def test_facts_of_a_launch(server: ForkServer, tmp_path: Path) -> None:
    job = Job(Implementation("triton", ADD, "add"), (meta(1000, 1000), None))
    (found,) = compilers(server, tmp_path).compile([job])
    assert found.error is None and len(found.kernels) == 1, "two equal launches are counted together"
    (kernel,) = found.kernels
    assert (kernel.name, kernel.grid, kernel.launches) == ("add_kernel", (977, 1, 1), 2)
    assert (kernel.warps, kernel.threads) == (8, 256)
    assert kernel.tensor_bytes == 2 * 4_000_000 and kernel.dots == () and kernel.spills == 0
    assert kernel.registers is not None and 8 <= kernel.registers <= 64 and kernel.instructions > 10


@pytest.mark.parametrize(("device", "dots"), [("h200", "bf16"), ("a100", "bf16"), ("b200", "f16"), ("mi300x", "bf16")])
def test_descriptors_autotuning_preparation(server: ForkServer, tmp_path: Path, device: str, dots: str) -> None:
    operands = (meta(64, 256, dtype="bfloat16"), meta(256, 64, dtype="bfloat16"))
    (found,) = compilers(server, tmp_path, device).compile(
        [Job(Implementation("triton", DOT, "dot", "pack", (1,)), operands)]
    )
    assert found.error is None, found
    facts = found.kernels
    assert [k.prepares for k in facts if k.name == "copy_kernel"] == [True]
    products = [k for k in facts if k.name == "dot_kernel"]
    assert products and all(not k.prepares and k.dots == (dots,) for k in products)
    assert {k.stages for k in products} == {2, 3}, "every configuration of an autotuner is compiled"
    assert all(k.shared_bytes > 0 for k in products) and refusal(facts, DEVICES[device]) is None


def test_failures_are_typed(server: ForkServer, tmp_path: Path) -> None:
    bad = {
        "compile": add(ADD.replace("tl.arange(0, BLOCK)", "tl.arange(0, 1000)")),
        "error": add(ADD.replace("return (y + 1,)", "return (y + nothing,)")),
        "meta": add(ADD.replace("return (y + 1,)", "return (y * y.sum().item(),)")),
        "crash": add(ADD.replace("return (y + 1,)", "import os; os.abort()")),
    }
    pool = compilers(server, tmp_path)
    *failed, last = pool.compile([*bad.values(), add()])
    assert [f.failure for f in failed] == list(bad)
    assert [f.host for f in failed] == [False, True, True, False]
    assert len(failed[1].kernels) == 1, "what was compiled before the code around it stopped"
    assert last.error is None, "the next job runs as if nothing had happened"
    first = failed[0]
    assert first.kernel == "add_kernel" and first.line == 2
    assert "power of 2" in (first.error or "") and "add_kernel, line 2" in (first.error or "")
    pool.timeout_s = 1.0
    (hangs,) = pool.compile([add(ADD.replace("return (y + 1,)", "while True: pass"))])
    assert hangs.failure == "timeout" and not hangs.host


LAUNCH = """
import json, sys, torch
from triton import knobs
import triton
from qimeng.backend.triton_driver import NoDriver
from qimeng.backend.load import load_kernels
from qimeng.device import DEVICES
triton.runtime.driver.set_active(NoDriver(DEVICES["h200"]))
hits = []
knobs.compilation.listener = lambda **k: hits.append(k["cache_hit"])
module = load_kernels(open(sys.argv[1]).read())
x, y = torch.empty(1000, 1000), torch.empty(1000, 1000)
assert x.data_ptr() % 16 == 0
for scale, n in ((2.5, x.numel()), (7.0, 16), (2.5, 17)):
    module.add_kernel.warmup(x, y, scale, n, BLOCK=1024, num_warps=8, grid=(1,))
print(json.dumps(hits))
"""


def test_a_later_launch_finds_the_binary(server: ForkServer, tmp_path: Path) -> None:
    """Another process, another file, other line numbers and other arguments of the same kind: the same cache entry."""
    shared = compilers(server, tmp_path / "cache", sandbox="basic")  # in a full one each text has a folder of its own
    shared.compile([Job(add().implementation, (meta(1000, 1000), None))])
    longer = tmp_path / "longer.py"
    longer.write_text(HEADER + "\n\ndef another():\n    return 1\n\n\n" + ADD)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(longer)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, False], "10^6 and 16 are multiples of 16 and share a kernel, 17 does not"


KERNEL = KernelFacts("k", False, (1, 1, 1), 1, 4, 128, 3, 1024, 64, 0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared_bytes": 262144}, "needs 262144 B of shared memory, sm_90 allows 232448 B a block"),
        ({"threads": 2048, "warps": 64}, "has 2048 threads a block (64 warps), sm_90 allows 1024"),
        ({"registers": 255, "threads": 512}, "needs 255 registers a thread x 512 threads, sm_90 has 65536 an SM"),
    ],
)
def test_refusals_carry_the_numbers(changes: dict[str, int], words: str) -> None:
    assert refusal([KERNEL], H200) is None
    found = refusal([KERNEL, replace(KERNEL, **changes)], H200)
    assert found is not None and words in found


def test_spills_do_not_keep_a_kernel_from_running_but_from_being_modelled() -> None:
    spilling = replace(KERNEL, spills=4000)
    assert refusal([spilling], H200) is None and too_many_spills([KERNEL]) is None
    assert "spills 4000 B of registers a thread" in (too_many_spills([KERNEL, spilling]) or "")
    told = too_many_spills([spilling, KERNEL, replace(spilling, name="another")]) or ""
    assert told.endswith("(likewise another)"), "a step of many kernels leaves all of them out at once"


def test_largest() -> None:
    found = largest([KERNEL, replace(KERNEL, registers=None, spills=8, shared_bytes=4096)])
    assert (found.registers, found.spills, found.shared_bytes, found.kernels) == (64, 8, 4096, 2)


def test_dot_types() -> None:
    text = (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {\nv_mfma_f32_32x32x8_bf16 a[0:15]"
    )
    assert dot_types(text) == ("bf16", "f16", "tf32")
