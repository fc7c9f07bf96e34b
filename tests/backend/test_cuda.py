"""CUDA C++ without a GPU: compiled by NVRTC for named devices, refused with lines, embedded in standalone programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qimeng.backend import backend_named
from qimeng.backend.cuda_runtime import CudaError, cuda_compile, cuda_kernel
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, Job
from qimeng.envs.workers.forkserver import ForkServer
from qimeng.envs.workers.shared_server import shared_server
from qimeng.graph.opgraph import Meta, row_major
from qimeng.program.program import Implementation

SCALE = '''
SCALE = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void __launch_bounds__(256) scale(const float* __restrict__ x, float* y, float by, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * by;
}
template <typename T>
__global__ void add_one(float* y, int n) {
    __shared__ float kept[64];
    int i = threadIdx.x;
    kept[i % 64] = y[i];
    __syncthreads();
    if (i < n) y[i] = (float)(T)(kept[i % 64] + 1.0f);
}
"""
scale = cuda_kernel(SCALE, "scale")
add_one = cuda_kernel(SCALE, "add_one<__half>")


def entry(x, by):
    y = torch.empty_like(x)
    scale[(x.numel() + 255) // 256, 256](x, y, by, x.numel())
    scale[(x.numel() + 255) // 256, 256](x, y, by, x.numel())
    add_one[1, (64, 2)](y, 64, shared=1024)
    return (y,)
'''
CUDA = backend_named("cuda")
needs_nvrtc = pytest.mark.skipif(CUDA.missing() is not None, reason=CUDA.missing() or "")


def meta(*shape: int, dtype: str = "float32") -> Meta:
    return Meta(shape, row_major(shape), dtype)


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return shared_server()


def compiled(server: ForkServer, folder: Path, *texts: str, device: str = "h200"):
    jobs = [Job(Implementation("cuda", text, "entry"), (meta(1000, 1000), None)) for text in texts]
    return Compilers(server, DEVICES[device], str(folder), 2).compile(jobs)


@needs_nvrtc
def test_facts_of_launches_come_without_a_gpu(server: ForkServer, tmp_path: Path) -> None:
    (found,) = compiled(server, tmp_path, SCALE)
    assert found.error is None, found.error
    first, second = found.kernels
    assert (first.name, first.grid, first.launches, first.threads) == ("scale", (3907, 1, 1), 2, 256)
    assert first.tensor_bytes == 8_000_000 and first.shared_bytes == 0 and first.spills == 0
    assert first.registers is not None and 4 <= first.registers <= 64 and first.instructions > 5
    assert (second.name, second.threads, second.shared_bytes) == ("add_one", 128, 256 + 1024)


def test_a_device_that_it_does_not_compile_for_is_refused(server: ForkServer, tmp_path: Path) -> None:
    (found,) = compiled(server, tmp_path, SCALE, device="mi300x")
    assert found.failure == "unsupported"
    assert found.error == "CUDA C++ is compiled for devices of the kind cuda; mi300x is of the kind hip"


@needs_nvrtc
def test_failures_are_typed_and_name_the_line(server: ForkServer, tmp_path: Path) -> None:
    texts = {
        "compile": SCALE.replace("x[i] * by", "x[i] * nothing"),
        "resources": SCALE.replace("kept[64]", "kept[64000]"),
        "error": SCALE.replace("(x, y, by, x.numel())", "(x, y, by)"),
        "meta": SCALE.replace("return (y,)", "return (y * y.sum().item(),)"),
    }
    found = dict(zip(texts, compiled(server, tmp_path, *texts.values()), strict=True))
    assert {name: c.failure for name, c in found.items()} == {name: name for name in texts}
    refused = found["compile"]
    assert refused.kernel == "scale" and refused.line == 6
    assert "line 6 of the CUDA text" in refused.error and 'identifier "nothing" is undefined' in refused.error
    assert "y[i] = x[i] * nothing;" in refused.error, "the source line stands in the message"
    assert "kernel scale has 4 parameters, got 3" in found["error"].error


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100"])
def test_it_compiles_for_every_generation(arch: str) -> None:
    binary, ptx, names = cuda_compile(
        'extern "C" __global__ void k(float* x) { x[0] = 3.0f / x[1] + sqrtf(x[2]); }', ("k",), arch
    )
    assert binary[:4] == b"\x7fELF" and names == {"k": "k"} and f".target {arch}" in ptx
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx, "IEEE's"


def test_what_does_not_fit_a_parameter_is_one_clear_error() -> None:
    text = 'extern "C" __global__ void k(const float* x, __nv_bfloat16 *y, int n /* n, m */, double scale) {}'
    kernel = cuda_kernel(text, "k")
    x, y = torch.empty(4), torch.empty(4, dtype=torch.bfloat16)
    values, _ = kernel.bind((x, y, 7, 2))
    assert values == (x.data_ptr(), y.data_ptr(), 7, 2.0)
    wrong = {
        "has 4 parameters, got 3": (x, y, 7),
        "parameter x: a pointer to float, got a tensor of torch.bfloat16": (y, y, 7, 1.0),
        "parameter n: expected int, got 7.5": (x, y, 7.5, 1.0),
        "parameter y: expected a tensor, got int": (x, 3, 7, 1.0),
        "parameter scale: expected double, got Tensor": (x, y, 7, x),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            kernel.bind(arguments)
    with pytest.raises(ValueError, match="has no kernel `__global__ void other"):
        cuda_kernel(text, "other")
    with pytest.raises(ValueError, match="write a pointer, or one of"):
        cuda_kernel("__global__ void k(Thing t) {}", "k")
    with pytest.raises(ValueError, match="one to three positive whole numbers"):
        kernel[0, 32](x, y, 7, 1.0)
    with pytest.raises(ValueError, match="have to be on one GPU, they are on cpu"):
        kernel[1, 32](x, y, 7, 1.0)


def test_the_names_of_kernels_are_those_of_global_functions() -> None:
    assert CUDA.kernel_names(SCALE) == ["scale", "add_one"]


def test_without_nvidias_packages_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(CudaError, match="pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"):
        cuda_compile("", (), "sm_90")
