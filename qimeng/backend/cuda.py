"""CUDA C++ as a backend: compiled by NVRTC, launched through the driver.

Deals in what it can do, in the names of a text's kernels, and in where its parts are: the functions that programs call
(`cuda_runtime`), and compiling for a device that is not here (`cuda_compile`). Knows nothing about what a text may hold
(`qimeng.envs.screening.allowed_cuda`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from qimeng.backend.base import Backend, Capabilities
from qimeng.backend.compiled import Compiled
from qimeng.device import Device
from qimeng.graph.opgraph import Meta
from qimeng.program.implementation import Implementation

_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*\)")
_GLOBAL = re.compile(r"__global__\b[^;{(]*?\b([A-Za-z_]\w*)\s*\(")
_START = "# ---- CUDA C++"


class CudaCpp(Backend):
    """CUDA C++ through NVRTC: for NVIDIA's GPUs, compiled without a driver, run on a GPU only.

    An implementation's Python text holds the CUDA C++ as a constant and a function that launches it with
    ``cuda_kernel(TEXT, "name")[grid, block](*arguments)``.
    """

    language = "cuda"
    title = "CUDA C++"
    capabilities = Capabilities(frozenset({"cuda"}), interpreter=False, cross_compiles=True, sanitizer=True)
    program_needs = """
Its CUDA C++ is compiled at the first call, by NVRTC through NVIDIA's package `cuda-bindings`. PyTorch's wheels for CUDA
bring both; otherwise: pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'
"""
    program_guard = '''
def _check_cuda(device):
    """Refuse tensors that no kernel of CUDA's can reach."""
    if device.type != "cuda":
        raise ValueError(f"made for an NVIDIA GPU, got tensors on {device}: move the module and its inputs there")

'''
    header = "import torch\nfrom qimeng.backend.cuda_runtime import cuda_aligned, cuda_kernel\n\n\n"

    def compile(
        self, implementation: Implementation, inputs: Sequence[Meta | None], device: Device, folder: str | None = None
    ) -> Compiled:
        """Compile every kernel that is launched by NVRTC; nothing is launched."""
        from qimeng.backend.cuda_compile import compile_here

        if missing := self.missing():
            return Compiled(error=missing, failure="setup")
        return compile_here(implementation, self.header, inputs, device, folder)

    def kernel_names(self, source: str) -> list[str]:
        """Names of the ``__global__`` functions."""
        return list(dict.fromkeys(_GLOBAL.findall(_BOUNDS.sub("", source))))

    def missing(self) -> str | None:
        """None where `cuda-bindings` is installed and finds NVRTC."""
        if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
            return "CUDA C++ needs the packages cuda-bindings and nvidia-cuda-nvrtc: pip install 'qimeng[cuda]'"
        return _nvrtc_missing()

    def tools(self, device: Device) -> str:
        """Version of NVRTC."""
        if self.missing():
            return ""
        from qimeng.backend.cuda_runtime import nvrtc_version

        return f"nvrtc {nvrtc_version()}"

    def program_header(self) -> str:
        """What the runtime imports."""
        return "import ctypes\nimport functools\nimport os\nimport re"

    def program_runtime(self) -> str:
        """The text of `cuda_runtime` below its imports."""
        return _runtime()

    def warm_up(self, folder: str) -> None:
        """Load NVRTC, so that forked processes have it."""
        self.missing()


@lru_cache(1)
def _runtime() -> str:
    text = Path(__file__).with_name("cuda_runtime.py").read_text()
    return text[text.index(_START) :].strip() + "\n"


@lru_cache(1)
def _nvrtc_missing() -> str | None:
    from qimeng.backend.cuda_runtime import CudaError, find_nvrtc

    try:
        find_nvrtc()
    except CudaError as error:
        return str(error)
    return None


__all__ = ["CudaCpp"]
