# ruff: noqa: E501  a text a line
"""What the CUDA C++ of a kernel may do, and what it may not, with the line in the Python text and what to do instead."""

from __future__ import annotations

import pytest

from qimeng.envs.screening.allowed_cuda import cuda_violations
from qimeng.envs.screening.allowed_text import violations
from qimeng.envs.screening.static_pass import look

FINE = [
    '#include <cuda_fp16.h>\n#include "cuda_bf16.h"\n#define TILE 32\nextern "C" __global__ void __launch_bounds__(128) k(const float* x, float* y) {\n'
    "  __shared__ float s[TILE]; // asm clock\n  static constexpr int n = 3;\n#pragma unroll 4\n  for (int i = 0; i < n; i++) y[i] = x[i];\n}",
    'extern "C" {\n__global__ void k(float* x) { x[0] = 1; }\n}\n',
    "namespace a {\n__device__ float f(float x) { return x; }\nstruct S { float a = 0; static __device__ float g() { return 1; } };\n}\n",
    "constexpr int N = 4;\n__constant__ float T[2] = {1.0f, 2.0f};\nextern __shared__ float s[];\ntemplate <class T> struct L;\nusing F = float;\n"
    "typedef float G;\nenum E { A, B };\nstruct P { int x; };\n__global__ void k() {}",
    "static __device__ __forceinline__ float f(float x) { return x; }",
]
FORBIDDEN = {
    "__device__ int counter = 0;": "only functions, types and constants",
    "__device__ const int* p;": "only functions, types and constants",
    "const float* p = 0;": "only functions, types and constants",
    "int n{3};": "only functions, types and constants",
    "/* x */ __device__ float m[4] = {1};": "only functions, types and constants",
    "namespace a { __device__ int n; }": "only functions, types and constants",
    'extern "C" { __device__ int y; }': "only functions, types and constants",
    "inline __device__ int z = 1;": "only functions, types and constants",
    "__global__ void k() { static int n; n++; }": "a static variable",
    "struct S { static __device__ int x; };": "a static variable",
    "#include <stdio.h>": "include headers of the device alone",
    '#include "/etc/passwd"': "include headers of the device alone",
    '__global__ void k() { asm("trap;"); }': "inline assembly is not allowed",
    '__global__ void k() { a\\\nsm("x"); }': "do not go on in the next line",
    "#define A a##b": "names are written as they are",
    "#define A(x) #x": "names are written as they are",
    "__global__ void k() { k<<<1, 1>>>(); }": "launches no others",
    "__global__ void k(long long* y) { y[0] = clock64(); }": "does not ask for the time",
    "__global__ void k() { cudaDeviceSynchronize(); }": "no library's",
    "__global__ void k() { float* p = new float[3]; }": "the heap outlives a launch",
    '__global__ void k() { printf("x"); }': "writes tensors only",
    '__global__ void k() { const char* s = "asm"; }': "needs no strings",
    "#pragma nv_abi x": "#pragma unroll alone",
    "#line 3": "#include, #define",
    "__global__ void k() { __trap(); }": "runs to its end",
    "%:define x": "the characters that are meant",
    "__managed__ int x;": "nothing is kept",
}


@pytest.mark.parametrize("text", FINE, ids=range(len(FINE)))
def test_what_kernels_do_is_allowed(text: str) -> None:
    assert cuda_violations(text) == ()


@pytest.mark.parametrize("text", FORBIDDEN)
def test_what_no_kernel_needs_is_refused(text: str) -> None:
    assert any(FORBIDDEN[text] in advice for _, _, advice in cuda_violations(text)), cuda_violations(text)


PYTHON = '''SIZE = 4
TEXT = r"""
__global__ void k(float* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = 1;
}
"""
k = cuda_kernel(TEXT, "k")


def entry(x):
    y = torch.empty_like(x)
    k[1, 32](y, x.numel())
    return (y,)
'''


def test_the_python_around_it_is_looked_at_as_ever() -> None:
    assert violations(PYTHON, "cuda") == () and look(PYTHON, "cuda") == ()
    told = {
        "y[threadIdx.x] = 1;": ("y[threadIdx.x] = clock();", "line 4: clock: a kernel does not ask for the time"),
        "    k[1, 32](y, x.numel())": ("    k.anything = 1", "line 12: k.anything =: no attribute is set"),
        'k = cuda_kernel(TEXT, "k")': ('k = cuda_kernel(TEXT + "", "k")', "line 7: cuda_kernel: give it a text that stands"),
        "    return (y,)": ("    return (cuda_kernel(TEXT, 'k'),)", "at the top of the file"),
        "SIZE = 4": ("import os", "line 1: import of os"),
        "x.numel())": ("x.data_ptr())", ".data_ptr: tells where memory is"),
    }  # fmt: skip
    for before, (after, message) in told.items():
        found = "\n".join(map(str, violations(PYTHON.replace(before, after, 1), "cuda")))
        assert message in found, (after, found)
    assert "cuda_kernel: nothing is computed when" in str(violations(PYTHON, "triton")[0]), "only CUDA's text has it"


def test_a_text_that_launches_none_of_its_kernels_stands_out() -> None:
    idle = PYTHON.replace("    k[1, 32](y, x.numel())\n", "")
    assert {f.rule for f in look(idle, "cuda")} == {"no-kernel", "unused-kernel"}
    assert [f.text for f in look(PYTHON + 'other = cuda_kernel(TEXT, "k")\n', "cuda")] == ["other"]
