"""Runs CUDA C++ text on the CPU, for tests alone: g++ compiles it under a header that plays the GPU.

Blocks run one after the other; the threads of a block are fibers that take turns, and stand still together at
`__syncthreads` and shuffles. That holds for kernels whose threads all meet the same barriers, as printed ones do. It
shows wrong indices and wrong arithmetic; it shows no race, and rounds by the CPU's libm.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from qimeng.backend import backend_named, cuda_runtime
from qimeng.backend.load import load_kernels
from qimeng.backend.registry import implementation_source

GXX = shutil.which("g++")
CONTRACTED = ("-O2", "-fno-strict-aliasing", "-mfma", "-ffp-contract=fast")
"""Options of a machine that has multiply-adds."""

SHIM = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(n)
#define __align__(n) __attribute__((aligned(n)))
struct dim3 { unsigned x, y, z; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;
using std::exp; using std::fabs;
template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }
typedef _Float16 __half;
struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) {
        uint32_t u; memcpy(&u, &f, 4);
        bits = f != f ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    }
    operator float() const { uint32_t u = uint32_t(bits) << 16; float f; memcpy(&f, &u, 4); return f; }
};
template <class To, class From> static To same_bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
static float __int_as_float(unsigned x) { return same_bits<float>(x); }
static int __float_as_int(float x) { return same_bits<int>(x); }
static double __longlong_as_double(long long x) { return same_bits<double>(x); }
static long long __double_as_longlong(double x) { return same_bits<long long>(x); }
static float __fsub_rn(float a, float b) { volatile float x = a; return x - b; }
static double __dsub_rn(double a, double b) { volatile double x = a; return x - b; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static double rsqrt(double x) { return 1 / sqrt(x); }

enum { STACK = 1 << 15 };
struct Fiber { ucontext_t context; char* stack; dim3 at; bool done; unsigned slot; };
typedef void (*Kernel)(void**);
static ucontext_t scheduler;
static Fiber* fibers;
static unsigned count, running;
static Kernel work;
static void** given;
static void wait_for_others() { swapcontext(&fibers[running].context, &scheduler); }
static void __syncthreads() { wait_for_others(); }
static void fiber_main() {
    work(given);
    fibers[running].done = true;
    swapcontext(&fibers[running].context, &scheduler);
}
static unsigned __shfl_down_sync(unsigned, unsigned value, int by) {
    unsigned own = running, lane = own % 32, from = lane + by < 32 && own + by < count ? own + by : own;
    fibers[own].slot = value;
    wait_for_others();
    unsigned got = fibers[from].slot;
    wait_for_others();
    return got;
}
static void launch(const unsigned* shape, Kernel kernel, void** arguments) {
    gridDim = {shape[0], shape[1], shape[2]}; blockDim = {shape[3], shape[4], shape[5]};
    work = kernel; given = arguments;
    count = blockDim.x * blockDim.y * blockDim.z;
    fibers = (Fiber*)calloc(count, sizeof(Fiber));
    for (unsigned i = 0; i < count; i++) fibers[i].stack = (char*)malloc(STACK);
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        for (unsigned i = 0; i < count; i++) {
            Fiber& f = fibers[i];
            f.done = false;
            f.at = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack; f.context.uc_stack.ss_size = STACK;
            f.context.uc_link = 0;
            makecontext(&f.context, fiber_main, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (running = 0; running < count; running++) {
                if (fibers[running].done) continue;
                left = true; threadIdx = fibers[running].at;
                swapcontext(&scheduler, &fibers[running].context);
            }
        }
    }
    for (unsigned i = 0; i < count; i++) free(fibers[i].stack);
    free(fibers);
}
"""


