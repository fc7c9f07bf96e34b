"""KernelBench as a suite: the files of a local checkout, ``level1/19`` for `KernelBench/level1/19_ReLU.py`.

Deals in folders, file names and the numbers a user asks for. Knows nothing about what a problem computes. KernelBench:
https://github.com/ScalingIntelligence/KernelBench; its problems are not part of this repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qimeng.bench.ids import SuiteError, parse_numbers
from qimeng.bench.suite import Problem, SpecFile, Suite, problems_of

_FILE = re.compile(r"(\d+)_(.+)\.py")


class KernelBench(Suite):
    """The problems of a checkout, by level and number.

    Args:
        root: a checkout of KernelBench, or its folder `KernelBench` with the levels in it.
        levels: which levels; those that are there by default.

    Raises:
        SuiteError: there is no such level.
    """

    name = "kernelbench"

    def __init__(self, root: Path | str, levels: Sequence[int] = ()):
        self.root = Path(root)
        self.levels = tuple(levels) or tuple(n for n in range(1, 5) if any(f.is_dir() for f in self._folders(n)))
        if not self.levels:
            raise SuiteError(f"no KernelBench level under {root} (looked for KernelBench/level1 and level1)")
        for level in self.levels:
            self._folder(level)

    def problems(self) -> Iterator[tuple[str, SpecFile]]:
        """The files, by level and number."""
        for level in self.levels:
            found = {int(m[1]): p for p in self._folder(level).glob("*.py") if (m := _FILE.fullmatch(p.name))}
            for number, path in sorted(found.items()):
                yield f"level{level}/{number}", SpecFile(path, path.stem.partition("_")[2])

    def _folders(self, level: int) -> tuple[Path, Path]:
        return self.root / "KernelBench" / f"level{level}", self.root / f"level{level}"

    def _folder(self, level: int) -> Path:
        folders = self._folders(level)
        folder = next((f for f in folders if f.is_dir()), None)
        if folder is None:
            raise SuiteError(
                f"no KernelBench level {level} under {self.root} (looked for {folders[0]} and {folders[1]})"
            )
        return folder


def load_levels(root: Path | str, levels: str = "1", selection: str = "") -> tuple[Problem, ...]:
    """The problems of some levels.

    Args:
        root: as for `KernelBench`.
        levels: numbers, ``"1,2"``.
        selection: numbers and ranges, the same for each level, or each level's own: ``"1/1,2,5-9;2/12"``.

    Raises:
        SuiteError: no such folder, a number that a level does not have, or a level that is not asked for.
    """
    wanted = _numbers_by_level(parse_numbers(levels), selection)
    found = {p.id: p for p in problems_of(KernelBench(root, tuple(wanted)))}
    chosen: list[Problem] = []
    for level, numbers in wanted.items():
        missing = [n for n in numbers if f"level{level}/{n}" not in found]
        if missing:
            raise SuiteError(f"level {level} has no problem {', '.join(map(str, missing))} (in {root})")
        ids = [f"level{level}/{n}" for n in numbers]
        chosen += [found[id] for id in ids] or [p for p in found.values() if p.group == f"level{level}"]
    return tuple(chosen)


def _numbers_by_level(levels: Sequence[int], selection: str) -> Mapping[int, list[int]]:
    own: dict[int, set[int]] = {}
    for part in filter(None, (p.strip() for p in selection.split(";"))):
        level, slash, numbers = part.partition("/")
        if slash and not (parse_numbers(level)[:1] and int(level) in levels):
            asked = ",".join(map(str, levels))
            raise SuiteError(f"the selection {part!r} is of a level that is not asked for ({asked})")
        for each in [int(level)] if slash else levels:
            own.setdefault(each, set()).update(parse_numbers(numbers if slash else part))
    return {level: sorted(own.get(level, ())) for level in sorted(own) or levels}


__all__ = ["KernelBench", "load_levels"]
