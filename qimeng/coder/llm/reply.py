"""Reading a reply: a whole implementation in fenced blocks, or edits of the present one.

- A model's thoughts (``<think>``) are ignored. An answer that was cut off is not read at all.
- All fenced blocks that are Python are read as one file, in their order, whatever language their fence names and
  whether or not the last one is closed; `qimeng.coder.llm.source` says which definitions count. Without a fence, the
  longest stretch of lines that is Python and defines a function is read.
- Fenced blocks that are no Python and have a ``__global__`` are CUDA C++: they become one text, which the Python finds
  as `CUDA` (`cuda_kernel(CUDA, "name")`).
- If there are search/replace edits, only they count. They apply in order. Each must be found exactly once, ignoring
  spaces at the ends of lines.

Deals in text. Knows nothing about models or whether the code is right.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator

from qimeng.coder.llm.chat import ChatError, Reply
from qimeng.coder.llm.shown import ENTRY
from qimeng.coder.llm.source import implementation_of
from qimeng.graph.region import Region
from qimeng.program.program import Implementation

LONGEST = 400_000
"""Characters of an answer that are read."""

_LAUNCHER = (
    "launch it from a block fenced by ```python: "
    '`kernel = cuda_kernel(CUDA, "kernel")`, and a function `region` that calls `kernel[grid, block](...)`'
)

_ATTEMPTS = 20
_FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*([\w+#.-]*)")
_SEARCH = re.compile(r"\s*<{5,}(\s*SEARCH)?\s*")
_MIDDLE = re.compile(r"\s*={5,}\s*")
_REPLACE = re.compile(r"\s*>{5,}(\s*REPLACE)?\s*")
_DECLINED = re.compile(
    r"\W*((i('m| am) )?(very )?(sorry|apologi[sz]e)|i (cannot|can not|can't|won't|am unable)|as an ai\b)", re.I
)
_BEGINS = re.compile(r"(import |from |@|def |class )")


def read_reply(
    reply: Reply, region: Region, base: str | None = None, present: Implementation | None = None
) -> Implementation:
    """The implementation of `region` that `reply` holds.

    Args:
        reply: what a model answered.
        region: what should be implemented.
        base: the text that edits apply to; None where only a whole implementation will do.
        present: what `base` shows.

    Raises:
        ChatError: of kind ``"refusal"``, ``"empty"``, ``"cut-off"`` or ``"format"``; the message says what to do.
    """
    text = _answer(reply)
    edits = list(_edits(text))
    try:
        if edits:
            return implementation_of(_edited(base, edits), region, present)
        return implementation_of(_whole(text), region)
    except SyntaxError as error:
        raise ChatError(f"with the edits it is no Python: line {error.lineno}: {error.msg}", "format") from None
    except (RecursionError, MemoryError):
        raise ChatError("the answer is nested too deeply to be read", "format") from None


def read_file(reply: Reply) -> str:
    """The Python file that `reply` holds.

    Raises:
        ChatError: as for `read_reply`.
    """
    return _whole(_answer(reply))


def _answer(reply: Reply) -> str:
    """The answer without thoughts, with normalized line ends."""
    if reply.finish == "refusal":
        raise ChatError(f"the model declined: {reply.text.strip()[:200] or 'no reason given'}", "refusal")
    if reply.finish == "length":
        said = f"after {reply.reply_tokens} tokens" if reply.reply_tokens else "before its end"
        raise ChatError(f"the answer was cut off {said}; answer shorter: the code and nothing else", "cut-off")
    if not reply.text.strip():
        raise ChatError("the model answered nothing", "empty")
    if len(reply.text) > LONGEST:
        raise ChatError(f"the answer has {len(reply.text)} characters; at most {LONGEST} are read", "format")
    text = reply.text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").replace("\t", "    ")
    text = text.encode("utf-8", "replace").decode()  # JSON may hold half of a pair of surrogates
    for tag in ("think", "thinking", "reasoning"):
        _, closed, rest = text.rpartition(f"</{tag}>")
        text = rest if closed else text
        if text.lstrip().startswith(f"<{tag}>"):
            raise ChatError("the answer ends within the model's thoughts; answer with the code", "format")
    return text


def _edits(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Lines to search for and lines to put there, of each edit.

    Raises:
        ChatError: (``"format"``) an edit without an end.
    """
    part, parts = -1, ([], [])  # type: tuple[int, tuple[list[str], list[str]]]
    for line in text.split("\n"):
        if _SEARCH.fullmatch(line) and part == -1:
            part, parts = 0, ([], [])
        elif _MIDDLE.fullmatch(line) and part == 0:
            part = 1
        elif _REPLACE.fullmatch(line) and part == 1:
            part = -1
            yield parts
        elif part >= 0:
            parts[part].append(line.rstrip())
    if part >= 0:
        missing = "=======" if part == 0 else ">>>>>>> REPLACE"
        raise ChatError(f"an edit has no end: the line `{missing}` is missing", "format")


