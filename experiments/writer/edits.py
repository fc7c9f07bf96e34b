"""An answer as search/replace edits of the code that the prompt shows, where that is shorter than the whole.

A step on a kernel changes few of its lines, and tokens decide how long training and answering take. Deals in text; the
form is that of `qimeng.coder.llm.reply`. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

NEAR = 2
"""Lines between two changes that are still one edit."""


def reply_of(answer: str, base: str | None) -> str:
    """The reply that means `answer`: edits of `base`, or all of it in a fence, whichever is shorter."""
    whole = f"```python\n{answer}```"
    edits = None if base is None else edits_of(answer, base)
    return edits if edits is not None and len(edits) < len(whole) else whole


def edits_of(answer: str, base: str) -> str | None:
    """Edits that make `answer` of `base`; None where the two are equal, or a place cannot be told from another."""
    old, new = base.splitlines(), answer.splitlines()
    if not _plain(base, old) or not _plain(answer, new):
        return None
    now, moved, text = list(old), 0, list[str]()
    for first, last, begin, end in _changes(old, new):
        place = _told_apart(now, first + moved, last + moved)
        if place is None:
            return None
        start, stop = place
        put = [*now[start : first + moved], *new[begin:end], *now[last + moved : stop]]
        text += ["<<<<<<< SEARCH", *now[start:stop], "=======", *put, ">>>>>>> REPLACE"]
        moved += len(put) - (stop - start)
        now[start:stop] = put
    return "\n".join(text) if text else None


def with_lines_of(base: str, answer: str, rewritten: str) -> str:
    """`rewritten`, which has a line for each of `answer`, but where `answer` and `base` share a line, with that line.

    So numbers that were not changed stay as the prompt shows them.
    """
    old, new, lines = base.splitlines(), answer.splitlines(), rewritten.splitlines(True)
    if len(lines) != len(new):
        return rewritten
    for tag, _, _, begin, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            lines[begin:end] = [f"{line}\n" for line in new[begin:end]]
    return "".join(lines)


def _plain(text: str, lines: Sequence[str]) -> bool:
    """Whether `text` is these lines, none with spaces at its end, the first and last not empty."""
    return (
        bool(lines)
        and "\n".join(lines) + "\n" == text
        and all(lines[n] for n in (0, -1))
        and not any(line != line.rstrip() for line in lines)
    )


def _changes(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """First and last line in `old` and in `new` of each change; near ones are one."""
    found: list[tuple[int, int, int, int]] = []
    for tag, first, last, begin, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        if found and first - found[-1][1] <= NEAR:
            found[-1] = found[-1][0], last, found[-1][2], end
        else:
            found.append((first, last, begin, end))
    return found


def _told_apart(lines: Sequence[str], start: int, stop: int) -> tuple[int, int] | None:
    """These lines with as many around them as it takes that they stand there once, no empty one at an end."""
    up = True
    while stop == start or not lines[start] or not lines[stop - 1] or _count(lines, lines[start:stop]) > 1:
        if start == 0 and stop == len(lines):
            return None
        if (up and start > 0) or stop == len(lines):
            start -= 1
        else:
            stop += 1
        up = not up
    return start, stop


def _count(lines: Sequence[str], some: Sequence[str]) -> int:
    return sum(lines[n : n + len(some)] == some for n in range(len(lines) - len(some) + 1))


__all__ = ["edits_of", "reply_of", "with_lines_of"]
