"""Which problems a benchmark consists of.

Deals in files of a local KernelBench checkout and in the numbers a user asks for. It is the only module that looks at
a problem's name, and only to label rows: nothing that optimizes ever sees it. Knows nothing about what a problem
computes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qimeng.errors import QimengError

_FILE = re.compile(r"(\d+)_(.+)\.py")


class SuiteError(QimengError):
    """A folder that holds no such suite, or a selection that cannot be read."""


@dataclass(frozen=True)
class Problem:
    """One problem of a suite.

    Attributes:
        level: KernelBench's level, 1 to 4.
        number: its number in the level.
        name: the rest of the file's name; a label for people.
        path: the file, with `Model`, `get_inputs` and `get_init_inputs`.
    """

    level: int
    number: int
    name: str
    path: Path

    @property
    def id(self) -> str:
        """Level and number, ``"1/23"``."""
        return f"{self.level}/{self.number}"

    @cached_property
    def digest(self) -> str:
        """Content hash of the file, so that a changed problem is not mistaken for a finished one."""
        return hashlib.blake2b(self.path.read_bytes(), digest_size=8).hexdigest()


def load_kernelbench(root: Path | str, level: int, selection: str = "") -> tuple[Problem, ...]:
    """The problems of one level, in the order of their numbers.

    Args:
        root: a checkout of KernelBench, or its folder `KernelBench` with the levels in it.
        level: 1 to 4.
        selection: numbers and ranges such as ``"1,2,5-9"``; empty for all.

    Raises:
        SuiteError: no such folder, or a number that the level does not have.
    """
    folders = [Path(root) / "KernelBench" / f"level{level}", Path(root) / f"level{level}"]
    folder = next((f for f in folders if f.is_dir()), None)
    if folder is None:
        raise SuiteError(f"no KernelBench level {level} under {root} (looked for {folders[0]} and {folders[1]})")
    found: dict[int, Problem] = {}
    for path in folder.glob("*.py"):
        if match := _FILE.fullmatch(path.name):
            found[int(match[1])] = Problem(level, int(match[1]), match[2], path)
    wanted = parse_selection(selection) or sorted(found)
    missing = [n for n in wanted if n not in found]
    if missing:
        raise SuiteError(f"level {level} has no problem {', '.join(map(str, missing))} (in {folder})")
    return tuple(found[n] for n in wanted)


def load_levels(root: Path | str, levels: str, selection: str = "") -> tuple[Problem, ...]:
    """The problems of several levels.

    Args:
        root: as for `load_kernelbench`.
        levels: numbers, ``"1,2"``.
        selection: numbers and ranges, the same for each level, or each level's own: ``"1/1,2,5-9;2/12"``.

    Raises:
        SuiteError: as for `load_kernelbench`; or a selection for a level that is not asked for.
    """
    wanted, own = parse_selection(levels), {}
    for part in filter(None, (p.strip() for p in selection.split(";"))):
        level, slash, numbers = part.partition("/")
        if not slash:
            own.update(dict.fromkeys(wanted, part))
        elif parse_selection(level)[:1] and int(level) in wanted:
            own[int(level)] = numbers
        else:
            raise SuiteError(f"the selection {part!r} is of a level that is not asked for ({levels})")
    return tuple(p for level in (sorted(own) or wanted) for p in load_kernelbench(root, level, own.get(level, "")))


def parse_selection(text: str) -> list[int]:
    """Numbers in ascending order, each once.

    Raises:
        SuiteError: a part that is neither a number nor a range.

    >>> parse_selection("7, 1,2,5-7")
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


def format_selection(numbers: list[int]) -> str:
    """The inverse of `parse_selection`, with runs of three and more as ranges.

    >>> format_selection([1, 2, 5, 6, 7])
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
