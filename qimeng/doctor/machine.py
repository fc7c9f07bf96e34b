"""What works on this machine.

Deals in versions, folders, the planner's weights, the layers of the sandbox, and in one small kernel that is compiled
and, with a GPU, run, without a sandbox and in a full one. Knows nothing about programs or benchmarks.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qimeng.backend.registry import backend_named
from qimeng.device import DEVICES, current_device, driver_version
from qimeng.doctor.check import Check
from qimeng.doctor.conformance import conformance
from qimeng.envs.sandbox import Sandbox
from qimeng.errors import QimengError
from qimeng.planner.lm.disk_cache import cache_folder

PACKAGES = (
    "torch triton numpy networkx gymnasium stable-baselines3 sb3-contrib transformers peft safetensors typer rich"
).split()

SPACE = 1 << 30
"""Bytes that a folder should have left."""

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def run(device):
    import torch

    x = torch.arange(100.0, device=device)
    y = torch.empty_like(x)
    double[(1,)](x, y, 100, BLOCK=128)
    return bool(torch.equal(y, 2 * x))


def compile_for(*archs):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=double, signature=signature, constexprs={(3,): 128})
    return all(triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["cubin"] for arch in archs)
"""
"""Compiled without PyTorch, which takes a process two seconds to import."""

CUDA_KERNEL = """
import torch
from qimeng.backend.cuda_runtime import cuda_compile, cuda_kernel

TEXT = '''
extern "C" __global__ void twice(const float* x, float* y, int n) {
    int i = threadIdx.x;
    if (i < n) y[i] = 2 * x[i];
}
'''
twice = cuda_kernel(TEXT, "twice")


def run(device):
    x = torch.arange(100.0, device=device)
    y = torch.empty_like(x)
    twice[1, 128](x, y, 100)
    return bool(torch.equal(y, 2 * x))


def compile_for(*archs):
    return all(cuda_compile(TEXT, ("twice",), f"sm_{arch}")[0] for arch in archs)
"""


def checks() -> tuple[Check, ...]:
    """Every check, in the order a reader wants them."""
    here = current_device()
    found = [Check("Python", sys.version_info >= (3, 11), f"{platform.python_version()} on {platform.platform()}")]
    found += [_package(name) for name in PACKAGES]
    found += [_folder("temporary files", Path(tempfile.gettempdir())), _folder("cache", cache_folder()), _planner()]
    if here is None:
        found.append(Check("GPU", None, "none: times are estimated and labelled so"))
    else:
        found.append(Check("GPU", True, f"{here.name}, {here.sms} SMs, {here.memory_bytes >> 30} GiB"))
        found.append(Check("GPU driver", True, driver_version()))
    archs = sorted({str(device.arch) for device in DEVICES.values() if device.kind == "cuda"}, key=int)
    found.append(_kernel(f"compile for sm_{', sm_'.join(archs)}", f"compile_for({', '.join(archs)})"))
    found.append(_cuda(f"CUDA C++ for sm_{', sm_'.join(archs)}", f"compile_for({', '.join(archs)})"))
    found.append(_compiled_once(archs[0]))
    found += conformance("cpu" if here is None else "cuda")
    if here is not None:
        found.append(_cuda("a kernel in CUDA C++ on the GPU", "run('cuda')"))
    found += _sandbox()
    found.append(_kernel("compile in a full sandbox", f"compile_for({archs[0]})", sandbox="full"))
    if here is not None:
        found.append(_kernel("a kernel on the GPU in a full sandbox", "run('cuda')", sandbox="full"))
    return tuple(found)


def _package(name: str) -> Check:
    try:
        return Check(name, True, version(name))
    except PackageNotFoundError:
        return Check(name, False, "not installed")


def _folder(name: str, path: Path) -> Check:
    """Whether files can be written there, and the space that is left."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Check(f"folder for {name}", False, f"{path}: {error}; set TMPDIR or QIMENG_CACHE to another")
    return Check(f"folder for {name}", free >= SPACE, f"{path}: {free / (1 << 30):.1f} GiB free")


def _planner() -> Check:
    """Whether the weights that come with the package can be read."""
    from qimeng.planner import make_planner

    try:
        make_planner("lm")
    except (QimengError, OSError, ValueError) as error:
        return Check("weights of the planner", False, f"{error}; install the package again")
    return Check("weights of the planner", True, "read")


def _compiled_once(arch: str) -> Check:
    """Whether a second process finds what a first one compiled: Triton's key must be the same in both."""
    name = "Triton's cache"
    with tempfile.TemporaryDirectory() as folder:
        counts = []
        for _ in range(2):
            made = _kernel(name, f"compile_for({arch})", TRITON_CACHE_DIR=folder)
            if not made.works:
                return made
            counts.append(len(os.listdir(folder)))
    if not counts[0]:
        return Check(name, False, "nothing is kept, so that every process compiles all kernels again")
    return Check(
        name, counts[0] == counts[1], "kept for other processes" if counts[0] == counts[1] else "not found again"
    )


def _sandbox() -> list[Check]:
    """A line for each layer of the sandbox. A missing layer is not an error."""
    try:
        report = Sandbox("full").layers_available()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [Check("sandbox", False, str(error))]
    found = [Check(f"sandbox: {name}", True, text) for name, text in report.entered.items()]
    return found + [Check(f"sandbox: {name}", None, f"missing: {text}") for name, text in report.skipped.items()]


def _cuda(name: str, call: str) -> Check:
    """The same for CUDA C++, whose packages not everybody needs."""
    missing = backend_named("cuda").missing()
    return _kernel(name, call, text=CUDA_KERNEL) if missing is None else Check(name, None, missing)


def _kernel(name: str, call: str, sandbox: str = "off", text: str = KERNEL, **variables: str) -> Check:
    """Run `call` on the kernel in its own process, so that a crash of a compiler or driver does not end the report."""
    with tempfile.TemporaryDirectory() as folder:
        return _kernel_in(folder, name, call, sandbox, text, variables)


def _kernel_in(folder: str, name: str, call: str, sandbox: str, text: str, variables: Mapping[str, str]) -> Check:
    program = (
        "from qimeng.envs.sandbox import Sandbox\n"
        f"Sandbox({sandbox!r}).enter({folder!r})\n"
        "from qimeng.program.load import load_source\n"
        f"module = load_source({text!r}, 'doctor')\n"
        f"assert module.{call}, 'wrong result'\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **variables},
        )
    except subprocess.TimeoutExpired:
        return Check(name, False, "no answer in 120 s")
    lines = done.stderr.strip().splitlines()
    return Check(name, done.returncode == 0, "" if done.returncode == 0 else (lines[-1] if lines else "no message"))


__all__ = ["checks"]
