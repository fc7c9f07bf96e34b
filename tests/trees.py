"""The syntax tree of a source file, parsed once in a process, for the tests that read the sources."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree; whoever gets it leaves it as it is."""
    return ast.parse(path.read_text())
