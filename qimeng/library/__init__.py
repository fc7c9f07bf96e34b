"""Implementations of a region by a library: the vendor's kernels through PyTorch, or torch.compile's.

One library call, one file. They count as library, never as generated, and the framework prints every text itself.
"""

from qimeng.library.base import LANGUAGE, LibraryCall, NotOffered
from qimeng.library.inductor import COMPILE_S, REGION, compiles
from qimeng.library.registry import CALLS, CHOSEN, call_of, is_library, largest_group, written

__all__ = [
    "CALLS",
    "CHOSEN",
    "COMPILE_S",
    "LANGUAGE",
    "LibraryCall",
    "NotOffered",
    "REGION",
    "call_of",
    "compiles",
    "is_library",
    "largest_group",
    "written",
]
