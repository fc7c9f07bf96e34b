"""What every process that compiles or launches Triton kernels needs, done once in the server that it is forked from.

Deals in Triton's own files: hashes of them, its C module for talking to CUDA, cache folders. Knows nothing about
kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from importlib import import_module

import torch

from qimeng.device import Device

LAUNCHER = "__triton_launcher"
"""What the file of the C code that launches a kernel is called, up to its suffix."""
NO_LINK = (AssertionError, OSError, ImportError, RuntimeError, subprocess.CalledProcessError, AttributeError)
"""What Triton raises where its C code cannot be compiled or linked, as on a machine without a CUDA driver."""


def warm_up(folder: str) -> None:
    """Hash Triton's own files, ask ptxas for its version, build the C module; for a server, before it forks.

    An operator on a tensor without data makes PyTorch import sympy, which takes longer than compiling a kernel. The
    first launch makes Triton import Gluon, for the types of its arguments.

    Args:
        folder: becomes Triton's cache folder of the server: its C module is in it, and no kernel.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    torch.empty_like(torch.empty(1, device="meta"))
    with suppress(ImportError):  # where a version of Triton keeps it elsewhere, each process finds it
        import_module("triton.experimental.gluon.nvidia.hopper")
    triton_key()
    make_backend(GPUTarget("cuda", 90, 32)).hash()
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = folder
    _build_c_module()
    if before is None:
        del os.environ["TRITON_CACHE_DIR"]
    else:
        os.environ["TRITON_CACHE_DIR"] = before


def tools(device: Device) -> str:
    """Versions of Triton and of the assembler that it calls for `device`; empty where the assembler does not run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    try:
        assembler = make_backend(GPUTarget(device.kind, device.arch, device.warp_size)).hash()
    except NO_LINK:
        return ""
    return f"triton {triton.__version__}, {' '.join(str(assembler).split())}"


def adopt(folder: str) -> None:
    """Put what the server has built in `folder` into this process's own cache, if that is empty or missing."""
    own = os.environ.get("TRITON_CACHE_DIR", "")
    if own and os.path.isdir(folder) and not (os.path.isdir(own) and os.listdir(own)):
        shutil.copytree(folder, own, dirs_exist_ok=True)


def _build_c_module() -> None:
    from triton.backends.nvidia.driver import CudaUtils

    try:
        CudaUtils()
    except NO_LINK:
        return


__all__ = ["LAUNCHER", "NO_LINK", "adopt", "tools", "warm_up"]
