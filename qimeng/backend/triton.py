"""Triton as a backend.

Deals in what Triton can do, and in where its parts are: compiling (`triton_compile`), a driver for a device that is not
here (`triton_driver`), its caches (`triton_cache`). Importing this module does not import Triton.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qimeng.backend.base import Backend, Capabilities
from qimeng.backend.compiled import Compiled
from qimeng.backend.load import HEADER
from qimeng.device import Device
from qimeng.graph.opgraph import Meta
from qimeng.program.implementation import Implementation

_JIT = re.compile(r"@(?:triton\.)?jit\b.*\n(?:@.*\n)*def (\w+)")


class Triton(Backend):
    """Triton: Python functions compiled for NVIDIA's and AMD's GPUs, and interpreted on a CPU."""

    language = "triton"
    title = "Triton"
    capabilities = Capabilities(frozenset({"cuda", "hip"}), interpreter=True, cross_compiles=True, sanitizer=True)
    header = HEADER

    def compile(
        self, implementation: Implementation, inputs: Sequence[Meta | None], device: Device, folder: str | None = None
    ) -> Compiled:
        """Compile every kernel by Triton's own launcher under a driver that stands for `device`."""
        from qimeng.backend.triton_compile import compile_here

        return compile_here(implementation, self.header, inputs, device, folder)

    def kernel_names(self, source: str) -> list[str]:
        """Names of the functions under ``@triton.jit``."""
        return list(dict.fromkeys(_JIT.findall(source)))

    def missing(self) -> str | None:
        """None where Triton is installed."""
        from importlib.util import find_spec

        return None if find_spec("triton") else "Triton is not installed: pip install 'triton>=3.6,<3.9'"

    def tools(self, device: Device) -> str:
        """Versions of Triton and of the assembler that it calls."""
        if self.missing():
            return ""
        from qimeng.backend.triton_cache import tools

        return tools(device)

    def program_header(self) -> str:
        """Triton's imports."""
        return "import triton\nimport triton.language as tl"

    def warm_up(self, folder: str) -> None:
        """Hash Triton's files and build its C module once."""
        from qimeng.backend.triton_cache import warm_up

        warm_up(folder)

    def adopt(self, folder: str) -> None:
        """Take the C module over."""
        from qimeng.backend.triton_cache import adopt

        adopt(folder)


__all__ = ["Triton"]
