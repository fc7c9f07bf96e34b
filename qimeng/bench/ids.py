"""Ids of problems: their order, and selections of them as people write them.

Deals in text. Knows nothing about suites or specs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from qimeng.errors import QimengError


class SuiteError(QimengError):
    """A suite that cannot be read, or a selection that names none of its problems."""

    code = "suite"


def natural(id: str) -> tuple[tuple[int, str], ...]:
    """Sort key by which ``level1/2`` comes before ``level1/10``.

    >>> sorted(["a/10", "a/2", "a"], key=natural)
    ['a', 'a/2', 'a/10']
    """
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", id))


def parse_numbers(text: str) -> list[int]:
    """Numbers in ascending order, each once.

    Raises:
        SuiteError: a part that is neither a number nor a range.

    >>> parse_numbers("7, 1,2,5-7")
    [1, 2, 5, 6, 7]
    """
    numbers: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise SuiteError(f"cannot read {part!r} in the selection {text!r}; write numbers and ranges: 1,2,5-9")
        first = int(match[1])
        numbers.update(range(first, int(match[2] or first) + 1))
    return sorted(numbers)


def format_numbers(numbers: Iterable[int]) -> str:
    """The inverse of `parse_numbers`, with runs of three and more as ranges.

    >>> format_numbers([1, 2, 5, 6, 7])
    '1,2,5-7'
    """
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs]
    return ",".join(parts)


def format_ids(ids: Iterable[str]) -> str:
    """Ids for people, with numbers that share a prefix together.

    >>> format_ids(["level1/2", "level1/1", "level1/3", "softmax"])
    'softmax; level1/1-3'
    """
    parts: dict[str, list[str]] = {}
    for id in sorted(set(ids), key=natural):
        prefix, slash, last = id.rpartition("/")
        parts.setdefault(prefix + slash, []).append(last)
    return "; ".join(
        prefix + (format_numbers(map(int, last)) if all(n.isdecimal() for n in last) else ",".join(last))
        for prefix, last in sorted(parts.items())
    )


__all__ = ["SuiteError", "format_ids", "format_numbers", "natural", "parse_numbers"]
