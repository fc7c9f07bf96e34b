"""Loading source text whose kernels compile to the same cache entry wherever they stand.

Deals in modules made from text. Knows nothing about what the text computes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from qimeng.program.load import load_source

HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
"""What the text of a Triton kernel, and PyTorch's text of a region, finds above it."""


def load_kernels(source: str, folder: str | None = None) -> ModuleType:
    """`source` as a module.

    Triton's cache key holds the line on which a kernel starts, so that the same kernel in a longer file would be
    compiled again; here every kernel says that it starts on line 1.

    Args:
        source: Python text.
        folder: where to write the file; a new temporary folder by default.
    """
    module = load_source(source, "candidate", folder)
    for item in vars(module).values():
        _first_line(item)
    return module


def _first_line(item: Any) -> None:
    """Autotuners and heuristics wrap a kernel as `fn`."""
    for _ in range(8):
        if hasattr(item, "starting_line_number"):
            item.starting_line_number = 1
            return
        item = getattr(item, "fn", None)


__all__ = ["HEADER", "load_kernels"]