class Compiled:
    """Kernels of CUDA texts as functions of the CPU, kept in `folder`."""

    def __init__(self, folder: Path, options: tuple[str, ...] = ()):
        self.folder, self.known, self.options = folder, {}, options
        folder.mkdir(exist_ok=True)
        self.launches: list[str] = []

    def run(self, kernel, grid, block, *arguments, shared=0):
        """What takes the place of `CudaKernel.launch`."""
        values, types = kernel.bind(arguments)
        self.launches.append(kernel.name)
        space = (ctypes.c_void_p * len(values))()
        held = [kind(value) for value, kind in zip(values, types, strict=True)]
        for i, value in enumerate(held):
            space[i] = ctypes.addressof(value)
        shape = (ctypes.c_uint * 6)(*grid, *block)
        self._function(kernel)(space, shape)

    def run_as_method(self):
        """The same, for the class of a standalone program."""
        return lambda kernel, *arguments, **options: self.run(kernel, *arguments, **options)

    def together(self, implementations):
        """Compile the kernels of all `implementations` at once: most of g++'s time goes into its start.

        Where one does not compile, none is; its launch says why.
        """
        modules = [load_kernels(implementation_source(i)) for i in implementations]
        kernels = [k for m in modules for k in vars(m).values() if isinstance(k, cuda_runtime.CudaKernel)]
        with suppress(AssertionError):
            self._compile([s for s in dict.fromkeys(k.source for k in kernels) if s not in self.known])

    def _function(self, kernel):
        if kernel.source not in self.known:
            self._compile([kernel.source])
        library, number = self.known[kernel.source]
        return library[f"cpu{number}_{kernel.name}"]

    def _compile(self, sources):
        text = '#include "shim.h"\n' + "".join(_in_a_space(source, i) for i, source in enumerate(sources))
        key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        source, library = self.folder / f"{key}.cpp", self.folder / f"{key}.so"
        if not (self.folder / "shim.h").exists():
            (self.folder / "shim.h").write_text(SHIM)
            _compiled(*self.options, "-x", "c++-header", "-o", self.folder / "shim.h.gch", self.folder / "shim.h")
        source.write_text(text)
        _compiled(*self.options, "-shared", "-o", library, source)
        loaded = ctypes.CDLL(str(library))
        self.known |= {s: (loaded, i) for i, s in enumerate(sources)}


def _in_a_space(source, number):
    """The text in a namespace of its own, with functions that launch its kernels."""
    lines = (line for line in source.splitlines() if not line.startswith("#include"))
    text = "\n".join(lines).replace('extern "C" ', "")
    names = backend_named("cuda").kernel_names(source)
    entries = "".join(_entry(source, name, number) for name in names)
    return f"namespace space{number} {{\n{text}{entries}\n}}\n"


def _entry(source, name, number):
    """A function that launches the kernel `name`, from addresses of its arguments."""
    kinds = [f"{kind}{'*' if pointer else ''}" for kind, pointer, _ in cuda_runtime._parameters(source, name)]
    passed = ", ".join(f"*({kind}*)a[{i}]" for i, kind in enumerate(kinds))
    body = f"launch(shape, [](void** a) {{ {name}({passed}); }}, a);"
    return f'\nextern "C" void cpu{number}_{name}(void** a, const unsigned* shape) {{ {body} }}\n'


def _compiled(*arguments):
    command = [GXX, "-std=c++17", "-O0", "-w", "-fPIC", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


@contextmanager
def cuda_on_cpu(folder: Path, *options: str):
    """Launches of `cuda_kernel` run on the CPU meanwhile; gives what compiles them, with the names of those launched.

    Args:
        folder: where to keep what is compiled, always with the same options.
        options: more of g++'s, such as what makes multiply-adds as nvcc does (`CONTRACTED`).
    """
    compiled, before = Compiled(folder, options), cuda_runtime.CudaKernel.launch
    cuda_runtime.CudaKernel.launch = compiled.run_as_method()
    try:
        yield compiled
    finally:
        cuda_runtime.CudaKernel.launch = before


def call(implementation, *inputs: torch.Tensor):
    """The outputs of an implementation in CUDA C++."""
    module = load_kernels(implementation_source(implementation))
    return getattr(module, implementation.entry)(*inputs)
