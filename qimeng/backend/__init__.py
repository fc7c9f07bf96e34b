"""Languages for kernels as declared capabilities: Triton, and CUDA C++ through NVRTC."""

from qimeng.backend.base import Backend, Capabilities
from qimeng.backend.compiled import Compiled
from qimeng.backend.facts import KernelFacts
from qimeng.backend.registry import GROUP, backend_named, backends, register_backend, unregister_backend

__all__ = [
    "GROUP",
    "Backend",
    "Capabilities",
    "Compiled",
    "KernelFacts",
    "backend_named",
    "backends",
    "register_backend",
    "unregister_backend",
]
