"""Importing this module does, once and before any fork, the slow part of Triton's first compilation.

Triton's cache keys hold a hash of its own binaries (about a second) and the version of ptxas. For the preload list of
a fork server whose children compile or launch kernels. Knows nothing about kernels.
"""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key

triton_key()
make_backend(GPUTarget("cuda", 80, 32)).hash()
make_backend(GPUTarget("cuda", 90, 32)).hash()
