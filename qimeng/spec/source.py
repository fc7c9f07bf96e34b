"""KernelBench-style source text: `Model`, `get_inputs`, `get_init_inputs`.

Deals in loading such a text in a module of its own and in rewriting its sizes. Knows nothing about devices, seeds or
what the model computes.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import types
from functools import lru_cache
from typing import Any

from qimeng.errors import SpecError

NEEDED = ("Model", "get_inputs", "get_init_inputs")


@lru_cache(64)
def load_text(text: str, name: str) -> types.ModuleType:
    """The text as a module of its own, so that nothing it defines meets anything else.

    Raises:
        SpecError: it does not run, or lacks one of the names it needs.
    """
    key = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    module = types.ModuleType(f"qimeng_spec_{key}")
    filename = f"<qimeng spec {name} {key}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    try:
        exec(compile(text, filename, "exec"), module.__dict__)
    except Exception as error:  # whatever a user's file raises
        raise SpecError(f"{name}: the file does not run: {type(error).__name__}: {error}") from error
    missing = [n for n in NEEDED if not hasattr(module, n)]
    if missing:
        raise SpecError(f"{name}: the file must define {', '.join(NEEDED)}; missing: {', '.join(missing)}")
    return module


def shrink_text(text: str, largest: int) -> str:
    """The text with the integers of its module-level assignments made smaller.

    Integers above 64 are divided by a power of two, so that what divides them still does, until they are at most
    `largest` (at least 16, so that groups and heads stay whole).
    """
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            node.value = _Shrink(largest).visit(node.value)
    return ast.unparse(tree)


class _Shrink(ast.NodeTransformer):
    def __init__(self, largest: int):
        self.largest = largest

    def visit_Constant(self, node: ast.Constant) -> ast.AST:  # noqa: N802
        if isinstance(node.value, int) and not isinstance(node.value, bool) and node.value > max(self.largest, 16):
            return ast.copy_location(ast.Constant(shrink_size(node.value, self.largest)), node)
        return node


def shrink_size(size: int, largest: int) -> int:
    """`size` divided by a power of two until it is at most `largest`, odd sizes staying odd.

    >>> shrink_size(8192, 64), shrink_size(4095, 64), shrink_size(48, 64)
    (64, 63, 48)
    """
    small = size
    while small > largest:
        small //= 2
    return small


def call(module: Any, function: str, name: str) -> list[Any]:
    """`module.function()` as a list.

    Raises:
        SpecError: it raises.
    """
    try:
        return list(getattr(module, function)())
    except Exception as error:  # whatever a user's file raises
        raise SpecError(f"{name}: {function}() failed: {type(error).__name__}: {error}") from error