def _edited(base: str | None, edits: list[tuple[list[str], list[str]]]) -> str:
    """`base` with all edits."""
    if base is None:
        raise ChatError("there is no text to edit here; answer with the whole implementation", "format")
    start = text = "\n" + "\n".join(line.rstrip() for line in base.split("\n")).strip("\n") + "\n"
    for number, (search, replacement) in enumerate(edits, 1):
        wanted = "\n" + "\n".join(search).strip("\n") + "\n"
        found = text.count(wanted) if wanted.strip() else 0
        if found != 1:
            what = (
                "has no text to search for"
                if not wanted.strip()
                else f"searches for text that stands there {found} times"
            )
            raise ChatError(
                f"edit {number} {what}; copy whole lines of the present text that stand there once", "format"
            )
        text = text.replace(wanted, "\n" + "".join(f"{line}\n" for line in replacement))
    if text == start:
        raise ChatError("the edits change nothing", "format")
    return text.strip("\n") + "\n"


def _whole(text: str) -> str:
    """All that is Python in `text`, as one file."""
    blocks = list(_blocks(text))
    if not blocks:
        found = _unfenced(text.split("\n"))
        if found is not None:
            return found
        if _DECLINED.match(text[:200]):
            raise ChatError(f"the model declined: {text.strip()[:200]}", "refusal")
        raise ChatError("the answer has no code; answer with one block fenced by ```python and ```", "format")
    problems = {number: _problem(body) for number, (_, body) in enumerate(blocks)}
    device = [body for number, (_, body) in enumerate(blocks) if problems[number] and "__global__" in body]
    good = [body for number, (_, body) in enumerate(blocks) if problems[number] is None]
    joined = "\n\n".join([*_embedded(device, good), *good]) + "\n"
    if any(f"def {ENTRY}(" in body for body in good):
        return joined
    if device:
        raise ChatError(f"the answer has CUDA C++ and no function `{ENTRY}`; {_LAUNCHER}", "format")
    for number, (language, _) in enumerate(blocks):
        if problems[number] is not None and language in ("", "python", "py", "python3", "triton"):
            raise ChatError(f"a block of the answer is no Python: {problems[number]}", "format")
    return joined


def _embedded(device: list[str], good: list[str]) -> list[str]:
    """The statement by which the Python finds the CUDA C++ of an answer; nothing where there is none."""
    if not device:
        return []
    text = "\n\n".join(device).strip("\n")
    if '"""' in text or text.endswith("\\"):
        raise ChatError('the CUDA C++ holds `"""` or ends in a backslash; write it without', "format")
    if good and not any(re.search(r"\bCUDA\b", body) for body in good):
        raise ChatError(f"nothing uses the CUDA C++ of the answer; {_LAUNCHER}", "format")
    return [f'CUDA = r"""\n{text}\n"""']


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and contents of each fenced block; one that is not closed goes on to the end, or to the next one."""
    fence, language, lines = "", "", []  # type: tuple[str, str, list[str]]
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if fence and (found is None or found[1][0] != fence[0] or len(found[1]) < len(fence)):
            lines.append(line)
        elif found:
            if fence:
                yield language, textwrap.dedent("\n".join(lines))
            opens = not fence or bool(found[2])
            fence, language, lines = (found[1], found[2].lower(), []) if opens else ("", "", [])
    if fence and any(lines):
        yield language, textwrap.dedent("\n".join(lines))


def _unfenced(lines: list[str]) -> str | None:
    """The first stretch of lines that is Python and defines a function; prose after it is cut off where it begins."""
    starts = [n for n, line in enumerate(lines) if _BEGINS.match(line)]
    for start in starts[:_ATTEMPTS]:
        end = len(lines)
        for _ in range(_ATTEMPTS):
            body = "\n".join(lines[start:end])
            line = _bad_line(body)
            if line is None:
                if "def " in body:
                    return body + "\n"
                break
            end = start + line - 1
            if end <= start:
                break
    return None


def _bad_line(text: str) -> int | None:
    """The line where `text` stops being Python; None where it is."""
    try:
        _parse(text)
    except SyntaxError as error:
        return max(1, error.lineno or 1)
    return None


def _problem(text: str) -> str | None:
    """Why `text` is no Python; None where it is."""
    try:
        _parse(text)
    except SyntaxError as error:
        line = (error.text or "").strip()[:120]
        return f"line {error.lineno}: {error.msg}" + (f": {line}" if line else "")
    return None


def _parse(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in strings
        ast.parse(text)


__all__ = ["LONGEST", "read_file", "read_reply"]
