"""Makes kernels of a program do nothing, to see whether its result needs them.

Deals in the text of implementations that no template printed. A kernel that is launched beside the work of PyTorch or a
library takes time of its own, and in a short call a good share of it. But where it does nothing, the result stays
right. Knows nothing about results.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from qimeng.envs.screening.origin import foreign
from qimeng.envs.workers.kernel_launches import kernel_names
from qimeng.program.program import Implementation, Program


def with_idle_kernels(program: Program) -> Iterator[Program]:
    """`program` with the kernels of one implementation made idle, for each that is generated and untrusted.

    An implementation is left out where the beginning of one of its kernels is not found.
    """
    for written in foreign(program):
        idle = idle_text(written) if written.generated else None
        if idle is None:
            continue
        changed = program
        for region in program.regions:
            if program.implementation(region) == written:
                changed = changed.with_implementation(region.id, replace(written, source=idle))
        yield changed


def idle_text(implementation: Implementation) -> str | None:
    """The text of `implementation` with kernels that return at once; None where there are none, or one is not found."""
    names, found = set(kernel_names(implementation)), set()
    tree = ast.parse(implementation.source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.body = [ast.Return()]
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "__global__" in node.value:
            for name in names:
                node.value, count = _idle_in_c(node.value, name)
                found.update([name] * bool(count))
    return ast.unparse(ast.fix_missing_locations(tree)) if names and found == names else None


def _idle_in_c(text: str, name: str) -> tuple[str, int]:
    """C++ with functions called `name` that return at once, and how many there are.

    >>> _idle_in_c("__global__ void add(float* x) { f(x); } // add(x);", "add")
    ('__global__ void add(float* x) {return; f(x); } // add(x);', 1)
    """
    begins = []
    for match in re.finditer(rf"\b{re.escape(name)}\s*\(", text):
        end, depth = match.end(), 1
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if body := re.compile(r"\s*\{").match(text, end):
            begins.append(body.end())
    for at in reversed(begins):
        text = f"{text[:at]}return;{text[at:]}"
    return text, len(begins)


__all__ = ["idle_text", "with_idle_kernels"]
