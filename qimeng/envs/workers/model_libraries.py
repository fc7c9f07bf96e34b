"""Libraries of models that processes should not import one by one: some take ten seconds.

Deals in names of modules. Knows nothing about processes.
"""

from __future__ import annotations

import sys

from qimeng.spec import KernelSpec

LIBRARIES = ("timm", "torchvision", "transformers")
"""Packages that may be imported before a process is forked: they neither use CUDA then nor start threads."""


def library_modules(spec: KernelSpec) -> tuple[str, ...]:
    """Modules of `LIBRARIES` that a computation uses and this process has imported, in the order of their import."""
    used = spec.origin.packages & set(LIBRARIES)
    return tuple(name for name in list(sys.modules) if name.partition(".")[0] in used)


__all__ = ["LIBRARIES", "library_modules"]
