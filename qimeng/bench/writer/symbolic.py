"""Numbers in kernel code as expressions of the region's extents, so that a small model copies rather than computes.

The template coder prints results of arithmetic: the grid ``(782,)`` of 50,000 columns in blocks of 64. Each such number
is replaced by an expression of equal value, which Python or Triton folds again; nothing else changes. Deals in text and
integers. Knows nothing about kernels.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator, Sequence
from functools import lru_cache

PLAIN = 16
"""Numbers up to this stay as they are, outside of grids; so do powers of two, which are mostly somebody's choice."""

GROUPS = (8, *range(2, 8), *range(9, 17))
"""Factors beside tiles: rows of tiles visited together, parts of a depth."""

MOST_GROUPS = 256
"""Numbers of the prompt up to this may be a number of groups."""

Place = tuple[int, int]
"""Line, from 1, and column of a token."""


def symbolic(source: str, shapes: Sequence[Sequence[int]], prompt: str = "") -> str:
    """`source` with its larger numbers as expressions of the extents in `shapes`, where there is one.

    Args:
        source: Python text.
        shapes: shapes of the region's inputs and outputs.
        prompt: text whose numbers stay as they are where they stand outside of grids: they can be copied.

    >>> symbolic("k[(16,)](x, B=64)", [(1000, 8)])
    'k[((1000 + 63) // 64,)](x, B=64)'
    """
    extents = sorted({n for shape in shapes for n in shape if n > 1}, reverse=True)
    grids, every = _launches(source)
    given = set(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", prompt))
    groups = sorted({int(n) for n in given if n.isdecimal() and 1 < int(n) <= MOST_GROUPS})
    lines = source.splitlines(True)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.NUMBER]
    for token in reversed(tokens):
        row, column = token.start
        in_grid = (row, column) in grids
        if token.string in given and not in_grid:
            continue
        text = _replacement(token.string, extents, shapes, groups, grids.get((row, column), every), in_grid)
        if text is not None:
            line = lines[row - 1]
            lines[row - 1] = line[:column] + (text if in_grid else f"({text})") + line[column + len(token.string) :]
    return "".join(lines)


def _replacement(
    number: str,
    extents: Sequence[int],
    shapes: Sequence[Sequence[int]],
    groups: Sequence[int],
    blocks: Sequence[int],
    in_grid: bool,
) -> str | None:
    """The expression in place of `number`; None where it stays."""
    if not number.isdecimal():
        counts = [*_products(extents, shapes), *_shared(shapes, groups)]
        counts += [f"{count} - 1" for count in counts]  # of an unbiased variance
        return next((f"1 / ({c})" for c in counts if repr(1 / max(1, _worth(c))) == number), None)
    value = int(number)
    if value in extents or (not in_grid and (value <= PLAIN or value & (value - 1) == 0)):
        return None
    found = itertools.chain(
        _products(extents, shapes),
        _shared(shapes, groups),
        _divided(extents, shapes, blocks),
        _tiles(extents, blocks),
    )
    return next((text for text in found if _worth(text) == value), None)


@lru_cache(1 << 16)
def _worth(text: str) -> int:
    """The value of digits and operators of this module's own making."""
    return int(eval(text))


def _products(extents: Sequence[int], shapes: Sequence[Sequence[int]]) -> Iterator[str]:
    """An extent, the elements of a tensor or of the end of its shape, a product of two extents."""
    yield from map(str, extents)
    for shape in shapes:
        for start in range(len(shape) - 1):
            yield " * ".join(map(str, shape[start:]))
    for a, b in itertools.combinations_with_replacement(extents, 2):
        yield f"{a} * {b}"


def _shared(shapes: Sequence[Sequence[int]], groups: Sequence[int]) -> Iterator[str]:
    """The elements of the end of a shape, dealt out to groups (of channels, say)."""
    for whole, count in itertools.product(_products((), shapes), groups):
        if _worth(whole) % count == 0:
            yield f"{whole} // {count}"


def _divided(extents: Sequence[int], shapes: Sequence[Sequence[int]], blocks: Sequence[int]) -> Iterator[str]:
    """Blocks that cover an extent or a product."""
    for whole, block in itertools.product(_products(extents, shapes), blocks):
        yield f"({whole} + {block - 1}) // {block}"


def _tiles(extents: Sequence[int], blocks: Sequence[int]) -> Iterator[str]:
    """Tiles that cover two extents; some times as many; some times the blocks of one extent, where it has several."""
    apart = [[f"({a} + {block - 1}) // {block}" for block in blocks if a > block] for a in extents]
    ways = list(itertools.chain.from_iterable(apart))
    of_two = itertools.chain.from_iterable(itertools.product(a, b) for a, b in itertools.permutations(apart, 2))
    pairs = [f"{one} * ({other})" for one, other in (*of_two, *itertools.product(ways, repeat=2))]
    yield from pairs
    for times in GROUPS:
        yield from (f"{times} * ({way})" for way in ways)
        yield from (f"{times} * ({pair})" for pair in pairs)


def _launches(source: str) -> tuple[dict[Place, tuple[int, ...]], tuple[int, ...]]:
    """Where the numbers in grids stand, with the block sizes of each one's launch; the block sizes of all launches."""
    found: dict[Place, tuple[int, ...]] = {}
    every: dict[int, None] = {}
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
            continue
        sizes = [k.value.value for k in node.keywords if isinstance(k.value, ast.Constant) and not _is_option(k.arg)]
        blocks = tuple(dict.fromkeys(n for n in sizes if type(n) is int and n > 1))
        every.update(dict.fromkeys(blocks))
        for number in ast.walk(node.func.slice):
            if isinstance(number, ast.Constant) and type(number.value) is int:
                found[number.lineno, number.col_offset] = blocks
    return found, tuple(every)


def _is_option(name: str | None) -> bool:
    return name in (None, "num_warps", "num_stages")


__all__ = ["symbolic"]
