"""Numbers in kernel code as expressions of the region's extents, so that a small model copies rather than computes.

The template coder prints results of arithmetic: the grid ``(782,)`` of 50,000 columns in blocks of 64. Many expressions
have the value 782 by chance, and a model that is taught others at the same place each time learns none. So expressions
are counted over many sources first, by where a number stands, and the one that explains most of them is written. Python
and Triton fold it again; nothing else changes. Deals in text. Knows nothing about kernels.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from experiments.writer.quantities import FITTED, Quantity, integers, inverses

BEFORE, AFTER = 4, 2
"""Tokens by which the place of a number is known, beside the function that it stands in."""

MOST_GROUPS = 64
"""Numbers of the prompt up to this may be a number of groups."""

PLAIN = 16
"""Numbers up to this, and powers of two, are mostly somebody's choice, and in a prompt for other reasons."""


@dataclass(frozen=True)
class Code:
    """Code to be rewritten.

    Attributes:
        source: Python text.
        shapes: of the region's inputs and outputs, of which the last is one.
        prompt: text whose numbers can be copied.
    """

    source: str
    shapes: tuple[tuple[int, ...], ...]
    prompt: str = ""


class Expressions:
    """Which expression a number is, by its place, learnt from many sources.

    >>> code = Code("k[(16,)](x, B=64)", ((1000, 8),))
    >>> Expressions.of([code]).write(code)
    'k[((1000 + 63) // 64,)](x, B=64)'
    """

    def __init__(self, counts: Mapping[str, Counter[str]]) -> None:
        self._counts = counts

    @classmethod
    def of(cls, codes: Iterable[Code]) -> Expressions:
        """Count what explains the numbers of `codes`, at each place and at all of them."""
        counts: dict[str, Counter[str]] = {"": Counter()}
        for code in codes:
            for number, found in _explained(code):
                roles = {q.role for q in found}
                counts.setdefault(number.place, Counter()).update(roles)
                counts[""].update(roles)
        return cls(counts)

    def write(self, code: Code) -> str:
        """The source with each number as the expression that explains most numbers at its place."""
        lines = code.source.splitlines(True)
        for number, found in reversed(_explained(code)):
            best = self._best(number.place, found).text
            line = lines[number.row - 1]
            start, end = line[: number.column], line[number.column + number.width :]
            bare = " " not in best or (start.endswith("(") and end.startswith((",)", ")")))
            lines[number.row - 1] = start + (best if bare else f"({best})") + end
        return "".join(lines)

    def _best(self, place: str, found: Iterable[Quantity]) -> Quantity:
        """The first of those that explain most numbers; a quarter as many where a factor is chosen to fit."""
        counts = self._counts.get(place) or self._counts[""]
        return max(found, key=lambda q: counts[q.role] * (0.25 if q.role.startswith(FITTED) else 1))


@dataclass(frozen=True)
class Number:
    """An integer, or the inverse of one, in a source."""

    value: int
    text: str
    row: int
    column: int
    function: str
    in_grid: bool
    place: str

    @property
    def width(self) -> int:
        """Characters."""
        return len(self.text)

    @property
    def plain(self) -> bool:
        """Whether it is mostly somebody's choice."""
        return not self.in_grid and (self.value <= PLAIN or self.value & (self.value - 1) == 0)


def _explained(code: Code) -> list[tuple[Number, list[Quantity]]]:
    """The numbers of a source, in order, each with what it may be, what is preferred among equals first."""
    given = frozenset(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", code.prompt))
    groups = tuple(sorted({int(n) for n in given if n.isdecimal() and 1 < int(n) <= MOST_GROUPS}))
    blocks = _blocks(code.source)
    found = []
    for number in _numbers(code.source):
        itself = Quantity(f"literal {number.text}", number.text)
        if number.text.isdecimal():
            own = tuple(sorted(blocks.get(number.function, {}).items()))
            others = ((name, sizes) for name, sizes in sorted(blocks.items()) if name != number.function)
            named = tuple((f"{name}.{key}", size) for name, sizes in others for key, size in sorted(sizes.items()))
            some = list(integers(number.value, code.shapes, groups, own, named))
        else:
            some = inverses(number.value, code.shapes, groups)
        if number.plain:
            some = [itself, *some]
        elif number.text in given and not number.in_grid:
            some = [Quantity("copy", number.text), *some, itself]
        else:
            some = [*some, itself]
        found.append((number, some))
    return found


def _numbers(source: str) -> Iterator[Number]:
    """The numbers of a source with where they stand, but for those of arguments by keyword."""
    grids = {
        (number.lineno, number.col_offset): name
        for name, grid, _ in _launches(source)
        for number in ast.walk(grid)
        if isinstance(number, ast.Constant)
    }
    functions = sorted(
        (node.lineno, node.end_lineno or 0, node.name)
        for node in _parsed(source).body
        if isinstance(node, ast.FunctionDef)
    )
    kinds = (tokenize.NUMBER, tokenize.NAME, tokenize.OP, tokenize.NEWLINE, tokenize.STRING)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type in kinds]
    words = ["\n" if t.type == tokenize.NEWLINE else re.sub(r"\d+", "#", t.string) for t in tokens]
    for i, token in enumerate(tokens):
        value = _value(token.string) if token.type == tokenize.NUMBER else None
        if value is None or (words[i - 1] == "=" and words[i + 1] in (",", ")")):
            continue
        row, column = token.start
        in_grid = token.start in grids
        function = grids.get(token.start) or next((f for first, last, f in functions if first <= row <= last), "")
        before = words[max(0, i - BEFORE) : i]
        while "\n" in before:
            before = before[before.index("\n") + 1 :]
        place = " ".join((function, "[]" if in_grid else ":", *before, "_", *words[i + 1 : i + 1 + AFTER]))
        yield Number(value, token.string, row, column, function, in_grid, place)


def _value(text: str) -> int | None:
    """An integer, or what a fraction is the inverse of; None for other numbers."""
    if text.isdecimal():
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    inverse = round(1 / number) if 0 < number < 1 else 0
    return inverse if inverse > 1 and repr(1 / inverse) == text else None


@lru_cache(4)
def _parsed(source: str) -> ast.Module:
    """The syntax of a source, which is asked for several times in turn."""
    return ast.parse(source)


def _launches(source: str) -> Iterator[tuple[str, ast.expr, list[ast.keyword]]]:
    """Each launch: the name of the kernel, the grid, the arguments by keyword."""
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            kernel, grid = node.func.value, node.func.slice
            if isinstance(kernel, ast.Name):
                yield kernel.id, grid, node.keywords


def _blocks(source: str) -> dict[str, dict[str, int]]:
    """The block sizes of each kernel that is launched, by its name and theirs."""
    found: dict[str, dict[str, int]] = {}
    for name, _, keywords in _launches(source):
        for k in keywords:
            if k.arg not in (None, "num_warps", "num_stages") and isinstance(k.value, ast.Constant):
                size = k.value.value
                if type(size) is int and size > 1:
                    found.setdefault(name, {})[str(k.arg)] = size
    return found


__all__ = ["Code", "Expressions"]
