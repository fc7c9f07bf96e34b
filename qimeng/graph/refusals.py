"""Why a computation cannot be one graph, in words: what stands in the way, the line of code, and what to do.

Deals in the errors of torch.export, whose classes and messages are not documented, and in nodes of its graphs. Knows
nothing about how a graph is made.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

VALUES = "its Python code depends on the values of a tensor"
NUMPY = "it leaves PyTorch, for NumPy or for numbers of a tensor"
INSTEAD = (
    "To have the rest optimized, move that step into a submodule of its own, which then stays as it is; or use a mask "
    "or torch.where; or pass numbers and flags as Python numbers"
)
RETURNS = "it returns a number, or a tensor of a size, that depends on the values of a tensor"
RETURN_INSTEAD = (
    "To have it optimized, return tensors of fixed size (a mask, or padding), or optimize the part before it"
)

_VALUES = ("DataDependent", "PendingUnbacked", "UserError")
_NUMPY = (".numpy()", "FakeTensor", "is not allocated yet", "data_ptr")


def of_export(error: BaseException) -> str:
    """What torch.export refused, in words.

    Args:
        error: what it raised, with its traceback.
    """
    first, name = (str(error).strip().splitlines() or [""])[0], type(error).__name__
    if any(word in name for word in _VALUES) or "unbacked" in first:
        return f"{VALUES}{_line(error)}. {INSTEAD}"
    if "DynamicOutputShape" in name:
        return f"the size of what {first.removesuffix('.default')} yields depends on values{_line(error)}. {INSTEAD}"
    if any(word in first for word in _NUMPY):
        return f"{NUMPY}{_line(error)}. {INSTEAD}"
    return f"torch.export: {name}: {first[:300]}{_line(error)}"


def of_result(node: Any) -> str:
    """That a node of an exported graph, which is a result, depends on values."""
    return f"{RETURNS}{_where(*_last(node.meta.get('stack_trace') or ''))}. {RETURN_INSTEAD}"


def _line(error: BaseException) -> str:
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if _is_own(f.filename)] or [f for f in every if "/torch/nn/modules/" in f.filename]
    return _where(frames[-1].filename, frames[-1].lineno, frames[-1].line) if frames else ""


def _last(trace: str) -> tuple[str, int | None, str | None]:
    """File, number and text of the last line of the user's own code in a node's trace."""
    found = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', trace)
    own = [(file, int(number), text) for file, number, text in found if _is_own(file)]
    return own[-1] if own else ("", None, None)


def _where(file: str, number: int | None, text: str | None) -> str:
    if number is None:
        return ""
    code = f": `{text.strip()[:120]}`" if text and text.strip() else ""
    return f" ({file.rsplit('/', 1)[-1]}, line {number}{code})"


def _is_own(file: str) -> bool:
    """Whether a file is the user's: neither this package's nor an installed one, nor a text that a library ran."""
    return file != "<string>" and not any(
        part in file for part in ("/qimeng/", "site-packages", "dist-packages", "/lib/python")
    )


__all__ = ["INSTEAD", "NUMPY", "RETURNS", "RETURN_INSTEAD", "VALUES", "of_export", "of_result"]
