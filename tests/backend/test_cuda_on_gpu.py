"""CUDA C++ on a GPU: launches on the current stream, in CUDA graphs, with much shared memory, and printed kernels."""

from __future__ import annotations

import pytest
import torch

from qimeng.backend.cuda_runtime import CudaError, cuda_aligned, cuda_kernel
from tests.coder.cuda_on_cpu import call
from tests.coder.test_cuda_rows import CASES, FORMS, LIMIT, POINTWISE, printed

pytestmark = pytest.mark.gpu

TEXT = r"""
extern "C" __global__ void scale(const float* x, float* y, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * by;
}
extern "C" __global__ void turned(const float* x, float* y, int n) {
    extern __shared__ float held[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) held[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = held[n - 1 - i];
}
"""
scale = cuda_kernel(TEXT, "scale")
turned = cuda_kernel(TEXT, "turned")


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    y = torch.empty_like(x)
    scale[(x.numel() + 255) // 256, 256](x, y, by, x.numel())
    return y


def test_it_runs_on_the_current_stream() -> None:
    x = torch.randn(1_000_003, device="cuda")
    assert torch.equal(scaled(x, 2.5), x * 2.5)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        y = scaled(x, 2.0)
    side.synchronize()
    assert torch.equal(y, torch.full_like(x, 6.0)), "it waits for what was queued on that stream before"


def test_a_graph_replays_it() -> None:
    x = torch.randn(4096, device="cuda")
    scaled(x, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = scaled(x, 2.0)
    x.copy_(torch.arange(4096.0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2.0)


def test_a_block_may_ask_for_much_shared_memory() -> None:
    n = 50_000
    x, y = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    turned[1, 1024](x, y, n, shared=4 * n)
    assert torch.equal(y, x.flip(0))
    with pytest.raises(CudaError, match="invalid argument"):
        turned[1, 1024](x, y, n, shared=1 << 20)
    with pytest.raises(CudaError, match="block \\(2048, 1, 1\\)"):
        scale[1, 2048](x, y, 1.0, n)


def test_another_thread_launches_as_well() -> None:
    from concurrent.futures import ThreadPoolExecutor

    x = torch.randn(1000, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        y = pool.submit(scaled, x, 3.0).result()
    torch.cuda.synchronize()
    assert torch.equal(y, x * 3.0)


@pytest.mark.parametrize("case", CASES)
def test_printed_kernels_compute_what_pytorch_does(case: str) -> None:
    function, shapes = CASES[case]
    torch.manual_seed(0)
    inputs = [torch.randn(s) for s in shapes]
    expected = function(*(x.double() for x in inputs))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for changes in FORMS.values() if case not in POINTWISE else [{"warps": 2}]:
        found = call(printed(function, inputs, case, **changes), *[x.cuda() for x in inputs])
        for a, b in zip(found, expected, strict=True):
            error = float((a.cpu().double() - b.double()).abs().max() / (b.double().abs().max() + 1e-30))
            assert error < LIMIT, f"{case}, {changes}: {error:.2e}"


def test_odd_addresses_are_read_element_by_element() -> None:
    held = torch.randn(1 + 64 * 8, device="cuda")
    x = held[1:].reshape(64, 8)
    assert not cuda_aligned(x) and cuda_aligned(held)
    (found,) = call(printed(torch.tanh, [torch.empty(64, 8)], "odd"), x)
    torch.testing.assert_close(found, torch.tanh(x))
