"""Lines of a user's own code, for messages.

Deals in tracebacks and file names. Knows nothing about what went wrong.
"""

from __future__ import annotations

import re
import traceback

ELSEWHERE = ("/qimeng/", "site-packages", "dist-packages", "/lib/python")
"""Parts of the names of files that no user wrote for this computation."""


def line_of(error: BaseException) -> str:
    """`` (file, line N: `code`)`` of the last line of the user's own code that `error` came through; else of PyTorch's.

    Empty where it came through neither.
    """
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if _is_own(f.filename)] or [f for f in every if "/torch/nn/modules/" in f.filename]
    return _text(frames[-1].filename, frames[-1].lineno, frames[-1].line) if frames else ""


def line_in(trace: str) -> str:
    """The same of a traceback as text, such as a node of a graph holds; empty where none of it is the user's."""
    found = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', trace)
    own = [(file, int(number), text) for file, number, text in found if _is_own(file)]
    return _text(*own[-1]) if own else ""


def _text(file: str, number: int | None, text: str | None) -> str:
    if number is None:
        return ""
    code = f": `{text.strip()[:120]}`" if text and text.strip() else ""
    return f" ({file.rsplit('/', 1)[-1]}, line {number}{code})"


def _is_own(file: str) -> bool:
    """Whether a file is the user's: neither this package's nor an installed one, nor a text that a library ran."""
    return file != "<string>" and not any(part in file for part in ELSEWHERE)


__all__ = ["line_in", "line_of"]
